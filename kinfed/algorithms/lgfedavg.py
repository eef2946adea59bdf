"""LG-FedAvg: local lower layers (a representation of one's own), global upper layers.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning
with Local and Global Representations, 2020.

    θ_m = (local_m, global);   active clients train both, the server averages the global part equally

By default the last two layers are global (the last one where there are only two), as the method describes. The
authors' CIFAR configuration shares the *convolutions* instead, by the order of a list; `head` by name gives
that. Everything global, by name, is FedAvg with equal weights; a model of one layer is refused otherwise. The authors
start from a network trained by FedAvg: use the run's warm start. They report each user's best round on test data;
here, as everywhere, the last round counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.fedper import FedPer
from kinfed.data.federation import Population
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    head_layers: int = 2
    """How many of the last layers are global; where the model has no more, one less than it has."""
    head: str = ""
    """Global layers by name, separated by commas, instead of `head_layers`."""
    weights: str = "equal"
    """Weights of the average: "equal" (paper) or "examples"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_layers < 1:
            raise ConfigError(f"LG-FedAvg shares at least one layer; got head_layers = {self.head_layers}")

    def own_mask(self, task: Task) -> Tensor:
        names = task.layer_names()
        last = min(self.head_layers, len(names) - 1)
        shared: Tensor = task.layer_mask(self.named_head or names[len(names) - last :])
        return torch.logical_not(shared).to(task.device)

    def check(self, task: Task, clients: Population) -> None:
        if len(task.layer_names()) < 2 and not self.head:
            raise ConfigError(
                f"LG-FedAvg keeps lower layers with the clients, but the model has only {task.layer_names()[0]!r}; "
                "choose a deeper model"
            )
        super().check(task, clients)
