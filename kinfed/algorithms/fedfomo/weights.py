"""Models of others, weighed by how well they do on one's own examples, and mixed accordingly (FedFomo)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kinfed.core.kernels import IN_CACHE, squared_distances
from kinfed.data.batches import Split
from kinfed.data.federation import Cohort
from kinfed.engine.task import Task

TINY = 1e-9  # distances and sums below this count as zero


def judges(data: Cohort) -> Split:
    """Every client's validation examples; the training examples of those who have none."""
    val, train = data.val, data.train
    lacks = val.count == 0
    if not bool(lacks.any()):
        return val
    return replace(
        val,
        rows=torch.cat([val.rows, train.rows]),
        start=torch.where(lacks, len(val.rows) + train.start, val.start),
        count=torch.where(lacks, train.count, val.count),
    )


def mean_losses(task: Task, models: list[Tensor], part: Split) -> Tensor:
    """[n, len(models)] float64: mean loss of each model [n, P] on each client's examples, which are fetched once."""
    total = torch.zeros(len(part.count), len(models), dtype=torch.float64)
    for rows, batch in part.in_order():
        real = batch.weight > 0
        for number, theta in enumerate(models):
            losses = torch.where(real, task.losses(theta[rows], batch), 0.0)
            total[rows, number] += losses.sum(1).to("cpu", torch.float64)
    return total / part.count[:, None]


def weights(gain: Tensor, candidates: list[Tensor], base: Tensor, norm: str) -> tuple[Tensor, Tensor]:
    """gain [n, m] per distance of the candidates from the base, float64; and how many gains were not finite [n]."""
    finite = torch.isfinite(gain)
    distance = _distances(candidates, base, norm).cpu()
    usable = finite & (distance >= TINY)
    return torch.where(usable, gain / distance.clamp_min(TINY), 0.0), (~finite).sum(1)


def _distances(candidates: list[Tensor], base: Tensor, norm: str) -> Tensor:
    """[n, m] float64."""
    if norm == "none":
        return torch.ones(len(base), len(candidates), dtype=torch.float64)
    if norm == "l1":
        norms = [torch.linalg.vector_norm(theta - base, 1, dim=1, dtype=torch.float64) for theta in candidates]
        return torch.stack(norms, 1)
    square = squared_distances(candidates, base)
    return square if norm == "l2sq" else square.sqrt()


def shares(w: Tensor) -> Tensor:
    """w* of Eq. (13): positive weights scaled to sum to one; all zero where there is none."""
    positive = w.clamp_min(0)
    total = positive.sum(1, keepdim=True)
    return torch.where(total > 0, positive / total, 0.0)


def convex(models: list[Tensor], share: Tensor) -> Tensor:
    """[n, P]: Σ_j share[:, j] models[j]. Some columns at a time, so that the sum stays in cache while it grows."""
    out = torch.zeros_like(models[0], memory_format=torch.contiguous_format)
    shares = [part[:, None] for part in share.to(out.device, out.dtype).unbind(1)]
    width = max(IN_CACHE // max(len(out), 1), 1)
    for sum_, *parts in zip(*(torch.split(tensor, width, 1) for tensor in (out, *models)), strict=True):
        for part, weight in zip(parts, shares, strict=True):
            sum_.addcmul_(part, weight)
    return out
