"""FedRep: a shared representation; each client first fits its head to it, then improves it.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021, Algorithm 1 (FedRep).

    client m:  `head_steps` steps on head_m with the representation fixed, then the work's steps on the
               representation with head_m fixed;  the server averages representations equally

Head and representation use batches of their own streams: fitting the head to the very batches on which the
representation is judged next would let it memorize them. An empty head is FedAvg with equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.fedper import FedPer
from kinfed.data.federation import Cohort
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class FedRep(FedPer):
    weights: str = "equal"
    """Weights of the average: "equal" (paper) or "examples"."""
    head_steps: int | None = None
    """Steps on the head per round; as many as the work has where none is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_steps is not None and self.head_steps < 1:
            raise ConfigError(f"head_steps must be at least 1; got {self.head_steps}")

    def train(self, task: Task, theta: Tensor, own: Tensor, data: Cohort) -> Tensor:
        if bool(own.any()):
            training = self.training if self.head_steps is None else self.training.with_steps(self.head_steps)
            theta = sgd(task, theta, data.train.batches(training, stream="head"), mask=own)
        return sgd(task, theta, data.train.batches(self.training), mask=~own)

    def gradients(self, count: Tensor) -> dict[int, Tensor]:
        head = self.training if self.head_steps is None else self.training.with_steps(self.head_steps)
        return {1: self.training.num_steps(count) + head.num_steps(count)}
