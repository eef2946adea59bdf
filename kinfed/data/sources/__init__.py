"""Data sets by name in SOURCES, and tables of the user's own. Names are fetched on first use: data sets bring pyarrow
and Pillow, which a run on arrays does not need."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
