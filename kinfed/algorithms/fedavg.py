"""FedAvg: one model for all, the average of what clients make of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, Algorithm 1 (FederatedAveraging).

    min_w  Σ_m p_m f_m(w),      p_m ∝ N_m ("examples") or 1 ("equal")

The personal model is the client's own after its last local training (fine-tuned); the global model is evaluated
beside it. A client never active has no own model and uses the current global one.

`smoothing` c < 1 keeps w ← (1 − c) w + c ŵ. With c = "participation" it is the smoothing average of Self-FL and
nothing else of it: the control that must stand beside Self-FL.

Updates travel as differences u_m − w; with Σ p = 1 the average is the same as that of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]
    c: Tensor  # [] weight of the new average


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] the last local model
    seen: Tensor  # [n] bool


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class FedAvg(Algorithm[Server, Client, Down, Up]):
    weights: str = "examples"
    """Weights of the average: "examples" (N_m) or "equal"."""
    smoothing: float | str = 1.0
    """c in w ← (1 − c) w + c ŵ: a number in (0, 1], or "participation" for the participation rate."""

    def __post_init__(self) -> None:
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")
        c = self.smoothing
        if c != "participation" and (isinstance(c, str) or not 0 < c <= 1):
            raise ConfigError(f'smoothing is a number in (0, 1] or "participation"; got {c!r}')

    def init_server(self, task: Task, clients: Population) -> Server:
        c = clients.participation if isinstance(self.smoothing, str) else self.smoothing
        return Server(task.init(clients.seed), torch.tensor(c, dtype=torch.float64))

    def init_client(self, task: Task, data: Cohort) -> Client:
        start = task.init(data.seed).expand(len(data), -1)
        return Client(start, torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        u = self.train(task, down.w, data)
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return Client(u, torch.ones_like(client.seen)), Up(u - down.w, count)

    def train(self, task: Task, w: Tensor, data: Cohort) -> Tensor:
        """Local training from the received model; what related methods change."""
        return sgd(task, w, data.train.batches(self.training))

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        step = mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count)  # Σ p_m (u_m − w)
        return Server(server.w + float(server.c) * step, server.c)

    def averaged(self) -> str:
        return "delta"

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return torch.where(client.seen[:, None].to(down.w.device), client.theta, down.w)

    def global_model(self, server: Server) -> Tensor:
        return server.w
