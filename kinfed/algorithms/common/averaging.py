"""Averages of one model: the model goes down, the change and a weight come up, and the server takes their mean.

    w ← w + Σ_m p_m (u_m − w),      p_m ∝ N_m ("examples") or 1 ("equal")

Updates travel as differences u_m − w; with Σ p = 1 the mean is the same as that of the models. Running statistics
(of BatchNorm, say), the columns of a row behind the trainable ones, are averaged like the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from kinfed.core import Tree, kernels
from kinfed.data import Cohort, LocalTraining, Split
from kinfed.engine import Task
from kinfed.errors import ConfigError

Up = TypeVar("Up", bound=Tree)
Weights = Literal["examples", "equal"]
# By custom, the names of fields of updates.
COUNT = "count"  # a client's number of examples
DELTA = "delta"  # the change of a model that the server knows
# What servers do that keep the mean of all models, in words to follow a method's name.
FOLLOWS_MEAN = "follows the mean of all models by adding up their changes (what is left out once is missing for ever)"


@dataclass
class ModelState(Tree):
    """A server that keeps one model."""

    w: Tensor  # [P]


@dataclass
class ModelDown(Tree):
    w: Tensor  # [n, P]


@dataclass
class ChangeUp(Tree):
    delta: Tensor  # [n, P] of whatever the server follows


@dataclass
class DeltaUp(Tree):
    delta: Tensor  # [n, P] u_m − w
    count: Tensor | None  # [n] examples; absent with equal weights


def example_counts(weights: Weights, data: Cohort) -> Tensor | None:
    """[n] float32: what clients send for the average to weigh them by; None if all weigh the same."""
    return data.train.count.to(torch.float32) if weights == "examples" else None


def personal_rate(training: LocalTraining, lr: float | None, round: int) -> float:
    """Rate in a round of what a client trains beside the model: the common one where `lr` is None, else `lr` with the
    same decay; 0 stays 0."""
    if lr == 0:
        return 0.0
    return (training if lr is None else replace(training, lr=lr)).rate(round)


def mean_update(delta: Tensor, count: Tensor | None) -> Tensor:
    """Σ_m p_m delta_m [P] of rows [n, P]; all weigh the same where `count` is None."""
    return kernels.weighted_mean(delta, torch.ones(len(delta)) if count is None else count)


def averaged_rows(up: Tree, averages: tuple[str, ...]) -> Tensor:
    """[n, W]: the averaged fields of updates side by side; a view if possible."""
    flat = [getattr(up, name).flatten(1) for name in averages]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def mean_from_row(up: Up, averages: tuple[str, ...], row: Tensor) -> Up:
    """The mean of updates like `up` [n, ...], from a `row` [W] of its averaged fields side by side."""
    shapes = {name: getattr(up, name) for name in averages}
    parts = torch.split(row, [rows[0].numel() for rows in shapes.values()])
    return _as_mean(up, {
        name: part.reshape(rows.shape[1:]).to(rows.device, rows.dtype)
        for (name, rows), part in zip(shapes.items(), parts, strict=True)
    })  # fmt: skip


def mean_of(up: Up, averages: tuple[str, ...], weight: Tensor | None) -> Up:
    """The mean of the averaged fields of updates, by weight [n]; all weigh the same where that is None."""
    return _as_mean(up, {
        name: mean_update((rows := getattr(up, name)).flatten(1), weight).reshape(rows.shape[1:]) for name in averages
    })  # fmt: skip


def _as_mean(up: Up, means: Mapping[str, Tensor]) -> Up:
    return type(up)(**{field.name: means.get(field.name) for field in fields(up)})


def extrapolated(w: Tensor, step: Tensor, rate: float, trainable: slice) -> Tensor:
    """w + rate · step, [P] each. Running statistics go no further than the whole step: beyond an average a variance
    could become negative."""
    new = w + min(rate, 1.0) * step
    new[trainable] = w[trainable] + rate * step[trainable]
    return new


def own_or_server(seen: Tensor, own: Tensor, server: Tensor) -> Tensor:
    """[n, P]: a client's own model if it has trained (`seen` [n]), otherwise the server's."""
    return torch.where(seen[:, None].to(server.device), own, server)


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
