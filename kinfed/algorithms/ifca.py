"""IFCA: K models on the server; each client takes part in the one that fits its data best.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, Algorithm 1
(model averaging).

    client i:  j = argmin_k f_i(ω_k) on its *training* data, train ω_j;   server: ω_j ← mean of the models of cluster j

K = 1 is FedAvg, by default with equal weights. An empty cluster stays as it was; ties go to the lower number. The
personal model is ω_j with j chosen afresh on training data (a released script chooses it on test data).

K identical starts would never separate, so the default start is K independent random models; `init="kmeans"` lets
everyone train once from a common start and takes the k-means centres of the results (a "good initialization"). Its
first round calls on all clients, whatever the participation. The first random start is that of all methods of the
seed; with a warm start only this one is warm, the others are random as ever: use "kmeans" after a warm start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.algorithms.clustering import coordinates, k_means, num_distinct
from kinfed.algorithms.fedfomo.weights import mean_losses
from kinfed.core import rng
from kinfed.core.tree import Nothing, Tree, take_rows
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    omega: Tensor  # [K, P]
    cluster: Tensor  # [N] int64 last known choice, −1 before the first
    round: Tensor  # [] int64
    key: Tensor  # [] int64


@dataclass
class Down(Tree):
    omega: Tensor  # [n, K, P]; the common start once ([n, 1, P]) before k-means


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] θ − ω_j
    cluster: Tensor  # [n] int64 j
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class IFCA(Algorithm[Server, Nothing, Down, Up]):
    clusters: int = 4
    """K, the number of models."""
    init: str = "random"
    """Start of the models: "random" (independent) or "kmeans" (centres of everyone's first training)."""
    weights: str = "equal"
    """Weights of the averages: "equal" (paper) or "examples"."""

    private = False
    leaks = ("the number of the model with the lowest loss on training examples",)

    def __post_init__(self) -> None:
        if self.clusters < 1:
            raise ConfigError(f"clusters must be at least 1; got {self.clusters}")
        if self.init not in ("random", "kmeans"):
            raise ConfigError(f"init is random or kmeans; got {self.init!r}")
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")

    def init_server(self, task: Task, clients: Population) -> Server:
        same = self.init == "kmeans"
        omega = torch.stack([task.init(clients.seed, 0 if same else k) for k in range(self.clusters)])
        cluster = torch.full((clients.num_clients,), -1, dtype=torch.int64)
        return Server(omega, cluster, torch.tensor(0), clients.key("ifca"))

    def _starts(self, server: Server) -> bool:
        """Whether the coming round is the one whose results are the k-means start."""
        return self.init == "kmeans" and not bool(server.round)

    def call(self, server: Server, active: Tensor) -> Tensor:
        return torch.arange(len(server.cluster)) if self._starts(server) else active

    def download(self, server: Server, ids: Tensor) -> Down:
        omega = server.omega[:1] if self._starts(server) else server.omega  # still all alike: one is enough
        return Down(omega.expand(len(ids), -1, -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        j = self._best(task, down, data)
        omega = down.omega[torch.arange(len(j)), j]
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return client, Up(sgd(task, omega, data.train.batches(self.training)) - omega, j, count)

    def _best(self, task: Task, down: Down, data: Cohort) -> Tensor:
        """[n] argmin_k f_i(ω_k) on training data; a model with a non-finite loss is never chosen over a finite one."""
        losses = mean_losses(task, list(down.omega.unbind(1)), data.train)
        return torch.argmin(torch.nan_to_num(losses, nan=torch.inf), 1).to(down.omega.device)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        cluster, omega = server.cluster.clone(), server.omega.clone()
        label = cluster[ids] = up.cluster.cpu()
        if self._starts(server):
            x = coordinates(up.delta)  # all from one model: their differences are those of the models
            label = k_means(x, min(self.clusters, num_distinct(x)), rng.numpy_seed(server.key)).label
            cluster[ids] = label
        for k in torch.unique(label).tolist():
            rows = (label == k).nonzero().squeeze(1)
            weight = torch.ones(len(rows)) if up.count is None else up.count[rows]
            omega[k] += mean_of(take_rows(up.delta, rows), weight)
        return Server(omega, cluster, server.round + 1, server.key)

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return down.omega[torch.arange(len(data)), self._best(task, down, data)]

    def server_figures(self, server: Server) -> dict[str, Any]:
        return {
            "clusters_in_use": int(torch.unique(server.cluster[server.cluster >= 0]).numel()),
            "cluster": server.cluster,
        }
