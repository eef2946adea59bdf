"""LG-FedAvg: local lower layers (a representation of one's own), global upper layers.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated Learning
with Local and Global Representations, 2020.

    θ_m = (local_m, global);   active clients train both, the server averages the global part equally

By default the last two layers are global (the last one where there are only two), as the method describes. The
authors' CIFAR configuration shares the *convolutions* instead, by the order of a list; `head` by name gives
that. Everything global is FedAvg with equal weights. The authors start from a network trained by FedAvg: use the
run's warm start. They report each user's best round on test data; here, as everywhere, the last round counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.fedper import FedPer
from kinfed.task import Task


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    head_layers: int = 2
    """How many of the last layers are global, at most (one less than there are layers, and at least one)."""
    head: str = ""
    """Global layers by name, separated by commas, instead of `head_layers`."""
    weights: str = "equal"
    """Weights of the average: "equal" (paper) or "examples"."""

    def own_mask(self, task: Task) -> Tensor:
        names = task.layer_names()
        chosen = tuple(name.strip() for name in self.head.split(",") if name.strip())
        last = max(1, min(self.head_layers, len(names) - 1))
        shared: Tensor = task.layer_mask(chosen or names[len(names) - last :])
        return torch.logical_not(shared).to(task.device)
