"""Kernels on rows of models: means, sums, norms and distances of long rows of float32; memory for them, and bits.

Models are few rows of very many numbers. A row passes through memory once: work is cut into blocks that stay in the
processor's cache, sums are added up in float64 (or exactly enough in pieces of float32), and no float64 copy of all
rows is ever made. Block sizes are part of the result: another size adds up in another order.
"""

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

IN_CACHE = 1 << 17  # numbers that a core can come back to without asking the memory
PIECE = 64  # numbers whose squares are added up in their own type
LONG = 1 << 14  # a row of at least so many numbers goes through the processor's dot product, alone
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


# Memory for rows of large models, used again. The C library keeps no block of more than 32 MB that was given back, and
# the system clears each page of a new one at the first touch: of 11 million parameters (45 MB) that took 20 ms, and to
# copy them 4. So such blocks are kept here for the next rows of the same size. New ones come from numpy, which asks
# Linux for pages of 2 MB, the faster ones to clear. Smaller blocks find memory that was used before anyway, and are
# torch's own.
LARGE = 32 << 20  # bytes; of more the C library (glibc) keeps nothing
KEPT = 256 << 20  # bytes of free blocks of one size
BOUNDARY = 64  # bytes, at a multiple of which torch's memory begins: products go by it, to the last bit

Block = np.ndarray[Any, np.dtype[np.uint8]]

_free: dict[int, list[Block]] = {}  # by size


def empty_rows(like: Tensor, *shape: int) -> Tensor:
    """`like.new_empty(shape)`."""
    nbytes = prod(shape) * like.element_size()
    if nbytes <= LARGE or like.device.type != "cpu":
        return like.new_empty(shape)
    free = _free.setdefault(nbytes, [])
    try:
        block = free.pop()  # no lock: a finalizer may run anywhere, even where this thread holds it
    except IndexError:
        block = _new_block(nbytes)
    lease = block[:]  # dies with the last tensor that looks at the block
    weakref.finalize(lease, _give_back, free, block).atexit = False
    return torch.from_numpy(lease).view(like.dtype).view(shape)


def copied_rows(rows: Tensor) -> Tensor:
    """A contiguous copy."""
    return empty_rows(rows, *rows.shape).copy_(rows)


def difference(rows: Tensor, others: Tensor) -> Tensor:
    """rows − others, of one shape and type."""
    return torch.sub(rows, others, out=empty_rows(rows, *rows.shape))


def forget_free_blocks() -> None:
    """Give what nobody uses back to the system."""
    _free.clear()


def _new_block(nbytes: int) -> Block:
    block = np.empty(nbytes + BOUNDARY, dtype=np.uint8)
    begin = -block.ctypes.data % BOUNDARY
    return block[begin : begin + nbytes]


def _give_back(free: list[Block], block: Block) -> None:
    if (len(free) + 1) * block.nbytes <= KEPT:
        free.append(block)


# Masks and small numbers as bits: eight columns, or a few codes, in a byte, as messages carry them.
_PLACES = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
_ONES = torch.tensor([number.bit_count() for number in range(256)])  # set bits of every byte


def packed(mask: Tensor) -> Tensor:
    """[n, ⌈T/8⌉] uint8 of a mask [n, T]."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8))
    return (padded.reshape(len(mask), -1, 8) * _PLACES.to(mask.device)).sum(2, dtype=torch.uint8)


def unpacked(bits: Tensor, width: int) -> Tensor:
    """bool [..., width]: the columns behind those that were packed are False."""
    mask = (bits[..., None] & _PLACES.to(bits.device) > 0).flatten(-2)
    return torch.nn.functional.pad(mask[..., :width], (0, max(width - mask.shape[-1], 0)))


def count_bits(bits: Tensor) -> int:
    """Number of bits that are set in bytes of any shape."""
    return int((torch.bincount(bits.flatten().to("cpu", torch.int64), minlength=256) * _ONES).sum())


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """uint8 [n, ⌈d width/8⌉] of whole numbers [n, d] in [0, 2^width), the lowest bit of each first."""
    values = numbers.cpu().numpy().astype(np.uint32)
    bits = (values[:, :, None] >> np.arange(width, dtype=np.uint32)).astype(np.uint8) & 1
    return torch.from_numpy(np.packbits(bits.reshape(len(values), -1), axis=1, bitorder="little"))


def unpack_numbers(code: Tensor, count: int, width: int) -> Tensor:
    """int64 [n, count]: the inverse of `pack_numbers`."""
    bits = np.unpackbits(code.numpy(), axis=1, count=count * width, bitorder="little")
    places = np.int64(1) << np.arange(width, dtype=np.int64)
    return torch.from_numpy(bits.reshape(len(bits), count, width) @ places)
