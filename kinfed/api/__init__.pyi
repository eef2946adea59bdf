from kinfed.api.progress import LiveDisplay as LiveDisplay
from kinfed.api.progress import Speed as Speed
from kinfed.api.progress import total_rounds as total_rounds
from kinfed.api.result_views import as_plotly as as_plotly
