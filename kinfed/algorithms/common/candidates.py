"""Candidate models, compared by their mean loss on a client's own examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kinfed.data import Split
from kinfed.engine import Task


def mean_losses(task: Task, models: Sequence[Tensor], split: Split) -> Tensor:
    """[n, len(models)] float64: mean loss of each model [n, P] on each client's examples, which are fetched once and
    count by their weights."""
    if models and split.weights is None and all(task.scores_in_place(theta, split) for theta in models):
        return torch.stack([task.mean_loss(theta, split) for theta in models], 1)
    total = torch.zeros(len(split.count), len(models), dtype=torch.float64)
    weight = torch.zeros(len(split.count), dtype=torch.float64)
    for rows, batch in split.in_order():
        real = batch.weight > 0
        weight[rows] += batch.weight.sum(1).to("cpu", torch.float64)
        for number, theta in enumerate(models):
            losses = torch.where(real, task.losses(theta[rows], batch), 0.0) * batch.weight
            total[rows, number] += losses.sum(1).to("cpu", torch.float64)
    return total / weight[:, None]


def best_fit(task: Task, models: Sequence[Tensor], split: Split) -> Tensor:
    """[n] int64: which of the models [n, P] has the least loss on each client's examples; of equals the first, and a
    loss that is not finite loses."""
    return torch.argmin(mean_losses(task, models, split).nan_to_num(nan=torch.inf), 1)
