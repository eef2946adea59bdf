"""The report: one self-contained HTML page about one or several runs, finished, still going, or copied from another
machine: it reads the files of run folders and nothing else."""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
