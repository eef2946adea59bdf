"""Marks, axes, colours and number formats of figures, in the page and as still SVG."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
