from kinfed.trackers.track import TRACKERS as TRACKERS
from kinfed.trackers.track import make_tracker as make_tracker
from kinfed.trackers.track import make_trackers as make_trackers
