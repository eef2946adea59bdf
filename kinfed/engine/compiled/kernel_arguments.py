"""Arguments of the compiled calls (kinfed.engine.compiled.fused_kernels), and how they are made of tensors.

Each class is the one place that says what a call is told and in which order. `int` and `bool` are words of 64 bits;
where a word is an address, the caller holds the memory, of float32 unless it says otherwise. Arrays are in C order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kinfed.data import Split

if TYPE_CHECKING:
    from kinfed.engine.compiled.fused_net import FusedNet, Shape

# The type of an array's numbers and how many axes it has. "label" and "layers" stand for what kernels are compiled anew
# for: whole numbers (classes) or float32, and a table (dense layers) or Unrolled (LSTM layers).
Ints: TypeAlias = Annotated[np.ndarray, "int64", 1]
IntRows: TypeAlias = Annotated[np.ndarray, "int64", 2]
Keys: TypeAlias = Annotated[np.ndarray, "uint64", 1]
Bytes: TypeAlias = Annotated[np.ndarray, "uint8", 1]
Singles: TypeAlias = Annotated[np.ndarray, "float32", 1]
SingleRows: TypeAlias = Annotated[np.ndarray, "float32", 2]
Doubles: TypeAlias = Annotated[np.ndarray, "float64", 1]
DoubleRows: TypeAlias = Annotated[np.ndarray, "float64", 2]
Labels: TypeAlias = Annotated[np.ndarray, "label", 1]
LabelRows: TypeAlias = Annotated[np.ndarray, "label", 2]
Layers: TypeAlias = Annotated[Any, "layers"]


class Unrolled(NamedTuple):
    """An LSTM network, taken through `length` time steps."""

    table: IntRows
    length: int


class Network(NamedTuple):
    layers: Layers
    trains: IntRows  # by layer: whether weights and biases are trained
    outputs: int  # of the last layer
    columns: int  # numbers of a model
    loss: Doubles  # of residuals: SIGN and THRESHOLD


class Rows(NamedTuple):
    """One row of numbers per client."""

    address: int  # 0: there are none
    distance: int  # numbers from row to row; 0: one row for all


NOWHERE = Rows(0, 0)


class ExampleSource(NamedTuple):
    """All examples [N, length, width] and their labels."""

    raw: int  # address, of numbers of this kind
    kind: int
    mean: Singles
    factor: Singles
    vectors: int  # address of the vectors that `raw` numbers, or 0
    length: int
    width: int
    labels: Labels


class BatchWindows(NamedTuple):
    """Which examples make up the batches of each client (kinfed.data.examples.windows)."""

    rows: Ints  # numbers of examples, client after client
    start: Ints
    counts: Ints
    steps: Ints
    importance: Singles  # of every entry of `rows`; empty if all count alike
    batch: int
    by_epoch: bool


class OrderDraws(NamedTuple):
    """Keys from which orders of examples are drawn, and memory for those of one client."""

    key: Keys
    epochs: Ints
    order: Ints
    places: Ints


class OrderStreams(NamedTuple):
    """Orders of examples that were drawn before."""

    order: IntRows  # by stream
    offset: Ints  # of a client's first one


class ClientTerms(NamedTuple):
    """The rate of each client's steps, and what is added to its gradients."""

    rates: Doubles
    lams: Doubles
    center: Rows
    drift: Rows


class StepTerms(NamedTuple):
    """The terms of one step of one client; addresses are 0 without a center or drift."""

    rate: float
    lam: float
    center: np.int64
    drift: np.int64
    decay: float


class OptimizerMemory(NamedTuple):
    rule: Doubles  # KIND, DECAY, ...
    mask: Bytes  # columns that change
    first: Rows
    second: Rows
    taken: Singles  # steps of each client so far
    gradient: int  # address of memory for one


class GivenBatch(NamedTuple):
    """One batch of each client, as it is."""

    examples: Rows
    length: int
    width: int
    labels: LabelRows
    weights: SingleRows


class ScoredPart(NamedTuple):
    """The examples of each client that are scored."""

    rows: Ints
    start: Ints
    counts: Ints
    together: int


class Scores(NamedTuple):
    correct: Doubles
    loss: Doubles
    outputs: int  # address for the outputs of all examples, or 0


class ProgramTables(NamedTuple):
    """An update program (kinfed.engine.compiled.fused_net), and the models and numbers it changes."""

    what: IntRows
    amount: DoubleRows
    address: Ints  # [models] of the first client's
    distance: Ints  # [models] numbers from client to client
    numbers: DoubleRows  # [numbers, clients]
    gradient: int  # address of memory for one, or 0


class Work(NamedTuple):
    """Memory for a batch and what layers make of it."""

    x: int
    hidden: int
    delta: int
    spare: int
    y: Labels
    weight: Singles


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
