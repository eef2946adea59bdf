"""Curves in methods that learn by sums: columns may bend, where the evidence of training rows says so.

    f_j(x) = x β_j + Σ_l γ_jl B_jl(x),    γ ~ N(0, τ), one τ for all columns
    B_jl(x) = max(min(x, h_j) − κ_jl, 0) − a_jl − b_jl x,    l = 1, ..., 8
    B_j9(x) = 1 if x is the value that more than half of all rows have, less its line

Knots κ are quantiles of all rows, h their 99 % quantile: a curve follows no outlier. They come from counts of rows in
cells of every column, which are added up over sites. The line a + b x is that of least squares on these counts, so that
β_j stays the slope of the line nearest to the curve and reads as without curves. τ = 0 is the linear model itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.engine.trees import count_cells, first_cells

Array = NDArray[np.float64]

CELLS = 256  # of a column, in which rows are counted
KNOTS = 8
BENDS = KNOTS + 1  # of a column
FORM = 3 + KNOTS + 2 * BENDS  # numbers of a column: h, the ends of the frequent value's cell, κ, a, b
MOST_COLUMNS = 40  # sums have the square of ten times as many
FAR = float(np.finfo(np.float32).max)  # a knot that is not used


def count_rows(x: Array, first: Array) -> Array:
    """[n, d · CELLS] rows by client, column and cell; `first` [n + 1]: where those of each client begin in x [R, d]."""
    known = np.where(np.isfinite(x), x, np.nan)
    return count_cells(known, first, np.ones(len(x)), first_cells(CELLS), CELLS).reshape(len(first) - 1, -1)


def form_of(counts: Array) -> tuple[Array, Array]:
    """(form [d, FORM], mean products of what bends a column [d, BENDS, BENDS]) from counts [d, CELLS] of all rows. A
    column of two values has no curve."""
    bounds = np.linspace(-1, 1, CELLS + 1)
    middle = (bounds[1:] + bounds[:-1]) / 2
    middle, ends = middle / (1 - np.abs(middle)), np.append(first_cells(CELLS), FAR)
    form, products = np.zeros((len(counts), FORM)), np.zeros((len(counts), BENDS, BENDS))
    form[:, : 3 + KNOTS] = FAR
    for j, held in enumerate(np.maximum(counts, 0)):
        if (held > 0).sum() < 3:
            continue
        share = np.cumsum(held) / held.sum()
        low, form[j, 0] = (middle[np.searchsorted(share, part)] for part in (0.01, 0.99))
        others, most = held.copy(), int(held.argmax())
        if held[most] > held.sum() / 2:
            form[j, 1:3] = ends[most - 1] if most else -FAR, ends[most]
            others[most] = 0
        rank = np.cumsum(others) / others.sum()
        knots = np.unique(middle[np.searchsorted(rank, np.arange(1, KNOTS + 1) / (KNOTS + 1))])
        knots = knots[(knots > low) & (knots < form[j, 0])]
        form[j, 3 : 3 + len(knots)] = knots
        raw = bent(torch.from_numpy(middle[:, None]), torch.from_numpy(form[j][None])).numpy()
        line = np.column_stack([np.ones(CELLS), middle])
        weighted = line * held[:, None]
        ab = np.linalg.solve(weighted.T @ line, weighted.T @ raw)
        rest = raw - line @ ab
        form[j, 3 + KNOTS :], products[j] = ab.reshape(-1), (rest.T * held) @ rest / held.sum()
    return form, products


def bent(x: Tensor, form: Tensor) -> Tensor:
    """[..., d · BENDS] of x [..., d] and form [..., d, FORM]."""
    top, low, high = form[..., 0], form[..., 1], form[..., 2]
    knots, a, b = torch.split(form[..., 3:], [KNOTS, BENDS, BENDS], -1)
    hinges = (torch.minimum(x, top)[..., None] - knots).clamp(min=0)
    frequent = ((x > low) & (x <= high)).to(x)[..., None]
    bends: Tensor = torch.cat([hinges, frequent], -1) - a - b * x[..., None]
    return bends.flatten(-2)


def deviations(gamma: Array, products: Array) -> Any:
    """[d] standard deviation of every column's curve around its line, over all rows, in units of the predictor."""
    pieces = gamma.reshape(len(products), BENDS)
    return np.sqrt(np.maximum(np.einsum("jl,jlm,jm->j", pieces, products, pieces), 0))
