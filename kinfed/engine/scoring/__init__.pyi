from kinfed.engine.scoring.score import FALSE_REJECT as FALSE_REJECT
from kinfed.engine.scoring.score import false_accepts_at as false_accepts_at
from kinfed.engine.scoring.score import operating_points as operating_points
from kinfed.engine.scoring.score import position_sums as position_sums
