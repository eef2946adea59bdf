"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
2019.

    Δ = w − Σ p_m θ_m,   v ← γ v + Δ,   w ← w − η_s v            (Nesterov: w ← w − η_s (γ v + Δ))

γ = 0 with η_s = 1 is FedAvg. The momentum sees the average of a round once: updating it client by client, as
some released code does, keeps only the last client's update and applies it as often as there are clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.algorithms.fedavg import Client, Down, FedAvg, Up
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    v: Tensor  # [P] momentum


@dataclass(frozen=True)
class FedAvgM(Algorithm[Server, Client, Down, Up]):
    weights: str = "examples"
    """Weights of the average: "examples" (N_m) or "equal"."""
    gamma: float = 0.9
    """Momentum γ; 0 is FedAvg."""
    server_lr: float = 1.0
    """η_s."""
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < 1:
            raise ConfigError(f"gamma must lie in [0, 1); got {self.gamma}")
        if not self.server_lr > 0:
            raise ConfigError(f"server_lr must be positive; got {self.server_lr}")
        _ = self._fedavg  # refuses unknown weights

    @property
    def _fedavg(self) -> FedAvg:
        """The clients' side, which is FedAvg's."""
        return FedAvg(self.training, self.weights)

    def init_server(self, task: Task, clients: Population) -> Server:
        w = task.init(clients.seed)
        return Server(w, torch.zeros_like(w))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return self._fedavg.init_client(task, data)

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        return self._fedavg.client_update(task, client, down, data)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        delta = -mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count)  # Δ
        v = self.gamma * server.v + delta
        step = self.gamma * v + delta if self.nesterov else v
        return Server(server.w - self.server_lr * step, v)

    def averaged(self) -> str:
        return "delta"

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self._fedavg.personalize(task, client, down, data)

    def global_model(self, server: Server) -> Tensor:
        return server.w
