"""Columns as they are: what each becomes, learnt in one place or from messages of sites, and what cannot be read."""

from __future__ import annotations

import copy
import datetime
import json
from dataclasses import replace
from math import cos, pi, sin
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.cells import read_cells
from kinfed.data.preprocessing.column_statistics import ReadTable, TableStatistics
from kinfed.data.preprocessing.encodings import CategoryEncoding
from kinfed.data.preprocessing.frames import as_table
from kinfed.data.preprocessing.hashed_words import packed
from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing
from kinfed.data.preprocessing.text_scores import TextScores, TextTarget
from kinfed.errors import ConfigError, DataError

VISITS = {
    "age": [30.0, 40.0, None, 60.0],
    "smoker": [True, False, None, True],
    "ward": ["a", "b", None, "b"],
    "seen": [
        datetime.date(2024, 1, 1),
        datetime.date(2024, 2, 29),
        datetime.date(2023, 7, 3),
        datetime.date(2024, 5, 1),
    ],
}


def kinds(learnt: TablePreprocessing) -> dict[str, str]:
    return {one.name: one.kind for one in learnt.encodings}


def reason(learnt: TablePreprocessing, name: str) -> str:
    return next(one.reason for one in learnt.encodings if one.name == name)


# ---- what columns become ----


def test_every_kind_becomes_the_features_it_says() -> None:
    learnt = TablePreprocessing.learn(VISITS)
    assert kinds(learnt) == {"age": "number", "smoker": "number", "ward": "category", "seen": "date"}
    assert learnt.features == [
        "age", "age missing", "smoker", "smoker missing", "ward=a", "ward=b", "ward missing",
        "seen day", "seen season sin", "seen season cos", "seen weekday sin", "seen weekday cos",
    ]  # fmt: skip
    x = learnt.transform(VISITS)
    assert x.dtype == torch.float32
    assert x[2, :7].tolist() == [0, 1, 0, 1, 0, 0, 1], "a gap is the mean, or all zeros, and its own feature"
    assert x[3, 4:7].tolist() == [0, 1, 0]
    raw = learnt.encode(VISITS).raw
    assert raw[0, 7] == (datetime.date(2024, 1, 1) - datetime.date(1970, 1, 1)).days
    days = float(raw[1, 7])
    np.testing.assert_allclose(raw[1, 8:], [f(2 * pi * days / p) for p in (365.2425, 7) for f in (sin, cos)], atol=1e-5)


def test_numbers_and_categories_are_scikit_learns() -> None:
    draws = np.random.default_rng(0)
    number = np.where(draws.random(60) < 0.2, np.nan, draws.normal(1000, 3, 60))
    ward = draws.choice(["a", "b", "c"], 60)
    x = TablePreprocessing.learn({"number": number, "ward": ward}).transform({"number": number, "ward": ward}).numpy()
    filled = SimpleImputer(add_indicator=True).fit_transform(number[:, None])
    single = number[~np.isnan(number)][:, None].astype(np.float32).astype(np.float64)
    scaler = StandardScaler().fit(single)
    np.testing.assert_allclose(x[:, 0], scaler.transform(filled[:, :1])[:, 0], atol=1e-4)
    np.testing.assert_array_equal(x[:, 1], filled[:, 1])
    np.testing.assert_array_equal(x[:, 2:], OneHotEncoder(sparse_output=False).fit_transform(ward[:, None]))


def test_rare_and_unseen_categories_share_a_feature() -> None:
    many = ["a"] * 300 + ["b"] * 296 + ["x", "y", "z", "x"]
    learnt = TablePreprocessing.learn({"ward": many})
    assert learnt.features == ["ward=a", "ward=b", "ward other"]
    encoded = learnt.encode({"ward": ["a", "x", "never", None]})
    assert encoded.raw.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0]], (
        "a gap without any in training: most frequent"
    )
    assert "rare in training or not seen there ('never', 'x') are taken as other" in encoded.notes[0]
    few = TablePreprocessing.learn({"ward": ["a", "b"] * 9, "n": range(18)})
    encoded = few.encode({"ward": ["c", "b"], "n": [1, 2]})
    assert encoded.raw[:, :2].tolist() == [[0, 0], [0, 1]]
    assert "not seen in training ('c') have no feature" in encoded.notes[0]


def texts_with_scores(sites: int = 3) -> tuple[list[str], np.ndarray, TextScores]:
    """Notes of which some words tell the target, and what learns from them."""
    draw = np.random.default_rng(0)
    vocabulary, effect = np.array([f"word{n}" for n in range(60)]), draw.normal(size=60)
    drawn = draw.integers(0, 60, (240, 12))
    notes = [" ".join(vocabulary[row]) for row in drawn]
    y = effect[drawn].sum(1) + draw.normal(size=240)
    cells = read_cells(pa.chunked_array([pa.array(notes)]), "notes")
    target = TextTarget.of(y.astype(np.float32), Problem("regression"))
    owner = np.repeat(np.arange(sites), 240 // sites)
    return notes, y, TextScores({"note": cells}, np.arange(240), owner, sites, target)


def test_scores_of_texts_are_ridge_regression_on_scikit_learns_tf_idf() -> None:
    notes, y, learner = texts_with_scores()
    encoding = learner.learn("note", "texts", 0)
    assert encoding is not None
    x = TfidfTransformer().fit_transform(CountVectorizer().fit_transform(notes))
    linear = np.linalg.solve((x.T @ x).toarray() + np.eye(x.shape[1]), x.T @ (y - y.mean()))
    scores, _ = encoding.encode(read_cells(pa.chunked_array([pa.array(notes)]), "notes"), "here")
    np.testing.assert_allclose(scores[:, 0], x @ linear + y.mean(), atol=2e-3)
    learnt = TablePreprocessing((encoding,))
    again = TablePreprocessing.from_json(json.loads(json.dumps(learnt.to_json())))
    assert again == learnt
    missing = again.encode({"note": [None, "", "unheard"]}).raw
    np.testing.assert_allclose(missing, np.full((3, 1), y.mean()), rtol=1e-5)


def test_training_texts_have_scores_of_models_that_did_not_see_them() -> None:
    """Where the target is noise, a model's scores of its own rows look good; those of left-out rows do not."""
    _, y, learner = texts_with_scores()
    assert learner.target is not None
    noise = np.random.default_rng(1).normal(size=(240, 1))
    blind = replace(learner, target=TextTarget(noise, ("",)), fitted={})
    encoding = blind.learn("note", "texts", 0)
    assert encoding is not None
    own, _ = encoding.encode(learner.cells["note"], "here")
    assert np.corrcoef(own[:, 0], noise[:, 0])[0, 1] > 0.3
    assert abs(np.corrcoef(blind.fitted["note"][:, 0], noise[:, 0])[0, 1]) < 0.2
    learner.learn("note", "texts", 0)
    assert np.corrcoef(learner.fitted["note"][:, 0], y)[0, 1] > 0.8


def test_words_of_a_text_column_that_contradict_themselves_are_refused() -> None:
    _, _, learner = texts_with_scores()
    encoding = learner.learn("note", "texts", 0)
    assert encoding is not None
    for broken in (
        replace(encoding, weights=encoding.weights[:-8]), replace(encoding, buckets="????"),
        replace(encoding, buckets=packed(np.arange(60)[::-1], "<u4")), replace(encoding, level=()),
    ):  # fmt: skip
        with pytest.raises(DataError, match="words"):
            TablePreprocessing.from_json(TablePreprocessing((broken,)).to_json())


def test_long_texts_are_left_out_where_no_label_is_known() -> None:
    notes = [f"patient {n} was seen in ward {n % 7} by nobody" for n in range(150)]
    learnt = TablePreprocessing.learn({"note": notes, "n": [n * 0.5 for n in range(150)]})
    assert "scores of long texts are learnt" in reason(learnt, "note")
    labels = np.arange(150) % 3
    three = TablePreprocessing.learn(
        {"note": notes}, target=TextTarget.of(labels, Problem("multiclass", 3, ("a", "b", "c")))
    )
    assert three.features == ["note score a", "note score b", "note score c"]


def test_what_says_nothing_is_left_out_and_why() -> None:
    rows = 40
    table = {
        "n": np.random.default_rng(0).normal(size=rows),
        "row": np.arange(rows),
        "patient_id": np.random.default_rng(0).permutation(rows) + 1000,
        "code": [f"P-{n:04d}" for n in range(rows)],
        "clinic": ["north"] * rows,
        "unit": [7] * rows,
        "empty": [None] * rows,
        "list": [[1]] * rows,
        "year": np.random.default_rng(0).permutation(rows) + 1960,
        "asked": ["yes"] * (rows - 1) + [None],
    }
    learnt = TablePreprocessing.learn(pa.table({name: pa.array(values) for name, values in table.items()}))
    assert learnt.columns == ["n", "year", "asked"]
    assert learnt.features[-2:] == ["asked=yes", "asked missing"]
    for name, why in {
        "row": "all 40 values differ, and the name says so", "patient_id": "the name says so",
        "code": "all 40 texts differ",
        "clinic": "'north'", "unit": r"(7)", "empty": "has no value", "list": "images, lists",
    }.items():  # fmt: skip
        assert why in reason(learnt, name)
    assert "columns left out: row, patient_id: all 40 values differ, and the name" in learnt.sentences()[-1]
    assert "; clinic has the same value" in learnt.sentences()[-1]
    with pytest.raises(DataError, match="no feature columns left: clinic has the same value"):
        TablePreprocessing.learn({"clinic": ["north"] * 3})


def test_kinds_can_be_declared() -> None:
    table = {
        "zip": [1, 2, 2, 1],
        "age": ["30", "forty", "50", "60"],
        "note": ["a", "b", "c", "d"],
        "day": ["2024-02-01"] * 4,
    }
    learnt = TablePreprocessing.learn(table, columns="zip=category,age=number,note=skip,day=category")
    assert learnt.features == ["zip=1", "zip=2", "age", "age missing"]
    assert learnt.encode({"zip": [1.0], "age": ["x"], "day": [""]}).raw[0].tolist()[:2] == [1, 0]
    with pytest.raises(ConfigError, match="did you mean age"):
        TablePreprocessing.learn(table, columns={"agee": "number"})
    with pytest.raises(DataError, match="declared a date, and 4 of its 4 cells are none"):
        TablePreprocessing.learn(table, columns={"note": "date"})
    with pytest.raises(DataError, match="no training row holds one"):
        TablePreprocessing.learn(table, columns={"note": "number"})


def test_stray_words_in_a_column_of_numbers() -> None:
    ages = [str(n / 7) for n in range(299)]
    stray = TablePreprocessing.learn({"age": [*ages, "oops"], "zip": [str(10_000 + n % 150) for n in range(300)]})
    assert kinds(stray) == {"age": "number", "zip": "skip"}, "texts that are all numbers are meant as texts"
    assert "1 others count as missing" in reason(stray, "age")
    codes = [*ages[:200], *(f"V{n}" for n in range(60)), *ages[:40]]
    mostly = TablePreprocessing.learn({"code": codes, "age": [n / 7 for n in range(300)]})
    assert "80% of them are numbers: code=number" in reason(mostly, "code")


# ---- new rows ----


def test_new_rows_in_another_order_with_more_or_fewer_columns() -> None:
    learnt = TablePreprocessing.learn(VISITS)
    whole = learnt.transform(VISITS)
    turned = {name: VISITS[name] for name in reversed(VISITS)} | {"extra": ["x"] * 4}
    assert torch.equal(learnt.transform(turned), whole)
    without = learnt.encode({name: VISITS[name] for name in ("age", "ward", "seen")})
    assert without.notes == ["the table has no column smoker: it counts as missing in every row"]
    with pytest.raises(DataError, match=r"lacks 1 of the models' 4 columns: seen\. No training row lacked them"):
        learnt.transform({name: VISITS[name] for name in ("age", "ward", "smoker")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": ["old", 1, 2, 3]}, "not a table"),
        (
            {"age": ["old", "1", "2", "3"]},
            r"column age of the table should hold numbers; 1 of 4 cells .*row 1 \('old'\)",
        ),
        ({"age": [datetime.date(2024, 1, 1)] * 4}, "column age of the table should hold numbers; 4 of 4"),
        ({"age": [1e300, 1, 2, 3]}, r"infinite or too large, the first in row 1 \(1e\+300\)"),
        ({"seen": [1, 2, 3, 4]}, "column seen of the table should hold dates"),
        ({"seen": ["2024-01-01", "soon", None, None]}, "should hold dates .* wrong one in row 2"),
        ({"ward": [[1]] * 4}, "column ward of the table should hold categories; it holds list"),
    ],
)
def test_wrong_cells_are_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TablePreprocessing.learn(VISITS).transform(VISITS | change)


def test_without_scaling_nothing_is_kept_of_whole_numbers() -> None:
    learnt = TablePreprocessing.learn({"a": [1.0, 5.0], "b": [2, 3]}, standardize=False)
    assert learnt.learns_nothing
    assert "3.0" not in json.dumps(learnt.to_json()["encodings"][0])
    assert learnt.transform({"b": [2], "a": [1]}).tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"empty cell.* the first in row 1, and nothing was learnt"):
        learnt.transform({"b": [None], "a": [1]})
    assert not TablePreprocessing.learn({"a": [1.0, None]}, standardize=False).learns_nothing


# ---- inputs and files ----


def test_frames_of_all_makes_are_the_same() -> None:
    frame = pd.DataFrame(VISITS).astype({"ward": "category", "seen": "datetime64[ns]"})
    other = pl.DataFrame(VISITS).with_columns(pl.col("ward").cast(pl.Categorical))
    learnt = TablePreprocessing.learn(frame)
    for rows in (
        other,
        pa.table(VISITS),
        VISITS,
        [dict(zip(VISITS, row, strict=True)) for row in zip(*VISITS.values(), strict=True)],
    ):
        assert TablePreprocessing.learn(rows).encodings == learnt.encodings
        assert torch.equal(learnt.transform(rows), learnt.transform(frame))
    numbers = TablePreprocessing.learn({"a": [1.0, 2.0], "b": [3.0, 5.0]})
    assert torch.equal(numbers.transform(np.array([[1, 3]])), numbers.transform({"a": 1, "b": 3}))
    with pytest.raises(DataError, match=r"one column for each of a, b \(2\); got shape \(1, 3\)"):
        numbers.transform(np.ones((1, 3)))
    with pytest.raises(DataError, match="an array has no column names"):
        as_table(np.ones((1, 3)))
    with pytest.raises(DataError, match="rows come as a pandas, polars or pyarrow table"):
        as_table(object())


def test_json_gives_the_same_again() -> None:
    learnt = TablePreprocessing.learn(VISITS)
    record = json.loads(json.dumps(learnt.to_json()))
    assert TablePreprocessing.from_json(record) == learnt
    for change in ({"format": 2}, {"encodings": [{"kind": "pickle"}]}, {"encodings": 3}):
        with pytest.raises(DataError, match=r"format|cannot be read"):
            TablePreprocessing.from_json(record | change)


# ---- sites ----

CELLS = {
    "number": st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)),
    "whole": st.one_of(st.none(), st.integers(-50, 50)),
    "truth": st.one_of(st.none(), st.booleans()),
    "text": st.one_of(st.none(), st.sampled_from(["a", "b", "7", "8.5", "2024-02-29", "", "two words"])),
    "date": st.one_of(st.none(), st.dates(datetime.date(1900, 1, 1), datetime.date(2100, 1, 1))),
}
TYPES = {"number": pa.float64(), "whole": pa.int64(), "truth": pa.bool_(), "text": pa.string(), "date": pa.date32()}


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 3), *CELLS.values()), min_size=1, max_size=30))
def test_learning_in_one_place_is_merging_the_messages_of_sites(rows: list[tuple[Any, ...]]) -> None:
    site = np.array([row[0] for row in rows])
    table = pa.table({
        name: pa.array([row[place + 1] for row in rows], TYPES[name]) for place, name in enumerate(CELLS)
    })  # fmt: skip
    names, number = np.unique(site, return_inverse=True)
    pooled, size = ReadTable.read(table, table.column_names, {}, "t").collect(np.arange(len(rows)), number, len(names))
    messages = []
    for one in names:
        own = table.take(np.flatnonzero(site == one))
        message, own_size = ReadTable.read(own, own.column_names, {}, "t").collect()
        assert own_size == message.nbytes
        messages.append(TableStatistics.from_json(json.loads(json.dumps(message.to_json()))))
    assert sum(message.nbytes for message in messages) == size
    merged, turned = TableStatistics.merged(messages, {}), TableStatistics.merged(messages[::-1], {})
    for other in (merged, turned):
        assert (other.rows, other.sites) == (pooled.rows, pooled.sites)
        for name, column in pooled.columns.items():
            theirs = other.columns[name]
            for field in ("values", "days"):
                ours, same = getattr(column, field), getattr(theirs, field)
                assert ours.count == same.count
                np.testing.assert_allclose(same.mean, ours.mean, rtol=1e-9, atol=1e-6)
                np.testing.assert_allclose(same.square, ours.square, rtol=1e-9, atol=1e-3)
            plain = {field: value for field, value in vars(column).items() if field not in ("values", "days")}
            assert plain == {field: getattr(theirs, field) for field in plain}


def test_columns_that_a_site_lacks_and_sets_that_grow_too_large() -> None:
    def message(table: dict[str, Any]) -> TableStatistics:
        rows = as_table(table)
        return ReadTable.read(rows, rows.column_names, {}, "t").collect()[0]

    one = message({"a": [1.0, 2.0], "t": [f"v{n}" for n in range(2)]})
    two = message({"b": ["x", "y", "y"], "t": [f"w{n}" for n in range(3)]})
    merged = TableStatistics.merged([one, two], {})
    assert merged.columns["a"].missing == 3
    assert merged.columns["a"].empty_sites == 1
    learnt = TablePreprocessing.from_statistics(merged, {})
    assert learnt.features[:2] == ["a", "a missing"]
    assert any(
        "columns without any value at some of the 2 clients: a (at 1), b (at 1)" in text for text in learnt.sentences()
    )
    large = [message({"t": [f"{site}{n}" for n in range(60)] * 2}) for site in "ab"]
    assert large[0].columns["t"].categories is not None
    assert TableStatistics.merged(large, {}).columns["t"].categories is None, "more than 100 are no categories"
    assert TableStatistics.merged(large, {"t": "category"}).columns["t"].categories is not None
    alone = message({"t": [f"{n}" for n in range(120)]})
    assert alone.columns["t"].categories is None, "texts of many different values do not leave"
    assert not alone.columns_with_categories


LIES = {
    "rows": lambda m: m | {"rows": -1},
    "columns": lambda m: m | {"columns": []},
    "more": lambda m: m | {"sites": 2},
    "type": lambda m: _with(m, "a", rows="2"),
    "count": lambda m: _with(m, "a", missing=-1, numbers=3),
    "cells": lambda m: _with(m, "a", numbers=1),
    "moments": lambda m: _with(m, "a", values={"count": 1, "mean": 0.0, "square": 0.0}),
    "infinite": lambda m: _with(m, "a", values={"count": 2, "mean": float("inf"), "square": 0.0}),
    "negative": lambda m: _with(m, "a", values={"count": 2, "mean": 0.0, "square": -1.0}),
    "huge": lambda m: _with(m, "a", values={"count": 2, "mean": 1e9, "square": 0.0}),
    "categories": lambda m: _with(m, "t", categories={"x": 5}),
    "longest": lambda m: _with(m, "t", categories={"x" * 1000: 2}),
    "name": lambda m: m | {"columns": {"\x1b[2J": m["columns"]["a"]}},
    "empty": lambda m: _with(m, "a", empty_sites=1),
}


def _with(message: dict[str, Any], column: str, **change: Any) -> dict[str, Any]:
    message = copy.deepcopy(message)
    message["columns"][column] |= change
    return message


@pytest.mark.parametrize("lie", LIES)
def test_statistics_that_cannot_be_are_refused(lie: str) -> None:
    rows = as_table({"a": [1.0, 2.0], "t": ["x", "y"]})
    honest = ReadTable.read(rows, rows.column_names, {}, "t").collect()[0].to_json()
    TableStatistics.from_json(honest).check_size(2, 1e6)
    with pytest.raises(DataError):
        TableStatistics.from_json(LIES[lie](honest)).check_size(2, 1e6)
    with pytest.raises(DataError, match="statistics of 2 rows; the site has said that it has 3"):
        TableStatistics.from_json(honest).check_size(3, 1e6)


def test_the_index_of_a_frame_is_no_column() -> None:
    frame = pd.DataFrame({"age": [30.0, 40.0, 50.0], "ward": ["x", "y", "x"]}, index=[7, 3, 5])
    plain = frame.reset_index(drop=True)
    for one in (frame, frame.rename_axis("patient")):
        assert as_table(one).equals(as_table(plain))
    written = pa.Table.from_pandas(frame)  # as a Parquet file has it
    assert "__index_level_0__" in written.column_names
    learnt = TablePreprocessing.learn(written)
    assert learnt.columns == ["age", "ward"]
    assert "is the index of a pandas frame" in learnt.sentences()[-1]
    assert TablePreprocessing.learn(written, columns={"__index_level_0__": "number"}).columns[-1] == "__index_level_0__"


def test_a_missing_category_is_neither_known_nor_other() -> None:
    ward = CategoryEncoding("ward", "", ("x", "y"), other=True, gaps=True, most_frequent="x")
    assert ward.features == ("ward=x", "ward=y", "ward other", "ward missing")
    cells = read_cells(pa.chunked_array([["y", "new", None]]), "ward")
    assert ward.encode(cells, "here")[0].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_running_numbers_are_left_out_by_any_name_and_others_stay() -> None:
    draw = np.random.default_rng(0)
    sites = np.repeat(np.arange(60), 4)  # of four rows each: ages differ at a site by chance
    table = {
        "admission": draw.permutation(240) + 5000,
        "PatientenNr": draw.permutation(9000)[:240],
        "age": (draw.permutation(90)[:4, None] + np.arange(60) % 7).T.reshape(-1),
        "income": draw.permutation(100_000)[:240],
    }
    learnt = TablePreprocessing.learn(table, sites=sites)
    assert {one.name: one.reason.split(": ")[-1][:16] for one in learnt.skipped} == {
        "admission": "a running number", "PatientenNr": "an identifier"
    }  # fmt: skip
    assert learnt.columns == ["age", "income"]
    assert "admission" in TablePreprocessing.learn(table, columns="admission=number", sites=sites).columns


def test_few_whole_numbers_could_be_codes_and_that_is_said() -> None:
    table = {
        "ward": [3, 6, 7] * 40, "sex": [0, 1] * 60, "children": list(range(12)) * 10, "dose": [0.5, 1.0, 2.0] * 40
    }  # fmt: skip
    learnt = TablePreprocessing.learn(table, sites=["a"] * 60 + ["b"] * 60)
    (hint,) = [text for text in learnt.sentences() if "codes" in text]
    assert "taken as numbers: ward;" in hint
    assert hint.endswith("--columns ward=category")
    declared = TablePreprocessing.learn(table, columns="ward=category")
    assert not any("codes" in text for text in declared.sentences())


def test_numbers_far_from_training_rows_are_noted() -> None:
    learnt = TablePreprocessing.learn({"height": [1.6, 1.7, 1.8, 1.9], "name": ["a", "b", "a", "b"]})
    assert learnt.encode({"height": [1.2, 2.2], "name": ["a", "a"]}).notes == []
    (note,) = learnt.encode({"height": [1.7, 172.0], "name": ["a", "b"]}).notes
    assert "column height: 1 value(s)" in note
    assert "the first in row 2 (172); is the unit right?" in note
