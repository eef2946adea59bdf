"""Features of each client's examples summed by class, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.data import Split
from kinfed.errors import ModelError

FeatureMap = Callable[[Tensor, Tensor], Tensor]  # (theta [n, P], x [n, B, ...]) to φ [n, B, d_f]


@dataclass
class ClassSums:
    """Sums of φ over a client's examples of each class (all are of one where the target is a number). Means are
    total / count, and the scatter within classes is
    scatter − Σ_c total_c total_c' / count_c over the classes that a client has."""

    count: Tensor  # [n, C] int64
    total: Tensor  # [n, C, d_f] float64, Σ φ
    square: Tensor  # [n, C] float64, Σ |φ|²
    scatter: Tensor | None  # [n, d_f, d_f] float64, Σ φ φ' over all classes


@torch.no_grad()
def class_sums(
    features: FeatureMap, theta: Tensor, split: Split, inputs: int, outputs: int, with_scatter: bool
) -> ClassSums:
    """The sums for d_f = `inputs` features and C = `outputs` classes. Padding counts for nothing."""
    n = len(split.count)
    zeros = torch.zeros(n, outputs, inputs, dtype=torch.float64, device=theta.device)
    sums = ClassSums(
        torch.zeros(n, outputs, dtype=torch.int64, device=theta.device), zeros, torch.zeros_like(zeros[..., 0]),
        zeros.new_zeros(n, inputs, inputs) if with_scatter else None,
    )  # fmt: skip
    for rows, batch in split.in_order():
        valid = batch.weight > 0
        phi = features(theta[rows], batch.x)
        y = torch.zeros_like(batch.y, dtype=torch.int64) if batch.y.is_floating_point() else batch.y
        if bool((y >= outputs).any()):
            raise ModelError(f"the model has {outputs} outputs; got the label {int(y.max())}")
        # Examples are added one by one: in a product with one-hot rows, one that is not finite would reach all classes.
        row = torch.arange(len(batch), device=batch.y.device)[:, None]
        place, each = (row * outputs + y)[valid], phi[valid].to(torch.float64)
        size = len(batch) * outputs
        sums.count[rows] += torch.bincount(place, minlength=size).view(-1, outputs)
        sums.total[rows] += each.new_zeros(size, inputs).index_add_(0, place, each).view(-1, outputs, inputs)
        squares = each.square().sum(-1)
        sums.square[rows] += each.new_zeros(size).index_add_(0, place, squares).view(-1, outputs)
        if sums.scatter is not None:
            real = torch.where(valid[..., None], phi, 0.0).to(torch.float64)
            sums.scatter[rows] += torch.bmm(real.mT, real)
    return sums
