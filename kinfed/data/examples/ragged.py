"""Lists of unequal length, stored one after the other (CSR): no padding, whatever the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.errors import ConfigError

SPLITS = ("train", "val", "test")  # the lists of rows that a client has


@dataclass(frozen=True, repr=False)
class Ragged:
    """Index lists of K clients: client k owns rows[offsets[k]:offsets[k+1]]."""

    offsets: Tensor  # [K+1] int64
    rows: Tensor  # [total] int64

    def __repr__(self) -> str:
        return f"<Ragged {len(self.offsets) - 1:,} lists, {len(self.rows):,} rows>"

    @classmethod
    def of(cls, lists: Sequence[Any]) -> Ragged:
        arrays = [np.asarray(item, dtype=np.int64).reshape(-1) for item in lists]
        sizes = torch.tensor([len(array) for array in arrays], dtype=torch.int64)
        rows = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        return cls(_offsets(sizes), torch.from_numpy(rows))

    @classmethod
    def empty(cls, clients: int) -> Ragged:
        return cls(torch.zeros(clients + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    @classmethod
    def grouped(cls, rows: Tensor, owner: Tensor, clients: int) -> Ragged:
        """rows[i] goes to client owner[i]; every list keeps the order of `rows`."""
        order = torch.argsort(owner, stable=True)
        return cls(_offsets(torch.bincount(owner, minlength=clients)), rows[order])

    @property
    def count(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    def counts(self, ids: Tensor) -> Tensor:
        """count[ids], in time that does not grow with the number of clients."""
        return self.offsets.index_select(0, ids + 1) - self.offsets.index_select(0, ids)

    @cached_property
    def longest(self) -> int:
        """Entries of the longest list."""
        return int(self.count.max())

    @property
    def owner(self) -> Tensor:
        """[total] the client of every entry of `rows`."""
        return torch.repeat_interleave(torch.arange(len(self)), self.count)

    @property
    def position(self) -> Tensor:
        """[total] the position of every entry in its client's list."""
        return torch.arange(len(self.rows)) - self.offsets[self.owner]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Tensor:
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def lists(self) -> list[Tensor]:
        return list(torch.split(self.rows, self.count.tolist()))

    def shuffled(self, keys: Tensor) -> Ragged:
        """Every list in random order: list k becomes list[rng.permutation(keys[k], len(list))]."""
        owner = self.owner
        draw = rng.at(keys[owner], self.position)
        order = np.lexsort((draw.numpy(), owner.numpy()))
        return Ragged(self.offsets, self.rows[torch.from_numpy(order)])

    def ascending(self) -> Ragged:
        """Every list sorted."""
        order = np.lexsort((self.rows.numpy(), self.owner.numpy()))
        return Ragged(self.offsets, self.rows[torch.from_numpy(order)])

    def split_at(self, head: Tensor) -> tuple[Ragged, Ragged]:
        """The first head[k] entries of every list k, and the rest of it."""
        first = self.position < head[self.owner]
        taken = torch.minimum(head, self.count)
        return (Ragged(_offsets(taken), self.rows[first]), Ragged(_offsets(self.count - taken), self.rows[~first]))

    def joined(self, other: Ragged) -> Ragged:
        """List k followed by the other's list k."""
        rows, owner = torch.cat([self.rows, other.rows]), torch.cat([self.owner, other.owner])
        return Ragged.grouped(rows, owner, len(self))

    def filter(self, keep: Tensor) -> Ragged:
        """Only the entries with keep[i] true, [total] bool."""
        return Ragged.grouped(self.rows[keep], self.owner[keep], len(self))

    def take(self, ids: Tensor) -> Ragged:
        """The lists of some clients, in the order of `ids`."""
        count = self.count[ids]
        offsets = _offsets(count)
        position = torch.repeat_interleave(self.offsets[ids] - offsets[:-1], count)
        return Ragged(offsets, self.rows[position + torch.arange(len(position))])


def hold_out(rows: Ragged, fraction: float, keys: Tensor) -> tuple[Ragged, Ragged]:
    """Random (train, test) parts of every list; keys [K]. Of n rows int((1 - fraction) n) train, at least one."""
    if not 0 <= fraction < 1:
        raise ConfigError(f"test_fraction must lie in [0, 1); got {fraction}")
    n = rows.count
    trained = ((1 - fraction) * n.to(torch.float64) + 1e-9).to(torch.int64).clamp_min(1)
    train, test = rows.shuffled(keys).split_at(trained)
    return train.ascending(), test.ascending()


def _offsets(sizes: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(sizes, 0)])
