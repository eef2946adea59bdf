"""The engine: rows of parameters in, gradients, steps and scores out, by the fastest backend that fits a model."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
