"""FedProx: FedAvg whose local training is held near the received model, and which keeps partial work.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020,
Algorithm 2.

    client m:  min_θ  f_m(θ) + (μ/2) ‖θ − w‖²,   w the model received this round

μ = 0 is FedAvg, bit for bit. Stragglers' partial work is used (their γ-inexact solutions); FedAvg drops them.
The proximal problem is solved by the same SGD steps as FedAvg's, as in the authors' experiments.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.fedavg import FedAvg
from kinfed.data.federation import Cohort
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: float = 0.1
    """Strength of the proximal term; 0 is FedAvg."""

    keeps_stragglers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mu * self.training.lr < 2:
            raise ConfigError(
                f"mu must not be negative, and FedProx's step is unstable for lr * mu >= 2; "
                f"got {self.training.lr} * {self.mu}; lower one of them"
            )

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        pull = (self.mu, w) if self.mu else None
        return sgd(task, w, data.train.batches(self.training), pull=pull)  # ∇f(θ) + μ (θ − w)
