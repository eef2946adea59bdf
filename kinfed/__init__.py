"""kinfed: personalized federated learning, one good model per client."""

from kinfed.algorithm import Algorithm
from kinfed.algorithms import make_algorithm
from kinfed.config import RunConfig, make_config
from kinfed.data.batches import Work
from kinfed.data.federation import Federation
from kinfed.errors import KinfedError
from kinfed.experiment import RunResult, run
from kinfed.simulation import simulate

__all__ = [
    "Algorithm",
    "Federation",
    "KinfedError",
    "RunConfig",
    "RunResult",
    "Work",
    "make_algorithm",
    "make_config",
    "run",
    "simulate",
]
__version__ = "0.1.0"
