from kinfed.engine.zoo.lora import load_adapter as load_adapter
from kinfed.engine.zoo.lora import save_adapter as save_adapter
from kinfed.engine.zoo.pretrained import minilm as minilm
from kinfed.engine.zoo.pretrained import random_minilm as random_minilm
