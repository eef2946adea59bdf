"""Ditto: a global model by FedAvg, and a personal one held near it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1.

    client m:  min_v  f_m(v) + (λ/2) ‖v − w*‖²,   w* = argmin Σ p_m f_m(w)

λ = 0 is local training on the same batches; λ → ∞ is the global model. The proximal centre is the w received at
the start of the round. λ is multiplied by the learning rate like every other part of the gradient (the Self-FL
paper's synthetic rule leaves it out, which oscillates for λ ≥ 1).

The authors sample clients in proportion to N_m and average equally; with uniform sampling, as here, the same
objective needs weights by examples (the default, "Ditto-w"). "equal" is Ditto-e, another objective.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.algorithms.base import PrivacyProfile, check_stable, gradient_steps
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, example_counts
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import Cohort, LocalTraining, Range, Task, Tree, option, sgd


@dataclass
class Client(Tree):
    v: Tensor  # [n, P] personal model, never leaves the client


@dataclass(frozen=True)
class Ditto(AveragesOneModel[Client]):
    lam: float = option(1.0, "λ: how firmly the personal model is held near the server's", ge=0, tune=Range(1e-2, 1.9))
    weights: Weights = option("examples", "weights of the average: by N_m (Ditto-w), or equal (Ditto-e)")
    personal_lr: float | None = option(None, "η_p of the personal branch; the common lr by default", gt=0)
    personal_steps: int | None = option(
        None, "steps of the personal branch; as many as the other branch by default", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stable("Ditto's personal step", "lam", self._personal_training.lr, self.lam)

    @property
    def _personal_training(self) -> LocalTraining:
        """The personal branch: the same stream of batches, its own rate (which decays alike) and steps."""
        training = self.training if self.personal_steps is None else self.training.with_steps(self.personal_steps)
        return training if self.personal_lr is None else replace(training, lr=self.personal_lr)

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(task.init(data.seed).expand(len(data), -1))

    def client_update(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> tuple[Client, DeltaUp]:
        proximal = (self.lam, down.w) if self.lam else None
        u = sgd(task, down.w, data.train.batches(self.training))  # the branch of the server model
        batches = data.train.batches(self._personal_training, loop=1)
        v = sgd(task, client.v, batches, proximal=proximal)  # ∇f(v) + λ (v − w)
        return Client(v), DeltaUp(u.sub_(down.w), example_counts(self.weights, data))

    def personalize(self, task: Task, client: Client, down: ModelDown, data: Cohort) -> Tensor:
        return client.v

    def privacy(self, count: Tensor) -> PrivacyProfile:
        one, other = self.training.num_steps(count), self._personal_training.num_steps(count)
        both = torch.minimum(one, other)  # the branches take the same batches
        return gradient_steps({2: both, 1: torch.maximum(one, other) - both}, weights=self.weights)
