"""Any module as rows of parameters: layout, buffers, randomness by key, trial of a model."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
