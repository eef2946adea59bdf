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
    return task.mean_losses(models, split)


def best_fit(task: Task, models: Sequence[Tensor], split: Split) -> Tensor:
    """[n] int64: which of the models [n, P] has the least loss on each client's examples; of equals the first, and a
    loss that is not finite loses."""
    return torch.argmin(mean_losses(task, models, split).nan_to_num(nan=torch.inf), 1)
