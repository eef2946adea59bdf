"""Studies: many runs as one table. Its public names are in the stub beside this file."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
