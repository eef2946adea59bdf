"""Partitions: options of all of them for the test split, dealing rows by a table of counts, and clients without
design, which are equal random parts or those that a data set names itself.

Option `split` says where the clients' test examples come from:

  official  the partition assigns the training rows; the data set's own test rows follow in the same proportions
  pooled    the partition assigns all rows, then each client's are divided at random
  train     as pooled, with the official training rows alone
  auto      official where the data set has test rows of its own, else pooled

A table of counts [K, C] says how many examples of every class every client receives. Rows of a class are put in
random order and handed out piece by piece, so no row goes to two clients.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import check_options, option, rng
from kinfed.data.examples.arrays import name_keys
from kinfed.data.examples.features import Features
from kinfed.data.examples.ragged import Ragged, hold_out
from kinfed.data.sources.registered import PARTITIONS
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError, DataError

TestRows = Literal["auto", "official", "pooled", "train"]
# Texts of options that several partitions have.
SPLIT_TEXT = "where test examples come from: auto, official, pooled or train"
HOLDOUT_TEXT = "share of a client's examples kept for testing (not with official)"
OVERLAP_TEXT = "clients may hold the same example (never one in training, another in test)"


@dataclass
class Assignment:
    """Rows that every client holds: what a partition decides."""

    train: Ragged
    test: Ragged
    val: Ragged | None = None
    names: list[str] | None = None
    groups: Tensor | None = None
    group_names: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    features: Features | None = None  # the examples as their clients see them, where that is not as the source has them
    labels: Tensor | None = None  # and their classes


@dataclass(frozen=True)
class Partition:
    """Options are fields; `assign` is the rule."""

    split: TestRows = option("auto", SPLIT_TEXT)
    test_fraction: float = option(0.25, HOLDOUT_TEXT, ge=0, lt=1)

    def __post_init__(self) -> None:
        check_options(self, f"partition {self.name}")

    @property
    def name(self) -> str:
        """The registered name; draws are keyed by it."""
        return PARTITIONS.name_of(type(self)) or type(self).__name__

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        raise NotImplementedError

    def key(self, seed: int, purpose: str) -> Tensor:
        return rng.root(seed, f"partition-{self.name}-{purpose}")

    def train_and_test_rows(self, source: Source) -> tuple[Tensor, Tensor | None]:
        """Rows to assign, and the official test rows where these are used as such."""
        if self.split in ("official", "train") and not source.has_official_test:
            raise ConfigError(f"{source.name} has no official test split; use split = pooled")
        if self.split == "pooled" or not source.has_official_test:
            return torch.arange(len(source)), None
        train = source.rows(test=False)
        return train, None if self.split == "train" else source.rows(test=True)

    def clients(self, num_clients: int | None) -> int:
        if num_clients is None:
            raise ConfigError(f"partition {self.name} needs a number of clients")
        return num_clients

    def hold_out_test(self, owned: Ragged, seed: int) -> tuple[Ragged, Ragged]:
        """(train, test) rows of every client, divided at random."""
        keys = rng.fold(rng.root(seed, "test-split"), torch.arange(len(owned)))
        return hold_out(owned, self.test_fraction, keys)


@dataclass(frozen=True)
class CountPartition(Partition):
    """A partition that says how many examples of each class each client gets; the rows are then dealt at random.
    Clients of one with an option `overlap` may hold the same rows."""

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        """[K, C] counts for classes with available [C] examples, and notes for the reader."""
        raise NotImplementedError

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        check_has_classes(source, self.name)
        rows, official = self.train_and_test_rows(source)
        classes = by_class(rows, source.labels, source.num_classes, self.key(seed, "rows"))
        counts, notes = self.counts(classes.count, self.clients(num_clients), seed, source)
        if getattr(self, "overlap", False):
            return Assignment(*self._overlapping(classes, counts, official, source, seed), notes=notes)
        owned = deal(counts, classes)
        if official is None:
            return Assignment(*self.hold_out_test(owned, seed), notes=notes)
        others = by_class(official, source.labels, source.num_classes, self.key(seed, "test-rows"))
        test_counts = matching(counts, classes.count, others.count)
        return Assignment(owned, deal(test_counts, others), notes=notes)

    def _overlapping(
        self, classes: Ragged, counts: Tensor, official: Tensor | None, source: Source, seed: int
    ) -> tuple[Ragged, Ragged]:
        """Training and test rows are drawn from two pools, so that no one trains on what another is tested on."""
        if official is not None:
            train_pool, train = classes, counts
            test_pool = by_class(official, source.labels, source.num_classes, self.key(seed, "test-rows"))
            test = counts * test_pool.count // classes.count.clamp_min(1)
        else:
            keys = rng.fold(self.key(seed, "pools"), torch.arange(len(classes)))
            train_pool, test_pool = hold_out(classes, self.test_fraction, keys)
            trained = ((1 - self.test_fraction) * counts.to(torch.float64) + 1e-9).to(torch.int64)
            train = torch.where(counts > 0, trained.clamp_min(1), 0).minimum(train_pool.count)
            test = (counts - train).minimum(test_pool.count)
        train_rows = deal_overlapping(train, train_pool, self.key(seed, "draw-train"))
        return train_rows, deal_overlapping(test, test_pool, self.key(seed, "draw-test"))


def check_has_classes(source: Source, partition: str) -> None:
    """For partitions that deal rows by class."""
    if not source.problem.has_classes:
        kind = "a number" if source.problem.is_regression else source.problem.in_words()
        raise ConfigError(
            f"partition {partition} deals rows by class, and the target of {source.name} is {kind}; name the clients "
            "(client_column), or use partition iid"
        )


def by_class(rows: Tensor, labels: Tensor, num_classes: int, key: Tensor) -> Ragged:
    """The rows of every class in random order: a Ragged whose lists are classes."""
    grouped = Ragged.grouped(rows, labels[rows], num_classes)
    return grouped.shuffled(rng.fold(key, torch.arange(num_classes)))


def deal(counts: Tensor, classes: Ragged) -> Ragged:
    """Client k gets the next counts[k, c] rows of class c, for k = 0, 1, ...: disjoint lists, rows ascending."""
    clients, num_classes = counts.shape
    pieces = counts.T.reshape(-1)  # class by class, clients in order
    owner = torch.repeat_interleave(torch.arange(clients).repeat(num_classes), pieces)
    per_class = counts.sum(0)
    label = torch.repeat_interleave(torch.arange(num_classes), per_class)
    place = torch.arange(len(label)) - (torch.cumsum(per_class, 0) - per_class)[label]
    return Ragged.grouped(classes.rows[classes.offsets[label] + place], owner, clients).ascending()


def deal_overlapping(counts: Tensor, classes: Ragged, key: Tensor) -> Ragged:
    """Client k gets counts[k, c] distinct rows of class c, drawn without regard to the other clients."""
    clients = len(counts)
    rows, owners = [classes.rows[:0]], [classes.rows[:0]]
    available = classes.count.tolist()
    for client, label in counts.nonzero().tolist():
        count = int(counts[client, label])
        choice = rng.choose(rng.fold(key, client, label), available[label], count)
        rows.append(classes[label][choice])
        owners.append(torch.full((count,), client))
    return Ragged.grouped(torch.cat(rows), torch.cat(owners), clients).ascending()


def matching(counts: Tensor, available: Tensor, other: Tensor) -> Tensor:
    """Counts from another pool in the same proportions: client k gets counts[k, c] / available[c] of class c there.

    Cut points are rounded, not shares: pieces never exceed the pool, and are less than 1 off the exact share."""
    share = torch.cumsum(counts, 0).to(torch.float64) / available.clamp_min(1)
    cuts = torch.floor(share * other + 1e-9).to(torch.int64)
    return torch.diff(cuts, dim=0, prepend=torch.zeros(1, counts.shape[1], dtype=torch.int64))


def evenly(sizes: Tensor, parts: int) -> Tensor:
    """[K, parts]: every size divided into whole numbers that differ by at most one."""
    return (sizes[:, None] + torch.arange(parts - 1, -1, -1)) // parts


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
        sizes = evenly(torch.tensor([len(rows)]), clients)[0]
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
            supply = f"{source.name} has {len(eligible)} with at least {self.min_size} training examples"
            raise ConfigError(f"{num_clients} clients asked for, but {supply}")
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
