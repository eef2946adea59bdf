"""Pools that compute clients: in this process or by Ray."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
