"""Moments that the optimizers of local loops remember from round to round, of each client, beside its state.

A pool hands the moments of a cohort to the training split (`Split.memory`) and stores what local loops leave. A method
with several loops numbers them, `batches(training, loop=1)`, so that each is handed its own: Ditto's loop 0 trains the
server's model, loop 1 the personal one. All zeros is an optimizer that has not taken a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
        """`moments` are left as they are; empty if no client has any yet."""
        self.num_rows = num_rows
        self._tensors = moments.named()
        self._first_round = not self._tensors
        self._begun: dict[int, Tensor] = {}  # by loop: which clients it trains, bool [num_rows]

    @property
    def moments(self) -> Moments:
        """Moments as the loops left them."""
        if not self._tensors:
            raise ConfigError(
                "optimizer_state = kept: this method ran no local loop (`sgd`), so there is nothing to keep; use reset"
            )
        return Moments(dict(self._tensors))

    @contextmanager
    def of_loop(self, loop: int, rows: Tensor | None, blank: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The moments of a loop that trains the clients at `rows` (None: all), once in a round: to be changed in place
        and stored at the end; `blank` are those of a new loop."""
        begun = self._begun.setdefault(loop, torch.zeros(self.num_rows, dtype=torch.bool))
        place = slice(None) if rows is None else rows
        if bool(begun[place].any()):
            raise ConfigError(
                f"two local loops of this method share the moments of loop {loop}; number the others "
                "(`batches(training, loop=1)`), or use optimizer_state = reset"
            )
        begun[place] = True
        moments = {name: self._read(loop, name, rows, like=value) for name, value in blank.items()}
        yield moments
        for name, moment in moments.items():
            self._write(f"{loop}.{name}", rows, moment)

    def _read(self, loop: int, name: str, rows: Tensor | None, like: Tensor) -> Tensor:
        """Copy one moment of the clients at `rows` (None: of all), of the shape and type of `like`."""
        tensor = self._tensors.get(f"{loop}.{name}")
        if tensor is None and self._first_round:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        if tensor is None or tensor.shape[1:] != like.shape[1:]:
            raise ConfigError(
                f"local loop {loop} of this method was not there in an earlier round, or trained a model of "
                "another size, so there are no moments for it to go on from; use optimizer_state = reset"
            )
        return tensor.to(like.dtype).clone() if rows is None else tensor.to(like.dtype)[rows]

    def _write(self, key: str, rows: Tensor | None, value: Tensor) -> None:
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

    def of_loop(self, loop: int, blank: Mapping[str, Tensor]) -> AbstractContextManager[dict[str, Tensor]]:
        """The moments of a loop, to be changed in place and stored at the end; `blank` are those of a new one."""
        return self.memory.of_loop(loop, self.rows, blank)
