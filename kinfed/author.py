"""Everything that the file of an algorithm needs, in one import.

from kinfed.author import Algorithm, Cohort, Population, RoundInfo, Task, Tree, option, sgd
"""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
