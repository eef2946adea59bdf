"""Rounds: who takes part, what is sent, when the server moves on."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
