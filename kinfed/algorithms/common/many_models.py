"""Servers that keep many models: which of them fits a client best, and whether all of them fit into memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kinfed.data import Split
from kinfed.engine import Task
from kinfed.errors import ConfigError


def mean_losses(task: Task, models: Sequence[Tensor], split: Split) -> Tensor:
    """[n, len(models)] float64: mean loss of each model [n, P] on each client's examples, which are fetched once and
    count by their weights."""
    return task.mean_losses(models, split)


def best_fit(task: Task, models: Sequence[Tensor], split: Split) -> Tensor:
    """[n] int64: which of the models [n, P] has the least loss on each client's examples; of equals the first, and a
    loss that is not finite loses."""
    return torch.argmin(mean_losses(task, models, split).nan_to_num(nan=torch.inf), 1)


def check_memory(what: str, num_bytes: float, max_gb: float) -> None:
    """Refuse `what`, a sentence about what is kept, where it takes more than `max_gb` gigabytes."""
    needed = num_bytes / 1e9
    if needed > max_gb:
        raise ConfigError(
            f"{what}: {needed:.1f} GB, more than max_gb={max_gb:g}; take fewer clients or a smaller model, or raise "
            "max_gb"
        )
