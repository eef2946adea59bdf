"""Columns that not every site has: each site learns what its own add, pulled to zero, and others are not touched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import kinfed
from kinfed.data.federations.federation import Federation
from kinfed.data.preprocessing.column_statistics import ReadTable
from kinfed.data.preprocessing.encodings import OwnColumn
from kinfed.data.preprocessing.own_columns import RowsAtSite, _Fits, learn_at_site, logistic, narrowed, read_own
from kinfed.errors import ConfigError, DataError

SITES = ("east", "north", "west")
ROLES = {"client_column": "site", "label_column": "sick", "split_column": "split"}


def table(number: bool = False, sites: int = 3, rows: int = 120, changed: dict[str, Any] | None = None) -> pa.Table:
    """Sites with `x`; `test` is of east alone, with gaps, and half of what is to be known; `noise` of east and west is
    nothing; `ward` of west alone is a category that matters there."""
    draw = np.random.default_rng(3)
    site = np.repeat(SITES[:sites], rows)
    n = len(site)
    x, lab, noise, ward = draw.normal(size=n), draw.normal(size=n), draw.normal(size=n), draw.integers(0, 3, n)
    east, north, west = (site == name for name in SITES)
    risk = x + 2 * lab * east + 2 * (ward == 1) * west + 0.5 * draw.normal(size=n)
    gap = draw.uniform(size=n) < 0.1
    columns = {
        "site": site.tolist(), "x": x, "test": pa.array(lab, mask=~(east & ~gap)),
        "noise": pa.array(noise, mask=north), "ward": pa.array([f"w{v}" for v in ward], mask=~west),
        "sick": (risk + 10).tolist() if number else np.where(risk > 0, "yes", "no").tolist(),
        "split": np.where(np.arange(n) % 4 == 0, "test", "train").tolist(),
    }  # fmt: skip
    return pa.table({**columns, **(changed or {})})


def federation(rows: pa.Table | None = None, **options: Any) -> Federation:
    return kinfed.Federation.from_table(table() if rows is None else rows, **{**ROLES, **options})


def at(data: Federation, site: str, column: str) -> OwnColumn:
    return next(one for one in data.own_columns[data.names.index(site)] if one.name == column)


def effect(data: Federation, column: str) -> np.ndarray[Any, Any]:
    """[N] the effect that models are fed."""
    assert data.preprocessing is not None
    return data.features.raw[:, data.preprocessing.features.index(f"effect of {column}")].numpy()


# ---- the estimate ----


@pytest.mark.parametrize("rows", [30, 200])
def test_penalized_regression_is_that_of_scikit_learn(rows: int) -> None:
    draw = np.random.default_rng(rows)
    x = draw.normal(size=(rows, 4))
    y = (x[:, 0] + draw.normal(size=rows) > 0).astype(float)
    design, penalties = np.concatenate([np.ones((rows, 1)), x], 1), np.array([0.0, 1, 1, 1, 1])
    oracle = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(logistic(design, penalties, y), [*oracle.intercept_, *oracle.coef_[0]], atol=1e-5)
    number = kinfed.data.Problem.of_numbers()
    fits = _Fits(x, {}, y[:, None], RowsAtSite(np.arange(rows), y, number))
    ridge = Ridge(alpha=1.0).fit(x, y)
    np.testing.assert_allclose(fits._fit(design, penalties, y[:, None])[:, 0], [ridge.intercept_, *ridge.coef_])


def test_rows_that_separate_the_classes_have_a_finite_effect() -> None:
    x = np.linspace(-1, 1, 40)
    beta = logistic(np.stack([np.ones(40), x], 1), np.array([0.0, 1.0]), (x > 0).astype(float))
    assert np.isfinite(beta).all()
    assert beta[1] > 1


@pytest.mark.parametrize("number", [False, True])
def test_features_that_are_not_finite_are_refused_in_words(number: bool) -> None:
    data, problem = federation(), kinfed.data.Problem.of_numbers() if number else kinfed.data.Problem.of_classes(2)
    assert data.preprocessing is not None
    labels = np.arange(120) % 2
    common = np.ones((120, 1))
    common[3] = np.nan
    read = ReadTable.read(table(), ["test"], {}, "east")
    test = [one for one in data.preprocessing.own if one.name == "test"]
    with pytest.raises(DataError, match=r"east.* common columns.*not finite"):
        learn_at_site(test, read, common, RowsAtSite(np.arange(120), labels, problem), "east")


def test_newtons_method_ends_where_a_step_is_not_finite() -> None:
    with np.errstate(all="ignore"), pytest.raises(DataError, match="not finite"):
        logistic(np.array([[1.0, np.inf], [1.0, 2.0], [1.0, 3.0]]), np.ones(2), np.array([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("number", [False, True])
def test_a_site_learns_what_its_own_columns_add(number: bool) -> None:
    data = federation(table(number))
    east, noise, ward = at(data, "east", "test"), at(data, "east", "noise"), at(data, "west", "ward")
    assert east.gain is not None
    assert east.gain > 3 * (east.gain_error or 0) > 0
    assert abs(noise.gain or 0) < 0.1 * east.gain
    largest = [max((abs(weight) for row in one.weights for weight in row), default=0.0) for one in (east, noise)]
    assert largest[1] < 0.2 * largest[0]
    assert east.weights[0][0] > 0
    assert np.argmax([row[0] for row in ward.weights]) == 1
    assert at(data, "north", "test").here is None


def test_more_common_features_than_rows_are_fitted_in_as_many_directions_as_there_are_rows() -> None:
    draw = np.random.default_rng(2)
    wide, own, y = draw.normal(size=(30, 400)), draw.normal(size=(30, 1)), draw.integers(0, 2, 30)
    wide -= wide.mean(0)
    fewer = narrowed(wide)
    assert fewer.shape == (30, 30)
    rows = RowsAtSite(np.arange(30), y, kinfed.data.Problem.of_classes(2))
    fits = [_Fits(common, {"own": own}, rows.targets, rows) for common in (wide, fewer)]
    for key in ((np.inf, ()), (4.0, ("own",))):
        np.testing.assert_allclose(*(one.losses(*key) for one in fits), atol=1e-8)
    np.testing.assert_allclose(*(one.learn(4.0)[0]["own"] for one in fits), atol=1e-8)
    assert narrowed(wide[:, :20]).shape == (30, 20)


def test_a_column_of_noise_has_no_effect_at_all() -> None:
    data = federation(table().drop_columns(["test", "ward"]))
    for site in ("east", "west"):
        assert at(data, site, "noise").here is not None
        assert all(weight == 0 for row in at(data, site, "noise").weights for weight in row)


def test_what_a_site_lacks_has_no_effect_and_gaps_have_one() -> None:
    data, rows = federation(), table()
    of = np.array(rows["site"].to_pylist())
    assert (effect(data, "test")[of != "east"] == 0).all()
    assert (effect(data, "ward")[of != "west"] == 0).all()
    gaps = (of == "east") & np.array([cell is None for cell in rows["test"].to_pylist()])
    assert (effect(data, "test")[gaps] != 0).all()  # the mean of a number that is missing, and that it is
    model = kinfed.run(federation=data, algorithms="fedavg", rounds=1, eval_every=0).personal_model("north")
    whole = table().select(["x"])
    torch.testing.assert_close(model.transform(whole)[:, 1:], torch.zeros(360, model.transform(whole).shape[1] - 1))


def test_training_rows_have_effects_of_models_that_did_not_see_them() -> None:
    labels = table()["sick"].to_pylist()
    before = federation()
    row = int(before.train[0][7])
    labels[row] = "yes" if labels[row] == "no" else "no"
    after = federation(table(changed={"sick": labels}))
    assert effect(after, "test")[row] == effect(before, "test")[row]
    assert (
        effect(after, "test")[before.test[0].numpy()].tolist()
        != effect(before, "test")[before.test[0].numpy()].tolist()
    )


def test_test_rows_teach_nothing() -> None:
    before, labels = federation(), table()["sick"].to_pylist()
    for row in before.test.rows.tolist():
        labels[row] = "no"
    after = federation(table(changed={"sick": labels}))
    assert torch.equal(before.features.raw, after.features.raw)
    assert before.own_columns == after.own_columns


def test_rows_of_a_person_are_left_out_together() -> None:
    labels = np.zeros(20)
    whose = np.repeat(np.arange(4), 5)
    parts = RowsAtSite(np.arange(20), labels, kinfed.data.Problem.of_numbers(), whose).parts
    assert all(len(set(parts[whose == person])) == 1 for person in range(4))


def test_the_error_of_what_a_column_buys_is_that_of_persons() -> None:
    """Rows that came ten times over as those of a person tell no more than once."""
    number, draw = kinfed.data.Problem.of_numbers(), np.random.default_rng(1)
    once = draw.normal(size=30)
    often, whose = np.repeat(once, 10), np.repeat(np.arange(30), 10)
    seen = RowsAtSite(np.arange(300), often, number, whose).mean_and_error(often)
    assert seen == pytest.approx((once.mean(), once.std(ddof=1) / np.sqrt(30)))
    assert seen == pytest.approx(RowsAtSite(np.arange(30), once, number).mean_and_error(once))
    assert RowsAtSite(np.arange(300), often, number, whose % 4).mean_and_error(often) == (None, None)


def test_a_site_that_means_something_else_by_a_column_is_not_misled() -> None:
    draw = np.random.default_rng(8)
    site = np.repeat(["a", "b", "c", "d"], 150)
    u, sign = draw.normal(size=600), np.where(site == "a", 1.0, -1.0)
    known = np.isin(site, ["a", "b"])
    sick = np.where(3 * u * sign * known + draw.normal(size=600) > 0, "yes", "no")
    cells = pa.array([float(v) if k else None for v, k in zip(u, known, strict=True)])
    split = np.where(np.arange(600) % 3 == 0, "test", "train").tolist()
    rows = pa.table({"site": site.tolist(), "x": draw.normal(size=600), "u": cells, "sick": sick, "split": split})

    def loss(rule: str) -> float:
        data = federation(rows, own_columns=rule)
        settings = {"model": "mlr", "rounds": 20, "lr": 0.5, "participation": 1.0, "eval_every": 0}
        of_all = kinfed.run(federation=data, algorithms="fedavg", **settings).result("fedavg").server
        assert of_all is not None
        return float(of_all["log_loss"])

    assert loss("at_sites") < 0.55 < 0.65 < loss("shared")


# ---- which columns these are ----


def own(rows: pa.Table, **options: Any) -> list[str]:
    data = federation(rows, **options)
    assert data.preprocessing is not None
    return [one.name for one in data.preprocessing.own]


def test_columns_are_own_where_sites_lack_them_and_can_learn_by_themselves() -> None:
    assert own(table()) == ["test", "noise", "ward"]
    assert own(table(), own_columns="shared") == []
    assert own(table(rows=40)) == []  # 30 training rows at a site
    two = table(sites=2)
    assert own(two) == ["test", "noise"]  # nobody has `ward`
    some = np.arange(360) % 10 == 0  # a tenth of the rows of all sites but east
    cells = pa.array(np.arange(360.0), mask=~(some | (np.arange(360) < 120)))
    assert "test" in own(table(changed={"test": cells}))
    often = pa.array([float(k) if k % 4 else None for k in range(360)])
    assert "test" not in own(table(changed={"test": often}))  # gaps


def test_a_single_client_has_no_own_columns() -> None:
    rows = table().drop_columns(["site"])
    data = kinfed.data.make_federation(
        kinfed.data.sources.source_from_table(
            rows, kinfed.data.sources.TableOptions(label_column="sick", split_column="split"), "rows"
        ),
        "iid", 1,
    )  # fmt: skip
    assert data.own_columns == ()


# ---- files, models, promises ----


def test_models_and_files_know_the_columns_of_their_site(tmp_path: Path) -> None:
    data = federation()
    data.save(tmp_path / "data")
    again = Federation.load(tmp_path / "data")
    assert again.own_columns == data.own_columns
    assert data.take(torch.tensor([2, 0])).own_columns == (data.own_columns[2], data.own_columns[0])
    result = kinfed.run(federation=data, algorithms="local", rounds=2, eval_every=0, out=tmp_path / "run")
    rows = table()
    east = rows.filter(pa.array([one == "east" for one in rows["site"].to_pylist()]))
    own, other = result.personal_model("east"), result.personal_model("north")
    assert own.inputs.preprocessing is not None
    assert [one.name for one in own.inputs.preprocessing.own if one.here is not None] == ["test", "noise"]
    assert other.inputs.preprocessing != own.inputs.preprocessing
    path = kinfed.serving.export_model(tmp_path / "run", "east", out=tmp_path / "east.safetensors").path
    read = kinfed.serving.ModelPipeline.read(path)
    np.testing.assert_array_equal(read.predict_proba(east), own.predict_proba(east))
    np.testing.assert_allclose(own.predict_proba(east.slice(3, 1)), own.predict_proba(east)[3:4], rtol=1e-6)


def test_effects_of_labels_are_refused_under_differential_privacy() -> None:
    data = federation(public_statistics=True)
    with pytest.raises(ConfigError, match="own_columns=shared"):
        kinfed.run(federation=data, algorithms="fedavg", rounds=1, dp_noise=1.0)
    shared = federation(public_statistics=True, own_columns="shared")
    kinfed.run(federation=shared, algorithms="fedavg", rounds=1, dp_noise=1.0, eval_every=0)


def test_effects_that_cannot_be_read_are_refused() -> None:
    record = [dataclasses.asdict(one) for one in federation().own_columns[0]]
    assert tuple(read_own(record)) == federation().own_columns[0]
    with pytest.raises(DataError, match="own columns"):
        read_own([{**record[0], "weights": "none"}])
