"""FedFomo's weights: models of others, weighed by how well they do on one's own examples.

w_n = (L_i(θ_i^old) − L_i(θ_n)) / ‖θ_n − θ_i^old‖                   Eq. (3)
w*_n = max(w_n, 0) / Σ_k max(w_k, 0)                                Eq. (13)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import kernels
from kinfed.data import Cohort, Split

Norm = Literal["l2", "l1", "l2sq", "none"]

TINY = 1e-9  # distances and sums below this count as zero


def validation_or_train(data: Cohort) -> Split:
    """Every client's validation examples; the training examples of clients that have none."""
    val, train = data.val, data.train
    lacks = val.count == 0
    if not bool(lacks.any()):
        return val
    start = torch.where(lacks, len(val.rows) + train.start, val.start)
    rows, count = torch.cat([val.rows, train.rows]), torch.where(lacks, train.count, val.count)
    return replace(val, rows=rows, start=start, count=count)


def weigh(gain: Tensor, candidates: list[Tensor], base: Tensor, norm: Norm, trainable: slice) -> tuple[Tensor, Tensor]:
    """Eq. (3): w [n, m] float64, the gain [n, m] per distance of the candidates [n, P] from the base [n, P] in the
    trainable columns; and how many gains were not finite [n]. What is not finite, or at distance 0, weighs nothing."""
    finite = torch.isfinite(gain)
    distance = _distances([rows[:, trainable] for rows in candidates], base[:, trainable], norm).cpu()
    usable = finite & (distance >= TINY)
    return torch.where(usable, gain / distance.clamp_min(TINY), 0.0), (~finite).sum(1)


def _distances(candidates: list[Tensor], base: Tensor, norm: Norm) -> Tensor:
    """[n, m] float64."""
    if norm == "none":
        return torch.ones(len(base), len(candidates), dtype=torch.float64)
    if norm == "l1":
        return kernels.l1_distances(candidates, base)
    square = kernels.squared_distances(candidates, base)
    return square if norm == "l2sq" else square.sqrt()


def mixing_weights(w: Tensor) -> Tensor:
    """Eq. (13): w* [n, m], positive weights scaled to sum to one; all zero where there is none."""
    positive = w.clamp_min(0)
    total = positive.sum(1, keepdim=True)
    return torch.where(total > 0, positive / total, 0.0)
