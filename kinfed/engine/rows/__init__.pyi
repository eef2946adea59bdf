from kinfed.engine.rows.keyed_random import Draws as Draws
from kinfed.engine.rows.keyed_random import KeyedDraws as KeyedDraws
