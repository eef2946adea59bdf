"""kinfed for people who work in Python, in a notebook or a script: what `kinfed.run` shows while it runs, and results
as tables, figures and pages. The command line is the sibling of this room.
"""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
