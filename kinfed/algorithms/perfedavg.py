"""Per-FedAvg: a global model from which one gradient step on own data leads to a good personal model.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach, NeurIPS 2020, Algorithm 1.

    min_w  (1/M) Σ_m f_m(w − α ∇f_m(w))

One local step with independent batches b, b', b'':

    w̃ = w − α g(w; b),   v = g(w̃; b')
    FO:  w ← w − β v
    HF:  w ← w − β (v − α [g(w + δ v; b'') − g(w − δ v; b'')] / (2 δ))        (Hessian-free)

The personal model is w after `adapt_steps` steps of size α on the client's *training* data, fresh for all clients;
a widely used repository adapts on test batches instead. α = 0 with FO is FedAvg with rate β and equal weights.
Clients with few examples draw b, b', b'' from the same examples, each in an order of its own: correlated, as they
must be. δ shrinks with ‖v‖ beyond 1, so that the difference quotient stays local.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm, mean_of
from kinfed.core.tree import Nothing, Tree
from kinfed.data.federation import Cohort, Population
from kinfed.engine.sgd import each_step, gradient, sgd, toward_zero
from kinfed.engine.task import Task
from kinfed.errors import ConfigError


@dataclass
class Server(Tree):
    w: Tensor  # [P]


@dataclass
class Down(Tree):
    w: Tensor  # [n, P]


@dataclass
class Up(Tree):
    delta: Tensor  # [n, P]


@dataclass(frozen=True)
class PerFedAvg(Algorithm[Server, Nothing, Down, Up]):
    variant: str = "fo"
    """"fo" (first order) or "hf" (Hessian-free)."""
    alpha: float | None = None
    """α of the inner (adaptation) step; the common lr where none is given."""
    beta: float | None = None
    """β of the outer step; the common lr where none is given."""
    delta: float = 1e-3
    """δ of the Hessian-free difference quotient."""
    adapt_steps: int = 1
    """Steps on training data that turn w into a personal model."""

    takes_momentum = False

    def __post_init__(self) -> None:
        if self.variant not in ("fo", "hf"):
            raise ConfigError(f"variant is fo or hf; got {self.variant!r}")
        if (self.alpha is not None and self.alpha < 0) or (self.beta is not None and not self.beta > 0):
            raise ConfigError(f"Per-FedAvg needs alpha >= 0 and beta > 0; got {self.alpha} and {self.beta}")
        if not self.delta > 0 or self.adapt_steps < 1:
            raise ConfigError(
                f"delta must be positive and adapt_steps at least 1; got {self.delta}, {self.adapt_steps}"
            )

    def _rates(self, lr: float) -> tuple[float, float]:
        """α and β of a round, decaying in step with the common rate."""
        decay = lr / self.training.lr
        return lr if self.alpha is None else self.alpha * decay, lr if self.beta is None else self.beta * decay

    def init_server(self, task: Task, clients: Population) -> Server:
        return Server(task.init(clients.seed))

    def download(self, server: Server, ids: Tensor) -> Down:
        return Down(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        batches = data.train.batches(self.training)
        streams = ("meta", "hessian") if self.variant == "hf" else ("meta",)
        others = [data.train.batches(self.training, stream=name) for name in streams]
        alpha, beta = self._rates(batches.lr)
        decay = self.training.weight_decay
        w = down.w.clone()
        for (b, [x]), (_, b1), *rest in zip(each_step(batches, w), *others, strict=True):
            tilde = x.clone()
            task.descend_(tilde, b, alpha, toward_zero(x, decay))
            v = gradient(task, tilde, b1, decay)
            for _, b2 in rest:  # one with "hf", none with "fo"
                delta = self.delta / v.norm(dim=1, keepdim=True).clamp_min(1.0)
                plus, minus = (gradient(task, torch.addcmul(x, v, sign * delta), b2, decay) for sign in (1, -1))
                v = torch.addcmul(v, plus - minus, -alpha / (2 * delta))  # v − α q,  q = (plus − minus) / 2δ
            x.add_(v, alpha=-beta)
        return Nothing(), Up(w - down.w)

    def aggregate(self, server: Server, ids: Tensor, up: Up) -> Server:
        return Server(server.w + mean_of(up.delta, torch.ones(len(ids))))

    def averaged(self) -> str:
        return "delta"

    def gradients(self, count: Tensor) -> dict[int, Tensor]:
        steps = self.training.num_steps(count)
        return {1: 2 * steps, 2: steps} if self.variant == "hf" else {1: 2 * steps}

    def personal_gradients(self, count: Tensor) -> dict[int, Tensor]:
        return {1: torch.full_like(count, self.adapt_steps)}

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        batches = data.train.batches(self.training.with_steps(self.adapt_steps), stream="adapt")
        alpha, _ = self._rates(batches.lr)
        return sgd(task, down.w, batches, lr=alpha) if alpha else down.w

    def global_model(self, server: Server) -> Tensor:
        return server.w
