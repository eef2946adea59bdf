"""Clients without design: equal random parts, and the clients that a data set names itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.arrays import name_keys
from kinfed.data.federation import Ragged, hold_out
from kinfed.data.partitions import dealing
from kinfed.data.partitions.base import (
    Partition,
    Shares,
    require_positive,
)
from kinfed.data.source import Source
from kinfed.errors import ConfigError, DataError


@dataclass(frozen=True)
class Iid(Partition):
    """A random order of all rows, cut into parts that differ in size by at most one."""

    name: ClassVar[str] = "iid"
    summary: ClassVar[str] = "equal random parts: every client sees the same distribution"

    def share(self, source: Source, num_clients: int | None, seed: int) -> Shares:
        clients = self.clients(num_clients)
        pool, official = self.pools(source)
        owned = self._cut(pool, clients, self.key(seed, "train"))
        if official is None:
            return Shares(*self.divided(owned, seed))
        return Shares(owned, self._cut(official, clients, self.key(seed, "test")))

    @staticmethod
    def _cut(rows: Tensor, clients: int, key: Tensor) -> Ragged:
        order = rows[rng.permutation(key, len(rows))]
        sizes = dealing.evenly(torch.tensor([len(rows)]), clients)[0]
        owner = torch.repeat_interleave(torch.arange(clients), sizes)
        return Ragged.grouped(order, owner, clients).ascending()


@dataclass(frozen=True)
class Column(Partition):
    """The data set's own clients: writers, speakers, hospitals, or the client column of a table.

    Train, val and test marks of the data set are kept; without test marks each client's rows are divided at random,
    keyed by the client's name. `clients` fewer than there are takes a random choice."""

    name: ClassVar[str] = "column"
    summary: ClassVar[str] = "the clients that the data set itself names"
    min_size: Annotated[int, "leave out clients with fewer training examples"] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(min_size=self.min_size)

    def share(self, source: Source, num_clients: int | None, seed: int) -> Shares:
        if source.owners is None or source.owner_names is None:
            raise ConfigError(
                f"partition column needs to know the clients, but {source.name} names none; "
                "use another partition, or client_column for a table of your own"
            )
        pool, official = self.pools(source)
        everyone = len(source.owner_names)
        owned = Ragged.grouped(pool, source.owners[pool], everyone)
        val = Ragged.empty(everyone)
        if source.is_val is not None:
            marked = source.is_val[owned.rows]
            owned, val = owned.filter(~marked), owned.filter(marked)
        if official is None:
            train, test = hold_out(
                owned, self.test_fraction, name_keys(rng.root(seed, "test-split"), source.owner_names)
            )
        else:
            train, test = owned, Ragged.grouped(official, source.owners[official], everyone)
        kept = (train.count >= self.min_size).nonzero().squeeze(1)
        notes = []
        if len(kept) < everyone:
            notes.append(
                f"{everyone - len(kept)} of {everyone} clients have fewer than {self.min_size} training examples"
            )
        if num_clients is not None and num_clients > len(kept):
            raise ConfigError(
                f"{num_clients} clients asked for, but {source.name} has {len(kept)} with at least "
                f"{self.min_size} training examples"
            )
        if len(kept) == 0:
            raise DataError(f"no client of {source.name} has {self.min_size} training examples")
        if num_clients is not None and num_clients < len(kept):
            kept = kept[rng.choose(self.key(seed, "clients"), len(kept), num_clients)]
        groups, group_names = None, None
        if source.owner_groups is not None and source.group_names is not None:
            present, groups = torch.unique(source.owner_groups[kept], return_inverse=True)
            group_names = [source.group_names[g] for g in present.tolist()]
        return Shares(
            train.take(kept), test.take(kept), val.take(kept), [source.owner_names[k] for k in kept.tolist()],
            groups, group_names, notes,
        )  # fmt: skip
