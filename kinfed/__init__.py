"""kinfed: personalized federated learning, one good model per client."""

from kinfed import moved
from kinfed.core.door import open_door
from kinfed.version import __version__ as __version__

__getattr__, __dir__, __all__ = open_door(__name__, __file__)

moved.install()
