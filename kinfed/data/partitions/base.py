"""The common part of all partitions: options for the test split, and dealing rows by a table of counts.

Option `split` says where the clients' test examples come from:

  official  the partition assigns the training rows; the data set's own test rows follow in the same proportions
  pooled    the partition assigns all rows, then each client's are divided at random
  train     as pooled, with the official training rows alone
  auto      official where the data set has test rows of its own, else pooled
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import check_options, option, rng
from kinfed.data.examples.features import Features
from kinfed.data.examples.ragged import Ragged, hold_out
from kinfed.data.partitions import dealing
from kinfed.data.sources.registered import PARTITIONS
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError

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
        classes = dealing.by_class(rows, source.labels, source.num_classes, self.key(seed, "rows"))
        counts, notes = self.counts(classes.count, self.clients(num_clients), seed, source)
        if getattr(self, "overlap", False):
            return Assignment(*self._overlapping(classes, counts, official, source, seed), notes=notes)
        owned = dealing.deal(counts, classes)
        if official is None:
            return Assignment(*self.hold_out_test(owned, seed), notes=notes)
        others = dealing.by_class(official, source.labels, source.num_classes, self.key(seed, "test-rows"))
        test_counts = dealing.matching(counts, classes.count, others.count)
        return Assignment(owned, dealing.deal(test_counts, others), notes=notes)

    def _overlapping(
        self, classes: Ragged, counts: Tensor, official: Tensor | None, source: Source, seed: int
    ) -> tuple[Ragged, Ragged]:
        """Training and test rows are drawn from two pools, so that no one trains on what another is tested on."""
        if official is not None:
            train_pool, train = classes, counts
            test_pool = dealing.by_class(official, source.labels, source.num_classes, self.key(seed, "test-rows"))
            test = counts * test_pool.count // classes.count.clamp_min(1)
        else:
            keys = rng.fold(self.key(seed, "pools"), torch.arange(len(classes)))
            train_pool, test_pool = hold_out(classes, self.test_fraction, keys)
            trained = ((1 - self.test_fraction) * counts.to(torch.float64) + 1e-9).to(torch.int64)
            train = torch.where(counts > 0, trained.clamp_min(1), 0).minimum(train_pool.count)
            test = (counts - train).minimum(test_pool.count)
        drawn = dealing.deal_overlapping(train, train_pool, self.key(seed, "draw-train"))
        return drawn, dealing.deal_overlapping(test, test_pool, self.key(seed, "draw-test"))


def check_has_classes(source: Source, partition: str) -> None:
    """For partitions that deal rows by class."""
    if source.problem.is_regression:
        raise ConfigError(
            f"partition {partition} deals rows by class, and the target of {source.name} is a number; name the clients "
            "(client_column), or use partition iid"
        )
