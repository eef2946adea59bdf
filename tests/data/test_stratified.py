"""Splits by label: proportions, folds that test every row once, and nothing learnt from a fold's test rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfed.core import rng
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged, fold_numbers, split_stratified
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions.partition import Resplit, fold_of_federation, make_federation
from kinfed.data.preprocessing.frames import as_table
from kinfed.data.sources.table import source_from_table
from kinfed.data.sources.table_options import TableOptions
from kinfed.errors import ConfigError

sizes = st.lists(st.integers(0, 30), min_size=1, max_size=5)


def clients(counts: list[int]) -> Ragged:
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Ragged.grouped(torch.randperm(len(owner), generator=torch.Generator().manual_seed(1)), owner, len(counts))


def keys(count: int) -> torch.Tensor:
    return rng.fold(rng.root(3, "test"), torch.arange(count))


@given(sizes, st.floats(0.1, 0.9), st.booleans())
def test_every_label_gives_its_share(counts: list[int], share: float, numbers: bool) -> None:
    rows = clients(counts)
    total = max(len(rows.rows), 1)
    labels = torch.arange(total) % 3 if not numbers else torch.linspace(0, 1, total, dtype=torch.float64)
    problem = Problem.of_numbers([0.0, 1.0]) if numbers else Problem.of_classes(3)
    head = (rows.count * share).to(torch.int64)
    first, second = split_stratified(rows, head, labels, problem, keys(len(counts)))
    assert torch.equal(first.count, head)
    assert torch.equal(first.joined(second).ascending().rows, rows.ascending().rows)
    for client in range(len(counts)):
        own = labels[rows[client]]
        ranks = own.argsort().argsort() * 4 // max(len(own), 1) if numbers else own
        taken = torch.isin(rows[client], first[client])
        for stratum in ranks.unique():
            members = ranks == stratum
            wanted = float(members.sum() * head[client] / len(own))
            assert abs(int((taken & members).sum()) - wanted) < 1


@given(sizes, st.integers(2, 7), st.booleans())
def test_folds_test_every_row_once_and_differ_by_one(counts: list[int], folds: int, numbers: bool) -> None:
    rows = clients(counts)
    total = max(len(rows.rows), 1)
    labels = torch.linspace(0, 1, total, dtype=torch.float64) if numbers else torch.arange(total) % 3
    number = fold_numbers(rows, folds, labels, keys(len(counts)))
    for client, count in enumerate(counts):
        own = number[rows.owner == client]
        if count == 1:
            assert own.tolist() == [-1]
            continue
        sizes = torch.bincount(own, minlength=folds)
        assert int(sizes.sum()) == count
        assert int(sizes.max() - sizes.min()) <= 1
        y = labels[rows[client]]
        if numbers:  # of any `folds` neighbours by value each is in a fold of its own
            by_value = own[y.argsort()]
            for begin in range(0, count - folds + 1, folds):
                assert sorted(by_value[begin : begin + folds].tolist()) == list(range(folds))
        else:
            for label in y.unique():
                by_fold = torch.bincount(own[y == label], minlength=folds)
                assert int(by_fold.max() - by_fold.min()) <= 1


def table(rows: int = 40) -> dict[str, list[object]]:
    age = [float(n) for n in range(rows)]
    return {"site": ["a", "b"] * (rows // 2), "age": age, "sick": ["no", "no", "no", "yes", "no"] * (rows // 5)}


def test_a_fold_learns_nothing_of_its_test_rows() -> None:
    """The scale of a column is that of the fold's own training rows."""
    options = TableOptions(label_column="sick", client_column="site")
    source = source_from_table(as_table(table()), options, "table")
    tested = []
    for fold in range(4):
        data = make_federation(source, "column", None, {}, 0, resplit=Resplit(4, fold))
        ages = np.array(table()["age"])[data.train.rows.numpy()]
        assert float(data.features.mean) == pytest.approx(ages.mean(), rel=1e-6)
        tested.append(data.test.rows)
        assert set(data.test[0].tolist()) <= set(range(0, 40, 2))
        assert torch.bincount(data.labels[data.test.rows]).tolist() == [8, 2]  # as 32 and 8 of all
    assert sorted(torch.cat(tested).tolist()) == list(range(40))


def test_stratified_test_and_validation_rows() -> None:
    data = Federation.from_table(table(), label_column="sick", client_column="site", stratify=True)
    counts = data.class_counts("test")
    assert counts.tolist() == [[4, 1], [4, 1]]
    data = data.with_validation(0.2, 0, stratify=True)
    assert data.class_counts("val").sum(1).tolist() == [3, 3]
    assert set(data.class_counts("val")[:, 1].tolist()) <= {0, 1}


def test_refusals() -> None:
    named = table() | {"part": ["train", "test"] * 20}
    options = TableOptions(label_column="sick", client_column="site", split_column="part")
    source = source_from_table(as_table({**named, "site": ["a"] * 40}), options, "visits")
    with pytest.raises(ConfigError, match="folds: visits names its test rows"):
        make_federation(source, "column", None, {}, 0, resplit=Resplit(4, 0))
    learnt = Federation.from_table(table(), label_column="sick", client_column="site")
    with pytest.raises(ConfigError, match="learnt from its training rows"):
        fold_of_federation(learnt, 3, 0, 0)
    with pytest.raises(ConfigError, match="at least two folds"):
        fold_numbers(clients([3]), 1, torch.zeros(3, dtype=torch.int64), keys(1))
