from kinfed.tuning.tuner import Started as Started
from kinfed.tuning.tuner import read_tuning as read_tuning
from kinfed.tuning.tuner import tune as tune
from kinfed.tuning.tuning_job import parse_ranges as parse_ranges
from kinfed.tuning.while_training import tune_while_training as tune_while_training
