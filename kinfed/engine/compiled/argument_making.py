"""Arguments of the compiled calls (kinfed.engine.compiled.kernel_arguments), made of tensors that the caller holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kinfed.data import Split
from kinfed.engine.compiled.fused_net import FusedNet, Shape
from kinfed.engine.compiled.kernel_arguments import NOWHERE, BatchWindows, ExampleSource, Rows, Work

# As kinfed.engine.compiled.fused_steps numbers what examples are stored as; whole numbers are those of vectors.
STORED = {torch.float32: 0, torch.uint8: 1}
NUMBERED = {torch.int32: 2, torch.int64: 3}
_NO_NUMBERS = np.zeros(0, np.float32)


def is_readable(rows: Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.stride(1) == 1


def readable(rows: Tensor | None) -> Tensor | None:
    """Rows [n, P] of float32 whose numbers lie side by side; one for all clients stays one."""
    if rows is None or is_readable(rows):
        return rows
    one_for_all = rows.stride(0) == 0
    dense = (rows[:1] if one_for_all else rows).to(torch.float32).contiguous()
    return dense.expand_as(rows) if one_for_all else dense


def rows_of(rows: Tensor | None, some: slice | None = None) -> Rows:
    """All rows of a tensor that the caller holds, or some; a broadcast row is read again and again."""
    if rows is None:
        return NOWHERE
    distance = rows.stride(0)
    first = 0 if some is None else some.start
    return Rows(rows.data_ptr() + first * distance * rows.element_size(), distance)


def source_of(split: Split, shape: Shape) -> ExampleSource:
    raw, vectors, labels = split.features.raw, split.features.vectors, split.labels.numpy()
    if vectors is not None:
        kind, mean, factor, address = NUMBERED[raw.dtype], _NO_NUMBERS, _NO_NUMBERS, vectors.data_ptr()
    else:
        kind, (mean, factor), address = STORED[raw.dtype], split.features.standardization(), 0
    return ExampleSource(raw.data_ptr(), kind, mean, factor, address, shape.length, shape.width, labels)


def windows_of(
    split: Split, start: np.ndarray, count: np.ndarray, steps: np.ndarray, batch: int, by_epoch: bool
) -> BatchWindows:
    importance = _NO_NUMBERS if split.weights is None else split.weights.numpy()
    return BatchWindows(split.rows.numpy(), start, count, steps, importance, batch, by_epoch)


def by_client(value: float | Tensor, n: int) -> np.ndarray:
    """[n] float64 of what is a number for all clients, or one for each."""
    return value.to(torch.float64).contiguous().numpy() if isinstance(value, Tensor) else np.full(n, float(value))


class WorkMemory:
    """Memory of one call for a batch of `width` examples and what the layers make of it."""

    def __init__(self, net: FusedNet, shape: Shape, width: int, labels: Tensor) -> None:
        self.width = max(width, 1)
        sizes = [self.width * shape.length * shape.width, *net.memory(shape, self.width)]
        self._numbers = np.empty(sum(sizes), np.float32)
        x, hidden, delta, spare = (self._numbers.ctypes.data + 4 * sum(sizes[:part]) for part in range(4))
        y, weight = np.empty(self.width, labels.numpy().dtype), np.empty(self.width, np.float32)
        self.argument = Work(x, hidden, delta, spare, y, weight)
