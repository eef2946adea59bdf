"""kinfed: personalized federated learning, one good model per client."""

from kinfed.core.door import find_moved, open_door
from kinfed.version import __version__ as __version__

__getattr__, __dir__, __all__ = open_door(__name__, __file__)

find_moved()
