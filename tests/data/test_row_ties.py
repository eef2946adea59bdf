"""Rows of one person stay in one part, and what is judged comes after what is trained on: by hand and by property."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kinfed
from kinfed.config import make_config
from kinfed.core import rng
from kinfed.data import Federation, as_table
from kinfed.data.examples.ragged import Ragged
from kinfed.data.examples.row_ties import RowTies, split_fold
from kinfed.data.sources import TableOptions, source_from_table
from kinfed.errors import ConfigError, DataError
from kinfed.runs import run
from kinfed.sklearn import PersonalizedClassifier
from kinfed.tabular import FitSettings
from kinfed.tabular.fitting import SiteFit
from kinfed.tabular.search import assign_folds, fold_federation

LABELS = torch.zeros(64, dtype=torch.int64)


def keys(clients: int) -> Tensor:
    return rng.fold(rng.root(0, "ties"), torch.arange(clients))


def test_the_last_rows_are_held_and_a_moment_is_not_divided() -> None:
    rows = Ragged.of([torch.arange(8), torch.arange(8, 12)])
    order = torch.tensor([5.0, 1, 1, 2, 2, 2, 3, 4, 7, 7, 7, 7])
    train, held = RowTies(order=order).hold_out(rows, 0.25, keys(2))
    # Of eight rows two are held: 4 and 5. The second client has one moment alone, which trains.
    assert held.lists()[0].tolist() == [0, 7]
    assert train.lists()[1].tolist() == [8, 9, 10, 11]
    # A quarter falls into the moment 9; as it is the last, it is held whole.
    late = RowTies(order=torch.tensor([1.0, 1, 9, 9, 9, 9]))
    assert late.hold_out(Ragged.of([torch.arange(6)]), 0.25, keys(1))[1].rows.tolist() == [2, 3, 4, 5]
    # The cut falls into the moment 2, most of which is before it.
    middle = RowTies(order=torch.tensor([1.0, 2, 2, 2, 2, 3, 3, 3]))
    assert middle.hold_out(Ragged.of([torch.arange(8)]), 0.5, keys(1))[1].rows.tolist() == [5, 6, 7]


def test_folds_in_order_have_a_rolling_origin() -> None:
    rows, ties = Ragged.of([torch.arange(6)]), RowTies(order=torch.tensor([6.0, 5, 4, 3, 2, 1]))
    assert ties.fold_numbers(rows, 2, LABELS, keys(1)).tolist() == [1, 1, 0, 0, -1, -1]
    train, test = split_fold(rows, 0, 2, LABELS, keys(1), ties)
    assert (train.rows.tolist(), test.rows.tolist()) == ([4, 5], [2, 3])  # 0 and 1 are later, and in no part
    train, test = split_fold(rows, 1, 2, LABELS, keys(1), ties)
    assert (train.rows.tolist(), test.rows.tolist()) == ([2, 3, 4, 5], [0, 1])


def test_a_site_with_one_person_trains_on_it_in_every_fold() -> None:
    ties = RowTies(persons=torch.tensor([0, 0, 0, 1, 1, 2]))
    rows = Ragged.of([torch.arange(3), torch.arange(3, 6)])
    number = ties.fold_numbers(rows, 2, LABELS, keys(2))
    assert number[:3].tolist() == [-1, -1, -1]
    assert number[3] == number[4] != number[5]
    assert ties.hold_out(rows, 0.5, keys(2))[1].count[0] == 0


@given(st.data())
def test_parts_respect_persons_and_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    total = sum(sizes)
    whole = st.lists(st.integers(0, 5), min_size=total, max_size=total)
    persons = torch.tensor(data.draw(whole)) if data.draw(st.booleans()) else None
    order = torch.tensor(data.draw(whole), dtype=torch.float64) if persons is None or data.draw(st.booleans()) else None
    ties = RowTies(persons, order)
    rows = Ragged.of(list(torch.split(torch.arange(total), sizes)))
    folds = data.draw(st.integers(2, 4))
    parts = [ties.hold_out(rows, data.draw(st.sampled_from([0.0, 0.2, 0.5])), keys(len(sizes)))]
    parts += [split_fold(rows, fold, folds, LABELS, keys(len(sizes)), ties) for fold in range(folds)]
    for train, held in parts:
        assert bool((train.count > 0).all())
        for k in range(len(sizes)):
            mine, other = train[k], held[k]
            assert not set(mine.tolist()) & set(other.tolist())
            if persons is not None:
                assert not set(persons[mine].tolist()) & set(persons[other].tolist())
            if order is not None and persons is None and len(other):
                assert float(order[mine].max()) < float(order[other].min())
            if order is not None and persons is not None and len(other):
                last = {p: float(order[rows[k]][persons[rows[k]] == p].max()) for p in set(persons[rows[k]].tolist())}
                assert max(last[p] for p in persons[mine].tolist()) < min(last[p] for p in persons[other].tolist())
    judged = torch.cat([held.rows for _, held in parts[1:]])
    assert len(torch.unique(judged)) == len(judged)  # every row at most once


def visits(**more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(3)
    count = 120
    days = draw.permutation(count)
    x = draw.normal(size=count)
    table = {
        "site": [f"s{row % 3}" for row in range(count)], "age": x.tolist(),
        "sick": np.where(x + draw.normal(size=count) > 0, "yes", "no").tolist(),
        "seen": [f"{2020 + day // 40}-{1 + day % 12:02d}-{1 + day % 28:02d}" for day in days.tolist()],
        "patient": [row // 6 for row in range(count)],
    }  # fmt: skip
    return table | more


ROLES = {"client_column": "site", "label_column": "sick"}


def is_later(data: Federation, first: str, second: str) -> bool:
    assert data.order is not None
    pairs = zip(data.split(first).lists(), data.split(second).lists(), strict=True)
    return all(float(data.order[a].max()) < float(data.order[b].min()) for a, b in pairs if len(a) and len(b))


def test_a_run_tests_and_validates_on_later_rows_also_in_folds(tmp_path: Path) -> None:
    data = Federation.from_table(visits(), **ROLES, order_column="seen", ignore="patient")
    assert is_later(data, "train", "test")
    validated = data.with_validation(0.2, 0)
    assert is_later(validated, "train", "val")
    assert is_later(validated, "val", "test")
    import pyarrow.csv as csv

    csv.write_csv(as_table(visits()), tmp_path / "visits.csv")
    settings = {"dataset": str(tmp_path / "visits.csv"), **ROLES, "order_column": "seen", "folds": 3, "rounds": 2}
    config = make_config(None, {**settings, "algorithms": "local,fedfomo", "seeds": (0,), "participation": 1.0})
    outcome = run(config)
    # Blocks of 10 of 40 rows at every site: three of four are tested.
    assert int(outcome.result("local").client_table.n_test.sum()) in range(80, 100)


def test_folds_of_a_run_keep_persons_together() -> None:
    from kinfed.data import Resplit, make_federation

    source = source_from_table(
        as_table(visits()), TableOptions(**ROLES, person_column="patient", ignore="seen"), "visits"
    )
    assert source.persons is not None
    tested = []
    for fold in range(3):
        data = make_federation(source, "column", None, {}, 0, resplit=Resplit(3, fold))
        for train, test in zip(data.train.lists(), data.test.lists(), strict=True):
            assert not set(source.persons[train].tolist()) & set(source.persons[test].tolist())
        tested.append(data.test.rows)
    assert torch.cat(tested).sort().values.tolist() == list(range(120))


def test_folds_of_a_fit_choose_by_later_rows() -> None:
    source = source_from_table(
        as_table(visits()), TableOptions(**ROLES, order_column="seen", ignore="patient"), "visits"
    )
    fit = SiteFit(source, FitSettings(folds=3, algorithms="ditto", trials=1))
    assert is_later(fit.data, "train", "test")
    fold_of = assign_folds(fit.data, 3, 0)
    for fold in range(3):
        part = fold_federation(source, fit.data, fold_of, fold, 0)
        assert is_later(part, "train", "test")
        assert part.num_clients == 3
        assert len(part.train.rows) + len(part.test.rows) == int((fold_of <= fold).sum())


def test_a_table_is_fitted_in_its_order() -> None:
    result = kinfed.fit(
        visits(), **ROLES, order_column="seen", person_column="patient", algorithms="ditto", trials=1, rounds=2, folds=2
    )
    assert [site.site for site in result.sites] == ["s0", "s1", "s2"]


def test_estimators_take_columns_that_are_no_features() -> None:
    import pandas as pd

    frame = pd.DataFrame(visits())
    X = frame.drop(columns="sick")
    model = PersonalizedClassifier(
        "ditto", client_column="site", person_column="patient", order_column="seen", rounds=2, folds=2, model="mlr"
    )
    model.fit(X, frame["sick"])
    assert model.n_features_in_ == 1
    without = X.drop(columns=["patient", "seen"])
    np.testing.assert_array_equal(model.predict(X), model.predict(without))
    with pytest.raises(ValueError, match="X has no column 'seen'"):
        model.fit(X.drop(columns="seen"), frame["sick"])


@pytest.mark.parametrize(("cells", "words"), [(["soon"] * 120, "2024-02-29.*120 have none"), ([""] * 120, "120")])
def test_an_order_is_of_dates_or_numbers(cells: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Federation.from_table(visits(seen=cells), **ROLES, order_column="seen")


def test_rows_that_are_named_for_testing_need_no_order() -> None:
    with pytest.raises(ConfigError, match="order_column decides which rows test"):
        Federation.from_table(visits(part=["train", "test"] * 60), **ROLES, order_column="seen", split_column="part")


def test_a_saved_federation_keeps_its_ties(tmp_path: Path) -> None:
    data = Federation.from_table(visits(), **ROLES, order_column="seen", person_column="patient")
    data.save(tmp_path / "data")
    again = Federation.load(tmp_path / "data")
    assert again.persons is not None
    assert again.order is not None
    assert torch.equal(again.order, data.order if data.order is not None else torch.empty(0))
