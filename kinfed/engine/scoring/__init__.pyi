from kinfed.engine.scoring.detection_rates import FALSE_REJECT as FALSE_REJECT
from kinfed.engine.scoring.detection_rates import false_accepts_at as false_accepts_at
from kinfed.engine.scoring.detection_rates import operating_points as operating_points
