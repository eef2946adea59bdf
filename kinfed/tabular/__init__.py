"""A model for every site of a table: `kinfed fit`."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
