"""Memory for rows of large models, used again.

The C library keeps no block of more than 32 MB that was given back, and the system clears each page of a new one at the
first touch: of 11 million parameters (45 MB) that took 20 ms, and to copy them 4. So such blocks are kept here for the
next rows of the same size. New ones come from numpy, which asks Linux for pages of 2 MB, the faster ones to clear.
Smaller blocks find memory that was used before anyway, and are torch's own.
"""

import weakref
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    """Give unused memory back to the system."""
    _free.clear()


def _new_block(nbytes: int) -> Block:
    block = np.empty(nbytes + BOUNDARY, dtype=np.uint8)
    begin = -block.ctypes.data % BOUNDARY
    return block[begin : begin + nbytes]


def _give_back(free: list[Block], block: Block) -> None:
    """Keep a block that is no longer read, unless enough of its size are free."""
    if (len(free) + 1) * block.nbytes <= KEPT:
        free.append(block)
