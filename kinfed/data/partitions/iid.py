"""Clients without design: equal random parts, and the clients that a data set names itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.examples.arrays import name_keys
from kinfed.data.examples.ragged import Ragged, hold_out
from kinfed.data.partitions import dealing
from kinfed.data.partitions.base import Assignment, Partition
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError, DataError


@dataclass(frozen=True)
class Iid(Partition):
    """A random order of all rows, cut into parts that differ in size by at most one."""

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        clients = self.clients(num_clients)
        rows, official = self.train_and_test_rows(source)
        owned = self._deal(rows, clients, self.key(seed, "train"))
        if official is None:
            return Assignment(*self.hold_out_test(owned, seed))
        return Assignment(owned, self._deal(official, clients, self.key(seed, "test")))

    @staticmethod
    def _deal(rows: Tensor, clients: int, key: Tensor) -> Ragged:
        order = rows[rng.permutation(key, len(rows))]
        sizes = dealing.evenly(torch.tensor([len(rows)]), clients)[0]
        owner = torch.repeat_interleave(torch.arange(clients), sizes)
        return Ragged.grouped(order, owner, clients).ascending()


@dataclass(frozen=True)
class NaturalClients(Partition):
    """The data set's own clients: writers, speakers, hospitals, or the client column of a table.

    Train, val and test marks of the data set are eligible; without test marks each client's rows are divided at random,
    keyed by the client's name. `clients` fewer than there are takes a random choice."""

    min_size: int = option(1, "leave out clients with fewer training examples", ge=1)

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        if source.owners is None or source.owner_names is None:
            raise ConfigError(
                f"partition column needs to know the clients, but {source.name} names none; "
                "use another partition, or client_column for a table of your own"
            )
        rows, official = self.train_and_test_rows(source)
        everyone = len(source.owner_names)
        owned = Ragged.grouped(rows, source.owners[rows], everyone)
        val = Ragged.empty(everyone)
        if source.is_val is not None:
            marked = source.is_val[owned.rows]
            owned, val = owned.filter(~marked), owned.filter(marked)
        if official is None:
            keys = name_keys(rng.root(seed, "test-split"), source.owner_names)
            train, test = hold_out(owned, self.test_fraction, keys)
        else:
            train, test = owned, Ragged.grouped(official, source.owners[official], everyone)
        eligible = (train.count >= self.min_size).nonzero().squeeze(1)
        small = everyone - len(eligible)
        note = f"{small} of {everyone} clients have fewer than {self.min_size} training examples"
        if num_clients is not None and num_clients > len(eligible):
            found = f"{source.name} has {len(eligible)} with at least {self.min_size} training examples"
            raise ConfigError(f"{num_clients} clients asked for, but {found}")
        if len(eligible) == 0:
            raise DataError(f"no client of {source.name} has {self.min_size} training examples")
        if num_clients is not None and num_clients < len(eligible):
            eligible = eligible[rng.choose(self.key(seed, "clients"), len(eligible), num_clients)]
        groups, group_names = None, None
        if source.owner_groups is not None and source.group_names is not None:
            present, groups = torch.unique(source.owner_groups[eligible], return_inverse=True)
            group_names = [source.group_names[g] for g in present.tolist()]
        names, notes = [source.owner_names[k] for k in eligible.tolist()], [note] if small else []
        train, test, val = (split.take(eligible) for split in (train, test, val))
        return Assignment(train, test, val, names, groups, group_names, notes)
