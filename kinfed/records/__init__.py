"""Files of a run, written and read: folders, journals, checkpoints, comparison of runs."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
