from kinfed.engine.zoo.bert import minilm as minilm
from kinfed.engine.zoo.bert import random_minilm as random_minilm
