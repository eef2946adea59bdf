"""The rows of one client, loaded like those of the others: labels of a known problem, columns that may not have been
learnt yet. So a node of a deployment and a new client read their data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.arrays import as_features, name_keys
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged, hold_out, split_stratified
from kinfed.data.examples.row_ties import RowTies
from kinfed.data.examples.target import read_known_target
from kinfed.data.federations.example_weights import read_weights, scaled_weights
from kinfed.data.federations.federation import Federation
from kinfed.data.preprocessing.column_statistics import ReadTable
from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing
from kinfed.data.sources import table
from kinfed.data.sources.table_options import TableOptions
from kinfed.errors import DataError


@dataclass(frozen=True)
class LabelledRows:
    """Rows with labels of a problem that is known."""

    name: str  # what errors call them
    labels: Tensor  # [n]
    read: ReadTable | None  # feature columns of a table; None for images, tokens or arrays
    features: Features | None  # these
    is_test: Tensor | None = None  # [n] bool
    is_val: Tensor | None = None  # [n] bool
    weights: Tensor | None = None  # [n] float64
    persons: Tensor | None = None  # [n] int64: whom a row is of; all of one are in one part

    @classmethod
    def from_arrays(
        cls, x: Any, y: Any, problem: Problem, where: str, *, test: Any, val: Any, weight: Any, tokens: bool
    ) -> LabelledRows:
        """Rows x [n, ...] with labels y [n]; `test` and `val` [n] mark rows where they are not None. `where` names the
        arrays in errors."""
        raw, column = as_features(x, tokens), np.asarray(y)
        whole = column.astype(np.int64) if column.dtype.kind == "b" else column  # false and true are classes 0 and 1
        labels = read_known_target(whole, problem, f"y of {where}")
        weights = None if weight is None else read_weights(weight, f"weight in {where}")
        is_test, is_val = (None if mark is None else _flags(mark, len(labels), where) for mark in (test, val))
        for what, values in (("labels", labels), ("weights", weights)):
            if values is not None and len(raw) != len(values):
                raise DataError(f"{where} holds {len(raw)} examples but {len(values)} {what}")
        return cls(where, labels, None, Features(raw), is_test, is_val, weights)

    def encode(self, preprocessing: TablePreprocessing, where: str) -> Features:
        """The features, not scaled."""
        assert self.read is not None
        return Features(preprocessing.encode_cells(self.read.cells, self.read.rows, where).raw)

    def federation(
        self, client: str, problem: Problem, features: Features, test_fraction: float, seed: int, *,
        preprocessing: TablePreprocessing | None = None, keyed_by_name: bool = True, stratify: bool = False,
    ) -> Federation:  # fmt: skip
        """The client as a federation of one. Where no rows are marked for testing, a share `test_fraction` is drawn,
        keyed by the client's name or by `seed` alone: of persons where they are known, else with `stratify` by label.
        Weights are scaled to mean one over its own training rows."""
        rest, val = Ragged.of([np.arange(len(features))]), Ragged.empty(1)
        if self.is_val is not None:
            rest, val = rest.filter(~self.is_val), rest.filter(self.is_val)
        ties = RowTies.of(self.persons, None)
        if self.is_test is None:
            key = rng.root(seed, "test-split" if ties is None else "test-persons")
            held_out = hold_out if ties is None else ties.hold_out
            train, test = held_out(rest, test_fraction, name_keys(key, [client]) if keyed_by_name else key[None])
            if stratify and ties is None:
                keys = name_keys(rng.root(seed, "stratified-split"), [client])
                train, test = split_stratified(rest, train.count, self.labels, problem, keys)
        else:
            marked = self.is_test[rest.rows]
            train, test = rest.filter(~marked), rest.filter(marked)
        return Federation(
            features, self.labels, problem, train, val, test, [client],
            description={"dataset": self.name, "partition": "given"}, preprocessing=preprocessing,
            weights=scaled_weights(self.weights, train.rows), persons=self.persons,
        )  # fmt: skip


def load_like(rows: Any, options: TableOptions, columns: list[str] | None, problem: Problem) -> LabelledRows:
    """Read a table, in a file or in memory, with labels of a `problem`. Of its columns only the named are read (None:
    all without another role)."""
    opened, name, folder = table.opened(rows, options.encoding)
    used = table.roles(opened, options, name)
    labels = table.read_table_target(opened, options, name, problem).labels
    is_test, is_val = table.splits(opened, options, name)
    present = [column for column in opened.column_names if column not in used]
    declared = ",".join(f"{column}={kind}" for column, kind in options.kinds.items() if column in present)
    names = present if columns is None else [column for column in columns if column in present]
    read = table.read_features(opened, replace(options, columns=declared), names, name)
    features = table.images_or_tokens(opened, options, name, folder) if read is None else None
    weights, persons = table.row_weights(opened, options, name), table.persons_of_rows(opened, options, name)
    return LabelledRows(name, labels, read, features, is_test, is_val, weights, persons)


def _flags(value: Any, count: int, where: str) -> Tensor:
    flags = torch.as_tensor(np.asarray(value))
    if flags.dtype != torch.bool or flags.shape != (count,):
        raise DataError(f"test and val of {where} are {count} booleans; got {flags.dtype} of shape {list(flags.shape)}")
    return flags
