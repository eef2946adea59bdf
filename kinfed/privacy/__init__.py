"""Privacy of examples: noisy training, what it costs, and what a run may spend."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
