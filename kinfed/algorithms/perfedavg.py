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

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile, gradient_steps
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import Add, Cohort, Gradient, GradientStep, Instruction, Mix, ModelDown, Norm, Task, run_program, sgd
from kinfed.core import Nothing, Range, option


@dataclass(frozen=True)
class PerFedAvg(AveragesOneModel[Nothing]):
    variant: Literal["fo", "hf"] = option("fo", "first order, or Hessian-free")
    alpha: float | None = option(
        None, "α of the inner (adaptation) step; the common lr by default", ge=0, tune=Range(1e-3, 0.5)
    )
    beta: float | None = option(None, "β of the outer step; the common lr by default", gt=0)
    delta: float = option(1e-3, "δ of the Hessian-free difference quotient", gt=0)
    adapt_steps: int = option(1, "steps on training data that turn w into a personal model", ge=1)

    traits = frozenset({"no momentum"})

    def _rates(self, lr: float) -> tuple[float, float]:
        """α and β of a round, decaying in step with the common rate."""
        decay = lr / self.training.lr
        return lr if self.alpha is None else self.alpha * decay, lr if self.beta is None else self.beta * decay

    def client_update(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> tuple[Nothing, DeltaUp]:
        batches, meta = (data.train.batches(self.training, stream=name) for name in ("batches", "meta"))
        alpha, beta = self._rates(batches.lr)
        decay = self.training.weight_decay
        w = down.w.clone()
        streams = [batches, meta]
        inner = GradientStep("tilde", alpha, decay=decay)  # w̃ = w − α g(w; b)
        program: list[Instruction] = [Mix("tilde", "w", "w", 0.0), inner]
        if self.variant == "fo":
            program.append(GradientStep("w", beta, at="tilde", decay=decay, stream=1))  # w ← w − β g(w̃; b')
        else:
            streams.append(data.train.batches(self.training, stream="hessian"))
            program += self._hessian_free_moves(alpha, beta)
        run_program(task, streams, program, {"w": w})
        return Nothing(), DeltaUp(w.sub_(down.w), None)

    def _hessian_free_moves(self, alpha: float, beta: float) -> list[Instruction]:
        """From w̃ to the next w."""
        decay = self.training.weight_decay
        return [
            Gradient("v", at="tilde", decay=decay, stream=1),  # v = g(w̃; b')
            Norm("delta", "v", self.delta, power=-1.0, least=1.0),
            Norm("per_delta", "v", 1 / self.delta, least=1.0),
            Add("plus", "w", "v", 1.0, "delta"),
            Add("minus", "w", "v", -1.0, "delta"),
            # v ← v − α q,  q = (g(w + δ v; b'') − g(w − δ v; b'')) / 2δ
            GradientStep("v", alpha / 2, at="plus", number="per_delta", decay=decay, stream=2, measures=False),
            GradientStep("v", -alpha / 2, at="minus", number="per_delta", decay=decay, stream=2, measures=False),
            Add("w", "w", "v", -beta),  # w ← w − β (v − α q)
        ]

    def personalize(self, task: Task, client: Nothing, down: ModelDown, data: Cohort) -> Tensor:
        batches = data.train.batches(self.training.with_steps(self.adapt_steps), stream="adapt")
        alpha, _ = self._rates(batches.lr)
        return sgd(task, down.w, batches, lr=alpha) if alpha else down.w

    def privacy(self, count: Tensor) -> PrivacyProfile:
        steps = self.training.num_steps(count)
        adapting = {1: torch.full_like(count, self.adapt_steps)}
        per_round = {1: 2 * steps, 2: steps} if self.variant == "hf" else {1: 2 * steps}
        return gradient_steps(per_round, per_personalization=adapting)
