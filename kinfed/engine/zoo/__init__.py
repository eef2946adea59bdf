"""The models that come with kinfed; kinfed.engine.zoo.models names them."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
