"""Euclidean norms of models: long rows of float32 added up without a copy of them in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 64  # numbers whose squares are added up in their own type
LONG = 1 << 14  # rows from here on go one by one through the processor's dot product, ...
DOT = 1 << 16  # ... so many numbers at a time: it adds up in many places at once, and is exact to 1e-6 up to there
IN_CACHE = 1 << 17  # numbers that a core can come back to without asking the memory


def squared_norm(x: Tensor) -> Tensor:
    """‖x‖² over the last axis in float64, to 1e-6 of it at a third of the time that a sum in float64 takes."""
    if x.shape[-1] < LONG or x.device.type != "cpu":
        return _total(_piece_norms(x))
    squares = [_square(row) for row in x.reshape(-1, x.shape[-1]).unbind(0)]
    return torch.tensor(squares, dtype=torch.float64).reshape(x.shape[:-1])


def norm(x: Tensor) -> Tensor:
    return squared_norm(x).sqrt()


def squared_distances(models: Sequence[Tensor], base: Tensor) -> Tensor:
    """[n, len(models)] float64: ‖x − y‖² of the rows of each model [n, P] and those of the base. Some rows at a time:
    the base's, and the difference, stay in cache."""
    height = max(IN_CACHE // max(base.shape[1], 1), 1)
    room = base.new_empty(min(height, len(base)) * base.shape[1])
    found = base.new_empty(len(base), len(models), dtype=torch.float64)
    blocks = (torch.split(tensor, height) for tensor in (found, base, *models))
    for into, origin, *some in zip(*blocks, strict=True):
        for number, rows in enumerate(some):
            difference = torch.sub(rows, origin, out=room[: rows.numel()].view(rows.shape))
            into[:, number] = squared_norm(difference)
    return found


def spread(x: Tensor) -> Tensor:
    """Σ_m ‖x_m − x̄‖² of the rows of x [n, P], a float64 number.

    By blocks of columns: the centred rows never exist together, and never pass through memory."""
    n = len(x)
    if n < 2 or x.device.type != "cpu":
        return squared_norm(x - x.mean(0)).sum()
    width = max(IN_CACHE // n, 1)
    share = x.new_full((n,), 1 / n)
    room = x.new_empty(n * min(width, x.shape[1]))
    square = 0.0
    for block in torch.split(x, width, 1):
        centred = torch.sub(block, block.T @ share, out=room[: block.numel()].view(block.shape))
        square += _square(centred.view(-1))
    return torch.tensor(square, dtype=torch.float64)


def _square(row: Tensor) -> float:
    return sum(float(part @ part) for part in torch.split(row, DOT))


def _piece_norms(x: Tensor) -> Tensor:
    """[..., pieces]: norms of the pieces of x [..., P], short enough for sums in x's own type."""
    pieces, rest = divmod(x.shape[-1], PIECE)
    whole = x[..., : pieces * PIECE].reshape(*x.shape[:-1], pieces, PIECE)
    norms: Tensor = torch.linalg.vector_norm(whole, dim=-1)
    if not rest:
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(x[..., -rest:], dim=-1, keepdim=True)], -1)


def _total(norms: Tensor) -> Tensor:
    """The squared norm of what has these norms of pieces on the last axis."""
    return norms.to(torch.float64).square().sum(-1)
