"""Boosted trees: bins, losses, growth from sums of histograms, and ensembles as rows of personal models."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
