"""Stages of an update between client and server: codecs, screening, robust rules, secure sums, noise."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
