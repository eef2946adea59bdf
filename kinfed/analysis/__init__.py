"""Conclusions from results: comparison of methods with intervals, and gains of clients."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
