"""Ditto: a global model by FedAvg, and a personal one held near it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.

    client m:  min_v  f_m(v) + (λ/2) ‖v − w*‖²,   w* = argmin Σ p_m f_m(w)

λ = 0 is local training on the same batches; λ → ∞ is the global model. The proximal centre is the w received at
the start of the round. λ is multiplied by the learning rate like every other part of the gradient (the Self-FL
paper's synthetic rule leaves it out, which oscillates for λ ≥ 1).

The authors sample clients in proportion to N_m and average equally; with uniform sampling, as here, the same
objective needs weights by examples (the default, "Ditto-w"). "equal" is Ditto-e, another objective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Tree
from kinfed.data.batches import LocalTraining
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]


@dataclass
class Client(Tree):
    v: Tensor  # [n, P] personal model, never leaves the client


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class Ditto(Algorithm[Server, Client, Down, Up]):
    lam: float = 1.0
    """λ: how firmly the personal model is held near the global one."""
    weights: str = "examples"
    """Weights of the average: "examples" (Ditto-w) or "equal" (Ditto-e)."""
    personal_lr: float | None = None
    """η_p of the personal branch; the common lr where none is given."""
    personal_steps: int | None = None
    """Steps of the personal branch; as many as the global branch where none is given."""

    def __post_init__(self) -> None:
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")
        rate = self._personal_work.lr
        if not 0 <= rate * self.lam < 2:
            raise ConfigError(
                f"lam must not be negative, and Ditto's personal step is unstable for lr * lam >= 2; "
                f"got {rate} * {self.lam}; lower one of them"
            )

    @property
    def _personal_work(self) -> LocalTraining:
        """The personal branch's work: the same stream of batches, its own rate (which decays alike) and steps."""
        training = self.training if self.personal_steps is None else self.training.with_steps(self.personal_steps)
        return training if self.personal_lr is None else replace(training, lr=self.personal_lr)

    def init_server(self, task: Task, clients: Population) -> Server:
        return Server(task.init(clients.seed))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        pull = (self.lam, down.w) if self.lam else None
        u = sgd(task, down.w, data.train.batches(self.training))  # the global branch
        v = sgd(task, client.v, data.train.batches(self._personal_work), pull=pull)  # ∇f(v) + λ (v − w)
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return Client(v), Up(u - down.w, count)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return Server(server.w + mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count))

    def averaged(self) -> str:
        return "delta"

    def gradients(self, count: Tensor) -> dict[int, Tensor]:
        one, other = self.training.num_steps(count), self._personal_work.num_steps(count)
        both = torch.minimum(one, other)  # the branches take the same batches
        return {2: both, 1: torch.maximum(one, other) - both}

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        return client.v

    def global_model(self, server: Server) -> Tensor:
        return server.w
