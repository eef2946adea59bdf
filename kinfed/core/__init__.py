"""Foundations that know nothing of learning: trees of tensors, random numbers, options, registries, files, threads."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
