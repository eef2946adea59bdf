"""What the optimizers of local loops remember from round to round: moments of each client, beside its state.

A pool hands the moments of a cohort to its local loops through the training split (`Split.memory`) and stores what they
leave. Loops are numbered in the order in which a method calls them, so that each has moments of its own: Ditto's first
loop trains the server's model, its second the personal one. All zeros is an optimizer that has not taken a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from kinfed.core import Tree
from kinfed.errors import ConfigError


@dataclass
class Moments(Tree):
    """Rows of clients by name, "<loop>.<moment>"; which ones there are is known after the first round."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # [n, ...] each

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)({name: function(tensor) for name, tensor in self.tensors.items()})

    def named(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def like(self, tensors: Mapping[str, Tensor]) -> Self:
        return type(self)(dict(tensors))


class LoopMemory:
    """The moments of `num_rows` clients during one round; loops read them when they begin and write them at the end."""

    def __init__(self, num_rows: int, moments: Moments) -> None:
        """`moments` are left as they are; empty where no client has any yet."""
        self.num_rows = num_rows
        self._tensors = moments.named()
        self._first_round = not self._tensors
        self._loops = 0

    @property
    def moments(self) -> Moments:
        """As the loops left them."""
        if not self._tensors:
            raise ConfigError(
                "optimizer_state = kept: this method ran no local loop (`sgd`), so there is nothing to keep; use reset"
            )
        return Moments(dict(self._tensors))

    def next_loop(self) -> int:
        """The number of a loop that begins."""
        self._loops += 1
        return self._loops - 1

    def read(self, loop: int, name: str, rows: Tensor | None, like: Tensor) -> Tensor:
        """A copy of one moment of the clients at `rows` (None: of all), of the shape and type of `like`."""
        tensor = self._tensors.get(f"{loop}.{name}")
        if tensor is None and self._first_round:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        if tensor is None or tensor.shape[1:] != like.shape[1:]:
            raise ConfigError(
                f"local loop {loop + 1} of this method was not there in an earlier round, or trained a model of "
                "another size, so there are no moments for it to go on from; use optimizer_state = reset"
            )
        return tensor.to(like.dtype).clone() if rows is None else tensor.to(like.dtype)[rows]

    def write(self, loop: int, name: str, rows: Tensor | None, value: Tensor) -> None:
        key = f"{loop}.{name}"
        if rows is None:
            self._tensors[key] = value
            return
        before = self._tensors.get(key)
        whole = value.new_zeros(self.num_rows, *value.shape[1:]) if before is None else before.clone()
        whole[rows] = value
        self._tensors[key] = whole


@dataclass(frozen=True)
class MemoryView:
    """The memory of a cohort, as some of its clients see it."""

    memory: LoopMemory
    rows: Tensor | None = None  # [n] positions in the cohort; None: all of it, in order

    def take(self, index: Tensor | slice) -> MemoryView:
        rows = torch.arange(self.memory.num_rows) if self.rows is None else self.rows
        return MemoryView(self.memory, rows[index])
