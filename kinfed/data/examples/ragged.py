"""Lists of unequal length, stored one after the other (CSR): no padding, whatever the sizes; and splits of every
client's rows that keep its mixture of labels: train and test, and the folds of a cross-validation.

A stratum is a class, or of a number a quarter of the client's own rows by rank. Of n rows of which m are to be split
off, a stratum of n_s gives m n_s / n, rounded down, and the rows still lacking come from the strata with the largest
remainders: no stratum is ever a whole row away from its share.

Folds deal out all rows: in order of label (rows of one label at random) every row goes to the next fold, from a random
first one on. Sizes of a client's folds differ by one at most, and so do their numbers of every class. A client with
fewer rows than folds is tested in as many folds as it has rows. One that has a single row trains on it in all folds,
and is not tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.problem import Problem
from kinfed.errors import ConfigError

QUARTERS = 4
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


def strata(rows: Ragged, labels: Tensor, problem: Problem) -> tuple[Tensor, int]:
    """[total] the stratum of every entry, and how many strata there are."""
    values, number = problem.strata(labels)
    own = values[rows.rows]
    if number:
        return own, number
    order = np.lexsort((own.numpy(), rows.owner.numpy()))
    rank = torch.empty(len(own), dtype=torch.int64)
    rank[torch.from_numpy(order)] = rows.position  # of a client's list, whose entries lie side by side in the order too
    return rank * QUARTERS // rows.count[rows.owner], QUARTERS


def split_stratified(
    rows: Ragged, head: Tensor, labels: Tensor, problem: Problem, keys: Tensor
) -> tuple[Ragged, Ragged]:
    """head[k] entries of every list k, drawn at random in proportion to its strata, and the rest; keys [K]."""
    stratum, number = strata(rows, labels, problem)
    clients = len(rows)
    parts = Ragged.grouped(rows.rows, rows.owner * number + stratum, clients * number)
    sizes = parts.count.reshape(clients, number)
    quota = sizes * head[:, None].to(torch.float64) / rows.count.clamp_min(1)[:, None]
    take = (quota + 1e-9).floor().to(torch.int64)
    # Largest remainders first, ties at random.
    tie = rng.to_unit(rng.at(rng.fold(keys, 1)[:, None].expand(-1, number), torch.arange(number)))
    remainder = torch.where(take < sizes, quota - take, -1.0)
    order = np.lexsort((tie.numpy(), -np.round(remainder.numpy(), 9)), axis=1)
    place = torch.empty_like(take)
    place.scatter_(1, torch.from_numpy(order), torch.arange(number).expand(clients, -1).contiguous())
    take += (place < (head - take.sum(1))[:, None]).to(torch.int64)
    stratum_keys = rng.fold(keys.repeat_interleave(number), 2, torch.arange(number).repeat(clients))
    first, second = (
        Ragged.grouped(part.rows, part.owner // number, clients).ascending()
        for part in parts.shuffled(stratum_keys).split_at(take.reshape(-1))
    )
    return first, second


def fold_numbers(rows: Ragged, folds: int, labels: Tensor, keys: Tensor) -> Tensor:
    """[total] in [0, folds): the fold in which every entry is tested; -1 for the only row of a client."""
    if folds < 2:
        raise ConfigError(f"a cross-validation has at least two folds; got {folds}")
    draw = rng.to_unit(rng.at(rng.fold(keys, 1)[rows.owner], rows.position)).numpy()
    label, owner = labels[rows.rows].numpy(), rows.owner.numpy()
    order = np.lexsort((draw, label, owner))
    number = torch.empty(len(rows.rows), dtype=torch.int64)
    first = (rng.to_unit(rng.at(rng.fold(keys, 2), torch.zeros_like(keys))) * folds).to(torch.int64)
    number[torch.from_numpy(order)] = (rows.position + first[rows.owner]) % folds
    if labels.is_floating_point():  # neighbours by rank, one for each fold, in random order
        block = rows.position // folds
        inside = np.lexsort((draw[order], block.numpy(), owner))
        shuffled = torch.from_numpy(order)[torch.from_numpy(inside)]
        number[shuffled] = (rows.position + first[rows.owner]) % folds
    return torch.where(rows.count[rows.owner] == 1, -1, number)
