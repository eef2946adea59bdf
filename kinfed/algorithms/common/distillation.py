"""Distillation over public examples: what models say of these, and steps towards targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from kinfed.algorithms.base import Client, Down, Server, Up
from kinfed.author import Algorithm, Batch, Cohort, Deltas, LocalTraining, Split, Task, rng

# (z [n, B, C], target [n, B, C]) to the derivative of every example's loss in z
Slope = Callable[[Tensor, Tensor], Tensor]


def public_examples(data: Cohort) -> Split:
    assert data.public is not None  # check_algorithm_settings refuses federations without
    return data.public


@dataclass(frozen=True)
class OwnModels(Algorithm[Server, Client, Down, Up], Generic[Server, Client, Down, Up]):
    """Methods whose clients keep models of their own (`theta` of their state) and send what these say of public
    examples: nothing that noise on gradients could hide."""

    traits = frozenset({"needs classes", "needs public data", "any architecture"})
    acts_at = "head"
    leaks = "what its model says of public examples"

    def personalize(self, task: Task, client: Any, down: Down, data: Cohort) -> Tensor:
        theta: Tensor = client.theta
        return theta


@torch.no_grad()
def public_scores(task: Task, theta: Tensor, public: Split) -> Tensor:
    """[n, U, C] logits of all public examples, by each client's model in theta [n, P]."""
    return torch.cat([task.logits(theta, batch.x) for _, batch in public.in_order()], 1)


@dataclass(frozen=True)
class TowardTargets:
    """A loss between logits and targets takes the place of the cross-entropy."""

    target: Tensor  # [n, B, C]
    slope: Slope

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        return batch.weight[..., None] * self.slope(z, self.target[rows.to(self.target.device)]), None


def digest(
    task: Task,
    theta: Tensor,
    public: Split,
    target: Tensor,
    slope: Slope,
    training: LocalTraining,
    steps: int,
    first_step: int = 0,
    rate: Callable[[int], float] | None = None,
) -> Tensor:
    """theta [n, P] after plain SGD steps towards targets [n, U, C] of the public examples. Each step has a batch of
    different examples, drawn for (seed, round, step): the same for all clients, whose targets belong to them. `rate`
    of a step is that of local training if none is given."""
    theta = theta.clone(memory_format=torch.contiguous_format)
    n, U = len(theta), target.shape[1]
    size = min(training.batch, U)
    key = rng.fold(rng.root(public.seed, "digest"), public.round)
    weight = torch.full((n, size), 1 / size, device=theta.device)
    labels = torch.zeros(n, size, dtype=torch.int64, device=theta.device)  # not looked at
    for step in range(first_step, first_step + steps):
        some = rng.choose(rng.fold(key, step), U, size)
        x = public.features.gather(public.rows[some].expand(n, -1))
        batch = Batch(x, labels, weight, public.ids, public.round, step, None, public.seed, "digest")
        lr = training.rate(public.round) if rate is None else rate(step)
        task.descend_(theta, batch, lr, feature_loss=TowardTargets(target[:, some], slope))
    return theta
