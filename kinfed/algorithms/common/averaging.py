"""What algorithms that average one model have in common: the model down, the change and a weight up, their mean.

    w ← w + Σ_m p_m (u_m − w),      p_m ∝ N_m ("examples") or 1 ("equal")

Updates travel as differences u_m − w; with Σ p = 1 the mean is the same as that of the models. Running statistics
(of BatchNorm, say), the columns of a row behind the trainable ones, are averaged like the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import Tree, kernels
from kinfed.data import Cohort

Weights = Literal["examples", "equal"]
# By custom, the names of fields of updates.
COUNT = "count"  # a client's number of examples
DELTA = "delta"  # the change of a model that the server knows


@dataclass
class ModelState(Tree):
    """A server that keeps one model."""

    w: Tensor  # [P]


@dataclass
class ModelDown(Tree):
    w: Tensor  # [n, P]


@dataclass
class DeltaUp(Tree):
    delta: Tensor  # [n, P] u_m − w
    count: Tensor | None  # [n] examples; absent with equal weights


def example_counts(weights: Weights, data: Cohort) -> Tensor | None:
    """[n] float32: what clients send for the average to weigh them by; None where all weigh the same."""
    return data.train.count.to(torch.float32) if weights == "examples" else None


def mean_update(delta: Tensor, count: Tensor | None) -> Tensor:
    """Σ_m p_m delta_m [P] of rows [n, P]; all weigh the same where `count` is None."""
    return kernels.weighted_mean(delta, torch.ones(len(delta)) if count is None else count)


def averaged_rows(up: Tree, averages: tuple[str, ...]) -> Tensor:
    """[n, W]: the averaged fields of updates side by side; a view where there is one."""
    flat = [rows.flatten(1) for rows in _fields(up, averages).values()]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def with_mean(up: Tree, averages: tuple[str, ...], row: Tensor) -> Tree:
    """Updates of which every row is `row` [W], so that any mean of them is, too. Numbers of examples become equal."""
    fields = _fields(up, averages)
    parts = torch.split(row, [rows[0].numel() for rows in fields.values()])
    changed = {
        name: part.reshape(rows.shape[1:]).expand(rows.shape)
        for (name, rows), part in zip(fields.items(), parts, strict=True)
    }
    if isinstance(count := getattr(up, COUNT, None), Tensor):
        changed[COUNT] = torch.ones_like(count)
    return replace(up, **changed)


def _fields(up: Tree, averages: tuple[str, ...]) -> Mapping[str, Tensor]:
    return {name: getattr(up, name) for name in averages}


def extrapolated(w: Tensor, step: Tensor, rate: float, trainable: slice) -> Tensor:
    """w + rate · step, [P] each. Running statistics go no further than the whole step: beyond an average a variance
    could become negative."""
    new = w + min(rate, 1.0) * step
    new[trainable] = w[trainable] + rate * step[trainable]
    return new


def own_or_server(seen: Tensor, own: Tensor, server: Tensor) -> Tensor:
    """[n, P]: a client's own model if it has trained (`seen` [n]), otherwise the server's."""
    return torch.where(seen[:, None].to(server.device), own, server)
