"""Data: examples in memory, federations of clients, sources, partitions, tables, and what can be said of them."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
