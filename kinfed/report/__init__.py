"""The report: one self-contained HTML page about one or several runs.

It reads the files of run folders and nothing else, so it works on a finished run, on one still going, and on one
copied from another machine.
"""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
