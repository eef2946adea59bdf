"""Real deployment: every client keeps its data and its personal model on a machine of its own, and Flower carries the
messages.
"""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
