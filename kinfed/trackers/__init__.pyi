from kinfed.trackers.tracker_names import TRACKERS as TRACKERS
from kinfed.trackers.tracker_names import make_tracker as make_tracker
from kinfed.trackers.tracker_names import make_trackers as make_trackers
