"""pFedMe: personal models as Moreau envelopes around one global model.

T. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1.

    min_w  (1/M) Σ_m F_m(w),     F_m(w) = min_θ f_m(θ) + (λ/2) ‖θ − w‖²,     ∇F_m(w) = λ (w − θ̂_m(w))

The work's steps are the R local rounds; each draws one batch, takes K steps towards the proximal point θ̂ and then
one step of w_m. λ → ∞ is FedAvg's model for everyone; λ = 0 never moves w and is refused.

Where this differs from the authors' repository, it follows the paper: only active clients train (the repository
trains all and averages some, which refreshes everyone's personal model for free), the average is equal
(`weights="examples"` for the repository's), and the inner steps have no weight decay of their own (`inner_decay`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Tree
from kinfed.data.batches import Batch
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import each_step
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]


@dataclass
class Client(Tree):
    theta: Tensor  # [n, P] last approximate proximal point
    seen: Tensor  # [n] bool


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P] w_m − w
    count: Tensor | None  # [n] examples; absent with equal weights


@dataclass(frozen=True)
class PFedMe(Algorithm[Server, Client, Down, Up]):
    lam: float = 15.0
    """λ: how firmly personal models are held near the local copy of w."""
    inner_steps: int = 5
    """K: steps towards the proximal point per batch."""
    personal_lr: float | None = None
    """η_p of the inner steps; the common lr where none is given."""
    beta: float = 1.0
    """β of w ← (1 − β) w + β mean(w_m); may exceed 1."""
    weights: str = "equal"
    """Weights of the average: "equal" (paper) or "examples" (repository)."""
    inner_decay: float = 0.0
    """Weight decay of the inner steps beside that of the work (the repository uses 0.001)."""
    recompute: bool = False
    """Evaluate a proximal point freshly computed at the current w (K steps on training data) for every client."""

    takes_momentum = False

    def __post_init__(self) -> None:
        if self.weights not in ("examples", "equal"):
            raise ConfigError(f"weights is examples or equal; got {self.weights!r}")
        if self.inner_steps < 1 or not self.beta > 0 or self.inner_decay < 0:
            raise ConfigError("pFedMe needs inner_steps >= 1, beta > 0 and inner_decay >= 0")
        if not 0 < self.training.lr * self.lam <= 1:
            raise ConfigError(
                f"pFedMe needs 0 < lr * lam <= 1 (at 0 the global model never moves, above 1 it overshoots); "
                f"got {self.training.lr} * {self.lam}"
            )
        if not 0 < self._inner_lr(self.training.lr) * self.lam < 2:
            raise ConfigError(
                f"pFedMe's inner steps need 0 < personal_lr * lam < 2 (they are unstable above); "
                f"got {self._inner_lr(self.training.lr)} * {self.lam}"
            )

    def _inner_lr(self, lr: float) -> float:
        """η_p, decaying in step with the common rate."""
        return lr if self.personal_lr is None else self.personal_lr * lr / self.training.lr

    def init_server(self, task: Task, clients: Population) -> Server:
        return Server(task.init(clients.seed))

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1), torch.zeros(len(data), dtype=torch.bool))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        batches = data.train.batches(self.training)
        eta, eta_p = batches.lr, self._inner_lr(batches.lr)
        w, theta = down.w.clone(), down.w.clone()
        for batch, (w_m, x) in each_step(batches, w, theta):
            for _ in range(self.inner_steps):
                self._inner_step(task, x, batch, eta_p, w_m)
            w_m.lerp_(x, eta * self.lam)  # w_m ← w_m − η λ (w_m − θ̂)
        count = data.train.count.to(torch.float32) if self.weights == "examples" else None
        return Client(theta, torch.ones_like(client.seen)), Up(w - down.w, count)

    def _inner_step(self, task: Task, x: Tensor, batch: Batch, lr: float, center: Tensor) -> None:
        decay = self.inner_decay + self.training.weight_decay
        if decay:
            # λ (θ − w) + κ θ = (λ + κ) (θ − w λ/(λ + κ))
            total = self.lam + decay
            task.descend_(x, batch, lr, (total, center * (self.lam / total)))
        else:
            task.descend_(x, batch, lr, (self.lam, center))  # ∇f(θ) + λ (θ − w_m)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return Server(server.w + self.beta * mean_of(up.delta, torch.ones(len(ids)) if up.count is None else up.count))

    def averaged(self) -> str:
        return "delta"

    def gradients(self, count: Tensor) -> dict[int, Tensor]:
        return {self.inner_steps: self.training.num_steps(count)}

    def personal_gradients(self, count: Tensor) -> dict[int, Tensor]:
        return {self.inner_steps: torch.ones_like(count)} if self.recompute else {}

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        if not self.recompute:
            return torch.where(client.seen[:, None].to(down.w.device), client.theta, down.w)
        theta = down.w.clone()
        batches = data.train.batches(self.training.with_steps(1), stream="adapt")
        for batch, (x, w) in each_step(batches, theta, down.w.clone()):
            for _ in range(self.inner_steps):
                self._inner_step(task, x, batch, self._inner_lr(batches.lr), w)
        return theta

    def global_model(self, server: Server) -> Tensor:
        return server.w
