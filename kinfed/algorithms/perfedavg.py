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

Running statistics (of BatchNorm, say) move with the passes of b and b', as in any training, and go with w; the
difference quotient leaves them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.facade import (
    Algorithm,
    Batches,
    Cohort,
    DeltaUp,
    GradientStep,
    Mix,
    ModelDown,
    ModelState,
    Nothing,
    Population,
    PrivacyProfile,
    Range,
    RoundInfo,
    ServerModels,
    Task,
    each_step,
    gradient,
    gradient_steps,
    mean_update,
    option,
    sgd,
    toward_zero,
    train_models,
)


@dataclass(frozen=True)
class PerFedAvg(Algorithm[ModelState, Nothing, ModelDown, DeltaUp]):
    variant: Literal["fo", "hf"] = option("fo", "first order, or Hessian-free")
    alpha: float | None = option(
        None, "α of the inner (adaptation) step; the common lr where none is given", ge=0, tune=Range(1e-3, 0.5)
    )
    beta: float | None = option(None, "β of the outer step; the common lr where none is given", gt=0)
    delta: float = option(1e-3, "δ of the Hessian-free difference quotient", gt=0)
    adapt_steps: int = option(1, "steps on training data that turn w into a personal model", ge=1)

    traits = frozenset({"no momentum"})
    averages = ("delta",)

    def _rates(self, lr: float) -> tuple[float, float]:
        """α and β of a round, decaying in step with the common rate."""
        decay = lr / self.training.lr
        return lr if self.alpha is None else self.alpha * decay, lr if self.beta is None else self.beta * decay

    def init_server(self, task: Task, population: Population) -> ModelState:
        return ModelState(task.init(population.seed))

    def download(self, server: ModelState, ids: Tensor) -> ModelDown:
        return ModelDown(server.w.expand(len(ids), -1))

    def client_update(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> tuple[Nothing, DeltaUp]:
        batches, meta = (data.train.batches(self.training, stream=name) for name in ("batches", "meta"))
        alpha, beta = self._rates(batches.lr)
        decay = self.training.weight_decay
        w = down.w.clone()
        if self.variant == "hf":
            hessian = data.train.batches(self.training, stream="hessian")
            self._hessian_free_steps(task, w, (batches, meta, hessian), alpha, beta)
        else:
            moves = (
                Mix("tilde", "w", "w", 0.0),
                GradientStep("tilde", alpha, decay=decay),  # w̃ = w − α g(w; b)
                GradientStep("w", beta, at="tilde", decay=decay, stream=1),  # w ← w − β g(w̃; b')
            )
            train_models(task, [batches, meta], moves, {"w": w})
        return Nothing(), DeltaUp(w.sub_(down.w), None)

    def _hessian_free_steps(
        self, task: Task, w: Tensor, streams: tuple[Batches, Batches, Batches], alpha: float, beta: float
    ) -> None:
        """In place."""
        batches, meta, hessian = streams
        decay = self.training.weight_decay
        for (b, [x]), (_, b1), (_, b2) in zip(each_step(batches, w), meta, hessian, strict=True):
            tilde = x.clone()
            task.descend_(tilde, b, alpha, toward_zero(x, decay))
            v = gradient(task, tilde, b1, decay, training=True)
            delta = self.delta / v.norm(dim=1, keepdim=True).clamp_min(1.0)
            plus, minus = (gradient(task, torch.addcmul(x, v, sign * delta), b2, decay) for sign in (1, -1))
            v = torch.addcmul(v, plus - minus, -alpha / (2 * delta))  # v − α q,  q = (plus − minus) / 2δ
            x.add_(v, alpha=-beta)
            x[:, task.trainable.stop :] = tilde[:, task.trainable.stop :]

    def aggregate(self, server: ModelState, ids: Tensor, up: DeltaUp, round: RoundInfo) -> ModelState:
        return ModelState(server.w + mean_update(up.delta, up.count))

    def personalize(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> Tensor:
        batches = data.train.batches(self.training.with_steps(self.adapt_steps), stream="adapt")
        alpha, _ = self._rates(batches.lr)
        return sgd(task, down.w, batches, lr=alpha) if alpha else down.w

    def server_models(self, server: ModelState) -> ServerModels:
        return ServerModels(server.w[None])

    def privacy(self, count: Tensor) -> PrivacyProfile:
        steps = self.training.num_steps(count)
        return gradient_steps(
            {1: 2 * steps, 2: steps} if self.variant == "hf" else {1: 2 * steps},
            per_personalization={1: torch.full_like(count, self.adapt_steps)},
        )
