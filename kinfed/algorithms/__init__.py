"""Methods of federated learning, a file each. `algorithm_names` has a line for every name."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
