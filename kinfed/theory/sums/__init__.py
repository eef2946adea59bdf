"""Models that are fitted exactly from sums over sites: mixed models, and Cox regression stratified by site."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
