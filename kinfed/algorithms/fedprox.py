"""FedProx: FedAvg whose local training is held near the received model, and which keeps partial work.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.

    client m:  min_θ  f_m(θ) + (μ/2) ‖θ − w‖²,   w the model received this round

μ = 0 is FedAvg, bit for bit. Stragglers' partial work is used (their γ-inexact solutions); FedAvg drops them.
The proximal problem is solved by the same SGD steps as FedAvg's, as in the authors' experiments.

Clients are drawn uniformly and weighed by N_m, as in those experiments; Algorithm 2 as printed draws them with
probability N_m/N and averages equally.
"""

from dataclasses import dataclass

from torch import Tensor

from kinfed.algorithms.base import check_stable
from kinfed.algorithms.fedavg import FedAvg
from kinfed.author import Cohort, Range, Task, option, sgd


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: float = option(0.1, "μ: strength of the proximal term; 0 is FedAvg", ge=0, tune=Range(1e-3, 1.0))

    traits = frozenset({"keeps stragglers", "state to deploy"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stable("FedProx's step", "mu", self.training.lr, self.mu)

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        proximal = (self.mu, w) if self.mu else None
        return sgd(task, w, data.train.batches(self.training), proximal=proximal)  # ∇f(θ) + μ (θ − w)
