"""Kernels on rows of models: means, sums, norms and distances of long rows of float32.

Models are few rows of very many numbers. A row passes through memory once: work is cut into blocks that stay in the
processor's cache, sums are added up in float64 (or exactly enough in pieces of float32), and no float64 copy of all
rows is ever made. Block sizes are part of the result: another size adds up in another order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core.buffers import empty_rows

Array = np.ndarray[Any, np.dtype[Any]]

IN_CACHE = 1 << 17  # numbers that a core can come back to without asking the memory
PIECE = 64  # numbers whose squares are added up in their own type
LONG = 1 << 14  # a row of at least this many numbers goes through the processor's dot product, alone
DOT = 1 << 16  # numbers per dot product: it adds up in many places at once, and is exact to 1e-6 up to there
MEAN_ROWS = 128  # rows of a mean that are converted to float64 together
MEAN_BLOCK = 1 << 19  # numbers of them: 4 MB, which took 0.6 to 0.9 of the time of blocks of 1 or 8 MB
MEAN_AT_ONCE = 1 << 20  # numbers that need no blocks: for so few, starting several operations takes longer
GRAM = 1 << 20  # numbers per block of a product of all rows with all rows
COORDINATES = 1 << 16  # the same in float64 where the block is centred first: half a megabyte, which stays in cache
METRICS = ("l2", "l1", "cosine")


def weighted_mean(rows: Tensor, weight: Tensor) -> Tensor:
    """[P]: Σ_m p_m rows[m] with p = weight / Σ weight, for rows [n, P] and weights [n]; accumulated in float64, where
    the device has it, so that order hardly matters."""
    p = shares(weight.to(rows.device))
    if not mean_block(*rows.shape):
        return torch.mv(rows.to(p.dtype).T, p).to(rows.dtype)
    return mean_by_blocks(rows, p)


def shares(weight: Tensor) -> Tensor:
    """weight / Σ weight, in the type in which sums are added up."""
    weight = weight.to(widest_float(weight.device))
    return weight / weight.sum()


def mean_block(n: int, columns: int) -> int:
    """Columns that a mean of rows [n, columns] takes at a time; 0: all at once, where blocks would only cost time."""
    if n <= MEAN_ROWS and n * columns <= MEAN_AT_ONCE:
        return 0
    return MEAN_BLOCK // max(min(n, MEAN_ROWS), 1)


def mean_by_blocks(rows: Tensor, p: Tensor) -> Tensor:
    """[P]: Σ_m p_m rows[m], by blocks of columns, because a float64 copy of all rows would pass through memory. Of some
    whole blocks it is, bit for bit, what it is there of all columns: the same sums, in the same order."""
    wide, width = p.dtype, MEAN_BLOCK // max(min(len(rows), MEAN_ROWS), 1)
    mean = empty_rows(rows, rows.shape[1])
    for part in (slice(start, start + width) for start in range(0, rows.shape[1], width)):
        total = torch.zeros_like(mean[part], dtype=wide)
        for some_rows, share in zip(torch.split(rows[:, part], MEAN_ROWS), torch.split(p, MEAN_ROWS), strict=True):
            total.addmv_(some_rows.to(wide).T, share)
        mean[part] = total
    return mean


def widest_float(device: torch.device) -> torch.dtype:
    """Type in which sums are added up, and given, on the device: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def weighted_sum(models: Sequence[Tensor], weight: Tensor) -> Tensor:
    """[n, P]: Σ_j weight[:, j] models[j], for models [n, P] each and weights [n, len(models)]. Some columns at a time,
    so that the sum stays in cache while it grows."""
    out = torch.zeros_like(models[0], memory_format=torch.contiguous_format)
    weights = [column[:, None] for column in weight.to(out.device, out.dtype).unbind(1)]
    width = max(IN_CACHE // max(len(out), 1), 1)
    for total, *blocks in zip(*(torch.split(tensor, width, 1) for tensor in (out, *models)), strict=True):
        for block, column in zip(blocks, weights, strict=True):
            total.addcmul_(block, column)
    return out


def squared_norm(x: Tensor) -> Tensor:
    """‖x‖² over the last axis in float64, to 1e-6 of it at a third of the time that a sum in float64 takes."""
    if x.shape[-1] < LONG or x.device.type != "cpu":
        norms = _piece_norms(x)
        return norms.to(widest_float(norms.device)).square().sum(-1)
    squares = [_dot_square(row) for row in x.reshape(-1, x.shape[-1]).unbind(0)]
    return torch.tensor(squares, dtype=torch.float64).reshape(x.shape[:-1])


def norm(x: Tensor) -> Tensor:
    return squared_norm(x).sqrt()


def spread(x: Tensor) -> Tensor:
    """Σ_m ‖x_m − x̄‖² of the rows of x [n, P], a float64 number.

    By blocks of columns: the centred rows never exist together, and never pass through memory."""
    n = len(x)
    if n < 2 or x.device.type != "cpu":
        return squared_norm(x - x.mean(0)).sum()
    width = max(IN_CACHE // n, 1)
    share = x.new_full((n,), 1 / n)
    buffer = x.new_empty(n * min(width, x.shape[1]))
    square = 0.0
    for block in torch.split(x, width, 1):
        centred = torch.sub(block, block.T @ share, out=buffer[: block.numel()].view(block.shape))
        square += _dot_square(centred.view(-1))
    return torch.tensor(square, dtype=torch.float64)


def squared_distances(models: Sequence[Tensor], base: Tensor) -> Tensor:
    """[n, len(models)] float64: ‖x − y‖² of the rows of each model [n, P] and those of the base. Some rows at a time:
    the base's, and the difference, stay in cache."""
    height = max(IN_CACHE // max(base.shape[1], 1), 1)
    buffer = base.new_empty(min(height, len(base)) * base.shape[1])
    out = base.new_empty(len(base), len(models), dtype=widest_float(base.device))
    blocks = (torch.split(tensor, height) for tensor in (out, base, *models))
    for target, origin, *others in zip(*blocks, strict=True):
        for number, rows in enumerate(others):
            difference = torch.sub(rows, origin, out=buffer[: rows.numel()].view(rows.shape))
            target[:, number] = squared_norm(difference)
    return out


def l1_distances(models: Sequence[Tensor], base: Tensor) -> Tensor:
    """[n, len(models)] float64: Σ |x − y| of the rows of each model [n, P] and those of the base."""
    wide = widest_float(base.device)
    return torch.stack([torch.linalg.vector_norm(rows - base, 1, dim=1, dtype=wide) for rows in models], 1)


def pairwise_distances(points: Tensor, metric: str = "l2", others: Tensor | None = None) -> Array:
    """[n, m] float64 distances of rows to the rows of `others`, by default to each other (zero on the diagonal)."""
    n = len(points)
    x = points if others is None else torch.cat([points, others])
    if metric == "l1":
        x = x.to("cpu", torch.float64)
        every = torch.cdist(x, x, p=1).numpy()
    elif metric == "l2":
        from scipy.spatial.distance import cdist  # slow to import, and not every method clusters

        flat = coordinates(x)
        every = cdist(flat, flat)
    else:
        every = 1.0 - cosines(x)
    return np.asarray(every[:n, :n] if others is None else every[:n, n:])


def cosines(points: Tensor) -> Array:
    """[n, n] float64 cosine of every two rows; a row of zeros has the cosine 0 with all others."""
    x = points.to("cpu", torch.float64)
    length = x.norm(dim=1, keepdim=True)
    x = torch.where(length > 0, x / length.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return np.asarray((x @ x.T).clamp(-1, 1).fill_diagonal_(1.0).numpy())


def pairwise_squared_distances(rows: Tensor) -> Tensor:
    """[n, n] float64: ‖a‖² + ‖b‖² − 2⟨a, b⟩, on the rows' device. The size of one row does not touch the distances of
    the others, which `coordinates` cannot promise: for rows that may be hostile."""
    float_type = widest_float(rows.device)
    gram = torch.zeros(len(rows), len(rows), dtype=float_type, device=rows.device)
    for block in torch.split(rows, max(1, GRAM // max(len(rows), 1)), 1):
        wide = block.to(float_type)
        gram.addmm_(wide, wide.T)
    square = gram.diagonal()
    return (square[:, None] + square - 2 * gram).clamp_min_(0)


def coordinates(*points: Tensor) -> Array:
    """Rows with the same pairwise distances as all the points, each argument being [.., P], in no more dimensions than
    there are points (float64).

    Distances below 1e-7 of the largest are not exact; float32 models that close differ in their last bits."""
    n, width = sum(len(rows) for rows in points), points[0].shape[1]
    if width <= n:
        x = torch.cat(points).to("cpu", torch.float64)
        x = x - x[:1]
        return np.asarray((x - x.mean(0)).numpy())
    step = max(1, COORDINATES // n)
    gram = torch.zeros(n, n, dtype=torch.float64)
    buffer = torch.empty(n, step, dtype=torch.float64)
    for begin in range(0, width, step):
        x = buffer[:, : width - begin]
        row = 0
        for rows in points:
            x[row : row + len(rows)] = rows[:, begin : begin + step]
            row += len(rows)
        x -= x[:1].clone()  # where models are close, their products then lose nothing, and equal ones are exactly 0
        gram.addmm_(x, x.T)
    gram += gram.mean() - gram.mean(0) - gram.mean(1, keepdim=True)  # as if their mean had been subtracted
    values, vectors = np.linalg.eigh(gram.numpy())
    return np.asarray(vectors * np.sqrt(np.clip(values, 0.0, None)))


def _dot_square(row: Tensor) -> float:
    return sum(float(part @ part) for part in torch.split(row, DOT))


def _piece_norms(x: Tensor) -> Tensor:
    """[..., pieces]: norms of the pieces of x [..., P], short enough for sums in x's own type."""
    pieces, rest = divmod(x.shape[-1], PIECE)
    whole = x[..., : pieces * PIECE].reshape(*x.shape[:-1], pieces, PIECE)
    norms: Tensor = torch.linalg.vector_norm(whole, dim=-1)
    if not rest:
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(x[..., -rest:], dim=-1, keepdim=True)], -1)
