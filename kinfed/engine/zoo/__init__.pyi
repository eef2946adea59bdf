from kinfed.engine.zoo.adapter_files import load_adapter as load_adapter
from kinfed.engine.zoo.adapter_files import save_adapter as save_adapter
from kinfed.engine.zoo.pretrained import minilm as minilm
from kinfed.engine.zoo.pretrained import random_minilm as random_minilm
