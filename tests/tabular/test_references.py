"""References see training rows alone, and say what scikit-learn says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import kinfed
from kinfed.data import Federation
from kinfed.tabular.fit_result import FitResult
from kinfed.tabular.references import ALPHAS, POOLED_TREES, ReferenceData
from kinfed.tabular.site_page import page
from kinfed.tabular.site_sentences import Wording
from tests.tabular.conftest import COLUMNS, SMALL

SITES = 3


def numbers(rows: int = 60, **options: Any) -> Federation:
    draw = np.random.default_rng(0)
    x, site = draw.normal(size=(SITES * rows, 4)), np.repeat(np.arange(SITES), rows)
    y = x[:, 0] * (site + 1) + 5.0 * site + 0.1 * draw.normal(size=len(x))
    return Federation.from_arrays(x, y, site, task="regression", **options)


def error(outputs: torch.Tensor, data: Federation) -> float:
    return float(((outputs[:, 0] - data.labels[data.test.rows]) ** 2).mean().sqrt())


def test_ridge_alone_is_scikit_learns_at_every_site() -> None:
    data = numbers()
    reference = ReferenceData.of(data)
    outputs, train, test = reference.linear_alone(), reference.train, reference.test
    for k in range(SITES):
        model = make_pipeline(StandardScaler(), RidgeCV(ALPHAS)).fit(train.x[train.site == k], train.y[train.site == k])
        np.testing.assert_allclose(outputs[test.site == k, 0], model.predict(test.x[test.site == k]))
    assert error(outputs, data) < 0.2


def test_pooled_trees_need_the_site_where_sites_differ() -> None:
    data = numbers()
    reference = ReferenceData.of(data, seed=3)
    plain, sited = (error(reference.pooled_trees(site=site), data) for site in (False, True))
    assert sited < plain / 2
    model = HistGradientBoostingRegressor(random_state=3, early_stopping=True, categorical_features=None)
    model.fit(reference.train.x, reference.train.y)
    np.testing.assert_allclose(reference.pooled_trees(site=False)[:, 0], model.predict(reference.test.x))


def test_cross_validation_chooses_the_settings() -> None:
    """A try that cannot learn is not taken, wherever it stands."""
    reference = ReferenceData.of(numbers())
    tries: list[dict[str, Any]] = [{"max_iter": 3, "learning_rate": 1e-9}, {"max_iter": 10, "learning_rate": 0.3}]
    expected = reference.pooled_trees(tries[1:], site=True)
    for order in (tries, tries[::-1]):
        torch.testing.assert_close(reference.pooled_trees(order, site=True), expected)


def test_many_sites_enter_by_the_mean_of_their_training_targets() -> None:
    draw = np.random.default_rng(1)
    site = np.repeat(np.arange(300), 8)
    level = draw.normal(size=300)[site]
    data = Federation.from_arrays(draw.normal(size=(2400, 2)), level + 0.1 * draw.normal(size=2400), site,
                                  task="regression")  # fmt: skip
    reference = ReferenceData.of(data)
    wide, place = reference.with_site
    assert place is None
    assert wide.train.x.shape[1] == 3
    assert error(reference.pooled_trees(site=True), data) < 0.5 * error(reference.pooled_trees(site=False), data)


def test_test_rows_are_not_seen() -> None:
    data = numbers()
    before = ReferenceData.of(data)
    labels = data.labels.clone()
    labels[data.test.rows] = 1000.0
    data.labels = labels
    after = ReferenceData.of(data)
    for outputs in ("linear_alone", "trees_alone"):
        torch.testing.assert_close(getattr(before, outputs)(), getattr(after, outputs)())
    torch.testing.assert_close(before.pooled_trees(site=True), after.pooled_trees(site=True))


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_that_a_site_has_not_seen_have_a_chance(classes: int) -> None:
    draw = np.random.default_rng(0)
    x, site = draw.normal(size=(90, 3)), np.repeat(np.arange(SITES), 30)
    y = (x[:, 0] > 0).astype(np.int64) + (classes - 2) * (x[:, 1] > 0.8)
    y[site == 2] = 1
    data = Federation.from_arrays(x, y, site, num_classes=classes)
    for outputs in (ReferenceData.of(data).linear_alone(), ReferenceData.of(data).trees_alone()):
        assert outputs.shape == (len(data.test.rows), classes)
        assert bool(torch.isfinite(outputs).all())
        torch.testing.assert_close(outputs.exp().sum(1), torch.ones(len(outputs), dtype=torch.float64))
        assert bool((outputs[data.test.owner == 2].argmax(1) == 1).all())


def test_a_fit_has_references_beside_it(tmp_path: Path, table: dict[str, list[Any]]) -> None:
    settings = {**SMALL, **COLUMNS, "references": True, "out": tmp_path / "fit"}
    result = kinfed.fit(table, **{**settings, "trials": 1})
    read = FitResult.read(tmp_path / "fit")
    assert read.references == result.references
    assert [one.pooled for one in result.references] == [False, False, True]
    for one in result.references:
        known = [value for value in one.sites if value is not None]
        assert one.value == pytest.approx(np.mean(known))
        handed = np.mean([site.deployed.value for site in result.sites])
        assert one.ahead.value == pytest.approx(handed - one.value)
    text = page(read, tmp_path / "fit")
    assert "boosted trees on pooled rows: needs pooled rows" in text
    assert "logistic regression alone" in text
    assert "(needs pooled rows)" in Wording(result).references()
    assert result.references[2].name == POOLED_TREES


def test_no_references_where_they_cannot_predict(table: dict[str, list[Any]]) -> None:
    count = {**table, "outcome": [len(str(age)) for age in table["age"]]}
    result = kinfed.fit(count, **{**SMALL, **COLUMNS, "trials": 1, "metric": "auto", "references": True}, task="counts")
    assert result.references == ()
    assert Wording(result).references() == ""
