"""ROC and calibration curves of clients against scikit-learn, over folds, and on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

import kinfed
from kinfed.analysis.comparison import single_run
from kinfed.data.examples.problem import Problem
from kinfed.data.federations.federation import Federation
from kinfed.engine.scoring.metrics import Judged
from kinfed.records.curves import Curves, client_curves
from kinfed.records.reader import load_run
from kinfed.report import build
from kinfed.report.charts.figures import site_curves


def judged(classes: int, sizes: tuple[int, ...] = (60, 40, 3), seed: int = 0) -> Judged:
    numbers = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    target = numbers.integers(0, classes, len(owner))
    target[owner == 2] = 0  # one class only
    output = np.round(numbers.normal(size=(len(owner), classes)) + np.eye(classes)[target], 1)  # with ties
    return Judged(output, target, owner, len(sizes), Problem.of_classes(classes))


def test_two_classes_are_scikit_learns() -> None:
    data = judged(2)
    curves = client_curves(data, ["a", "b", "c"])
    for client in (0, 1):
        own = data.owner == client
        fpr, tpr, _ = roc_curve(data.target[own], data.probability[own, 1], drop_intermediate=False)
        ours = curves.roc[client] / curves.positives[client]
        assert ours[1:] == pytest.approx(np.interp(Curves.FALSE_POSITIVE_RATES, fpr, tpr)[1:])
        assert ours[0] == tpr[fpr == 0].max()
    assert curves.positives[2] == 0
    assert curves.smaller.tolist() == [min(np.bincount(data.target[data.owner == c])) for c in (0, 1)] + [0]
    # The bins hold every row once, and the positives among them.
    assert curves.bins[..., 0].sum(1).tolist() == [60, 40, 3]
    assert curves.bins[0, :, 2].sum() == data.target[data.owner == 0].sum()
    high = (data.owner == 0) & (data.probability[:, 1] >= 0.7) & (data.probability[:, 1] < 0.8)
    wanted = [high.sum(), data.probability[high, 1].sum(), data.target[high].sum()]
    assert curves.bins[0, 7] == pytest.approx(wanted)


def test_several_classes_are_averaged_one_against_the_others() -> None:
    data = judged(3, (200, 150))
    curves = client_curves(data, ["a", "b"])
    for client in (0, 1):
        own = data.owner == client
        area = np.trapezoid(curves.roc[client] / curves.positives[client], Curves.FALSE_POSITIVE_RATES)
        wanted = roc_auc_score(data.target[own], data.probability[own], multi_class="ovr")
        assert area == pytest.approx(wanted, abs=0.01)
        assert curves.bins[client, :, 2].sum() == (data.predicted == data.target)[own].sum()


def test_folds_add_up_and_survive_their_file() -> None:
    parts = [client_curves(judged(2, seed=seed), ["a", "b", "c"]) for seed in (0, 1)]
    both = Curves.joined(parts)
    assert both.rows.tolist() == [120, 80, 6]
    again = Curves.from_json(both.to_json())
    assert again.clients == both.clients
    assert again.roc == pytest.approx(both.roc, abs=1e-5)


def test_the_page_draws_sites_by_name_and_says_who_is_too_small(tmp_path: Path) -> None:
    numbers = np.random.default_rng(2)
    y = numbers.integers(0, 2, 130)
    x = numbers.normal(size=(130, 3)) + y[:, None]
    sites = Federation.from_arrays(x, y, np.repeat(["Basel", "Bern", "Chur"], [70, 50, 10]))
    kinfed.run(
        federation=sites, out=tmp_path / "run", algorithms="local,fedavg", rounds=2, seeds=(0,), folds=2, model="mlr",
        participation=1.0,
    )  # fmt: skip
    curves = site_curves(single_run(load_run(tmp_path / "run", "run")))
    assert curves is not None
    assert curves.roc is not None
    assert [view.label for view in curves.roc.views] == ["Basel (70 test rows)", "Bern (50 test rows)"]
    assert len(curves.roc.data) == 2 * 3  # two sites: the diagonal and two methods
    assert curves.too_few[0].startswith("Chur (10 test rows")
    page = build([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "Too few test rows for a curve: Chur (10 test rows" in page
    numbers_only = Federation.from_arrays(x, 0.1 + x[:, 0], sites.names * 43 + ["Basel"])
    result = kinfed.run(federation=numbers_only, algorithms="local", rounds=1, seeds=(0,), model="mlr")
    assert result.result().curves is None
