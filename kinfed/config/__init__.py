"""Settings of a run: their declaration, their reading, presets and requirements. Needs no torch."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
