"""Clients that come to a finished run, and personal models for them; clients that leave it."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
