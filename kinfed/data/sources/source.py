"""A data set before it is shared out among clients, and the registry of data sets.

A new one is a function from (options, data folder, seed) to a Source under one line; `options` is a dataclass of
options, `names_clients` says that the data set is shared out by its own clients unless another partition is named:

    @SOURCES.register("mine", summary="what `kinfed list` says of it", options=MyOptions, names_clients=True)
    def load_mine(options: MyOptions, data_dir: Path | None, seed: int) -> Source: ...
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import HasProblem, Problem
from kinfed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kinfed.data.preprocessing.column_statistics import ReadTable


_COLUMNS = (
    "labels",
    "is_test",
    "is_val",
    "owners",
    "tags",
    "weights",
    "persons",
    "order",
)  # of a source, one entry per example


@dataclass
class Source(HasProblem):
    """Examples and labels, and what the data set itself says about splits and owners."""

    name: str
    features: Features
    labels: Tensor  # [N] int64 classes, or float64 numbers where the problem is a regression
    problem: Problem  # of a regression, mean and scale come with a partition, which names the training rows
    is_test: Tensor | None = None  # [N] bool: rows of the official test split
    is_val: Tensor | None = None  # [N] bool: rows marked for validation
    owners: Tensor | None = None  # [N] int64: natural clients (writers, speakers, hospitals)
    owner_names: list[str] | None = None
    owner_groups: Tensor | None = None  # [owners] int64: device type, region, ...
    group_names: list[str] | None = None
    tags: Tensor | None = None  # [N] int64: a circumstance of every example, such as the state of a device
    tag_names: list[str] | None = None
    weights: Tensor | None = None  # [N] float64: how much every example counts in training
    persons: Tensor | None = None  # [N] int64: whom an example is of; all of one are in one part
    order: Tensor | None = None  # [N] float64: when it is of; what is judged comes after what is trained on
    table: ReadTable | None = None  # columns to be learnt and encoded by the training rows, once these are known
    standardize: bool = False  # scale features by the training rows once a partition has named them
    options: dict[str, Any] = field(default_factory=dict)  # how it was loaded, for the record
    notes: list[str] = field(default_factory=list)  # what a reader of results must know

    def __post_init__(self) -> None:
        examples = len(self.features)
        if examples == 0:
            raise DataError(f"data set {self.name} holds no examples")
        for name in _COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != examples:
                raise DataError(f"data set {self.name}: {examples} examples but {len(column)} {name}")
        self.problem.check(self.labels, f"data set {self.name}: labels")
        if self.owners is not None and (self.owner_names is None or int(self.owners.max()) >= len(self.owner_names)):
            raise DataError(f"data set {self.name}: every owner needs a name")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def has_official_test(self) -> bool:
        return self.is_test is not None and bool(self.is_test.any())

    def rows(self, *, test: bool) -> Tensor:
        """Rows of the official test split, or all the others."""
        marked = self.is_test if self.is_test is not None else torch.zeros(len(self), dtype=torch.bool)
        return (marked if test else ~marked).nonzero().squeeze(1)


def subsample(source: Source, count: int | None, noun: str) -> Source:
    """Draw `count` of the examples at random (None: all), training and test rows in proportion; the same ones for every
    seed. Features keep the statistics of the whole set. `noun` is what its examples are."""
    if count is None:
        return source
    if not 1 <= count <= len(source):
        raise ConfigError(f"examples takes 1 to {len(source):,} {noun} of {source.name}; got {count:,}")
    train, test = source.rows(test=False), source.rows(test=True)
    num_test = round(count * len(test) / len(source))
    key, samples = rng.root(0, "examples"), []
    for i, (rows, n) in enumerate(((train, count - num_test), (test, num_test))):
        samples.append(rows[rng.choose(rng.fold(key, i), len(rows), n)])
    note = f"{count:,} of the {len(source):,} {noun} of {source.name}, drawn at random"
    return replace(take_rows(source, torch.cat(samples).sort().values), notes=[*source.notes, note])


def take_rows(source: Source, rows: Tensor) -> Source:
    """The examples `rows` [n], in this order. Owners keep their numbers and names."""
    columns = {name: getattr(source, name) for name in _COLUMNS}
    part: dict[str, Any] = {name: column[rows] for name, column in columns.items() if column is not None}
    features = replace(source.features, raw=source.features.raw[rows])
    table = None if source.table is None else source.table.take(rows.numpy())
    return replace(source, features=features, table=table, **part)
