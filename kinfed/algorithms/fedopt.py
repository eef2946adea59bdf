"""FedOpt: FedAvg whose server treats the average update as a gradient and takes an adaptive step with it.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
Algorithm 2 (FedAdagrad, FedYogi, FedAdam).

    Δ = Σ p_m (θ_m − w)                        of the clients that replied
    m ← β₁ m + (1 − β₁) Δ
    v ← v + Δ²                                 "adagrad"
        v − (1 − β₂) Δ² sign(v − Δ²)           "yogi"
        β₂ v + (1 − β₂) Δ²                     "adam"
    w ← w + η m / (√v + τ)

The paper's v starts at τ² or above; here at τ². There is no bias correction, as in the paper. The clients' side is
FedAvg's, or FedProx's with μ > 0 (whose stragglers are dropped all the same): any rule of local training goes with
any rule of the server. The paper writes an equal mean and weighs by examples in its experiments, as is the default
here. It leaves β₁ = 0 for Adagrad; the registered `fedadagrad` does too.

Coordinates whose update is large against τ move by about η per round whatever the clients' learning rate, so η is
tuned beside it, on a scale of its own: a good value is usually between 0.01 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.algorithms.fedavg import Client, Down, Up
from kinfed.algorithms.fedprox import FedProx
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    m: Tensor  # [P] momentum of the average update
    v: Tensor  # [P] size of its squares


@dataclass(frozen=True)
class FedOpt(Algorithm[Server, Client, Down, Up]):
    optimizer: str = "adam"
    """The server's rule for v: "adam", "yogi" or "adagrad"."""
    server_lr: float = 0.1
    """η, the server's learning rate."""
    beta1: float = 0.9
    """β₁, momentum of the average update; 0 for none."""
    beta2: float = 0.99
    """β₂, memory of its squares (without meaning for adagrad)."""
    tau: float = 1e-3
    """τ, how adaptive: updates small against τ are scaled alike, larger ones to equal size."""
    weights: str = "examples"
    """Weights of the average: "examples" (N_m) or "equal"."""
    mu: float = 0.0
    """Strength of FedProx's proximal term in local training; 0 is FedAvg's."""

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "yogi", "adagrad"):
            raise ConfigError(f"optimizer is adam, yogi or adagrad; got {self.optimizer!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must lie in [0, 1); got {getattr(self, name)}")
        for name in ("server_lr", "tau"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be positive; got {getattr(self, name)}")
        _ = self._local  # refuses unknown weights and a mu that is unstable

    @property
    def _local(self) -> FedProx:
        """The clients' side, which is FedProx's; with μ = 0, FedAvg's."""
        return FedProx(self.training, self.weights, mu=self.mu)

    def init_server(self, task: Task, clients: Population) -> Server:
        w = task.init(clients.seed)
        return Server(w, torch.zeros_like(w), torch.full_like(w, self.tau**2))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return self._local.init_client(task, data)

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        return self._local.client_update(task, client, down, data)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        delta = mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count)  # Δ
        m = self.beta1 * server.m + (1 - self.beta1) * delta
        square = delta.square()
        if self.optimizer == "adagrad":
            v = server.v + square
        elif self.optimizer == "yogi":
            v = server.v - (1 - self.beta2) * square * torch.sign(server.v - square)
        else:
            v = self.beta2 * server.v + (1 - self.beta2) * square
        return Server(server.w + self.server_lr * m / (v.sqrt() + self.tau), m, v)

    def averaged(self) -> str:
        return "delta"

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return self._local.personalize(task, client, down, data)

    def global_model(self, server: Server) -> Tensor:
        return server.w
