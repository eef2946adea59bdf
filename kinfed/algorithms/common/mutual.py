"""Two models per client that teach each other on every batch: its own, which stays, and the server's, which is
averaged.

They may be of different architectures: the server's is that of `Task.server_task`. Both take a plain step on a batch,
each by a loss that looks at what the other says of it before either has moved.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from kinfed.algorithms.base import Client
from kinfed.algorithms.common.averaging import DeltaUp, ModelDown, Weights, example_counts
from kinfed.algorithms.common.one_model import AveragesOneModel
from kinfed.author import Batch, Cohort, FeatureLoss, Task, each_step, option, toward_zero


@dataclass(frozen=True)
class MutualLearning(AveragesOneModel[Client], Generic[Client]):
    weights: Weights = option("examples", "weights of the average: by N_m, or equal")

    traits = frozenset({"needs classes", "any architecture", "no momentum"})
    acts_at = "head"
    gradients = 2

    @abstractmethod
    def lessons(
        self, task: Task, theta: Tensor, w: Tensor, batch: Batch, rate: float, own: list[Tensor]
    ) -> tuple[FeatureLoss, FeatureLoss]:
        """The losses of a step of the own models theta [n, P] and of the shared ones w [n, P_s], as they are before it.
        `own` are the rows of what else a client keeps, which this may step in place."""

    def train_both(self, task: Task, theta: Tensor, w: Tensor, data: Cohort, *own: Tensor) -> tuple[Tensor, Tensor]:
        """(own models [n, P], shared models [n, P_s]) after local training; `own` is changed in place."""
        theta, w = (rows.clone(memory_format=torch.contiguous_format) for rows in (theta, w))
        batches, shared = data.train.batches(self.training), task.server_task
        decay = self.training.weight_decay
        for batch, (one, other, *more) in each_step(batches, theta, w, *own):
            for_own, for_shared = self.lessons(task, one.clone(), other.clone(), batch, batches.lr, more)
            task.descend_(one, batch, batches.lr, toward_zero(one, decay), for_own)
            shared.descend_(other, batch, batches.lr, toward_zero(other, decay), for_shared)
        return theta, w

    def update(self, w: Tensor, down: ModelDown, data: Cohort) -> DeltaUp:
        return DeltaUp(w - down.w, example_counts(self.weights, data))

    def personalize(self, task: Task, client: Any, down: ModelDown, data: Cohort) -> Tensor:
        theta: Tensor = client.theta
        return theta

    def sent_columns(self, task: Task) -> Tensor:
        return torch.ones(task.server_task.num_params, dtype=torch.bool)
