"""What clients reach without a model, against scikit-learn's dummies; in the folder, the tables and in folds."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import log_loss, mean_squared_error

import kinfed
from kinfed.analysis.comparison import single_run
from kinfed.cli.display import results_table
from kinfed.data.federations.federation import Federation
from kinfed.engine.contract.objective import CROSS_ENTROPY, SQUARED
from kinfed.records.reader import load_run
from kinfed.report import build
from kinfed.report.method_tables import every_metric_table, measured_gain
from kinfed.report.method_tables import results_table as page_table
from kinfed.report.sentences import one_class_sentence
from kinfed.runs.baseline import baseline_score

RUN = {"algorithms": "local,fedavg", "rounds": 1, "model": "mlr", "participation": 1.0}


def test_the_majority_class_is_scikit_learns(federation: Federation) -> None:
    score = baseline_score(federation, torch.arange(6), CROSS_ENTROPY, None)
    for client in range(6):
        train, test = federation.labels[federation.train[client]], federation.labels[federation.test[client]]
        dummy = DummyClassifier(strategy="prior").fit(np.zeros((len(train), 1)), train.numpy())
        assert int(score.correct[client]) == int((dummy.predict(np.zeros((len(test), 1))) == test.numpy()).sum())
        shares = (torch.bincount(train, minlength=3) + 1) / (len(train) + 3)
        wanted = log_loss(test.numpy(), np.tile(shares, (len(test), 1)), labels=[0, 1, 2], normalize=False)
        assert float(score.loss[client]) == pytest.approx(wanted, rel=1e-6)
        auroc = float(score.metric("auroc")[client])
        assert auroc == 0.5 or (auroc != auroc and len(test.unique()) == 1)


def test_the_mean_is_scikit_learns(federation: Federation) -> None:
    y = np.random.default_rng(0).normal(50, 9, len(federation.labels))
    who = np.repeat(federation.names, federation.train.count + federation.test.count)
    data = Federation.from_arrays(np.zeros((len(y), 1)), y, who, task="regression")
    score = baseline_score(data, torch.tensor([4, 1]), SQUARED, "mae")
    for row, client in enumerate((4, 1)):
        train, test = data.labels[data.train[client]].numpy(), data.labels[data.test[client]].numpy()
        dummy = DummyRegressor().fit(np.zeros((len(train), 1)), train)
        wanted = mean_squared_error(test, dummy.predict(np.zeros((len(test), 1)))) ** 0.5
        assert float(score.metric("rmse")[row]) == pytest.approx(wanted, rel=1e-5)


def test_every_table_ends_with_it(federation: Federation, tmp_path: Path) -> None:
    result = kinfed.run(federation=federation, out=tmp_path / "run", seeds=(0, 1), **RUN)
    correct = baseline_score(federation, torch.arange(6), CROSS_ENTROPY, None)
    accuracy = float(correct.correct.sum() / correct.count.sum())
    assert [baseline.personal["accuracy"] for baseline in result.baselines] == pytest.approx([accuracy, accuracy])
    console = Console(width=120, record=True, file=StringIO())
    console.print(results_table([r.to_json() for r in result.results], result.baselines))
    last = console.export_text().strip().splitlines()[-1]
    assert "(majority)" in last
    assert f"{100 * accuracy:.1f}" in last
    comparison = single_run(load_run(tmp_path / "run", "run"))
    row = page_table(comparison).rows[-1]
    assert row[0].text == "without a model: majority class"
    assert row[1].text == f"{100 * accuracy:.1f}"
    assert not any(cell.best for cell in row)
    page = build([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "without a model: majority class" in page
    assert "over 2 seeds, accuracy in %." in " ".join(page.split())
    every = every_metric_table(comparison)
    assert every is not None
    assert [column.heading for column in every.columns[1:5]] == ["Accuracy", "Balanced accuracy", "F1", "AUROC"]
    assert every.rows[-1][4].text == "50.0"  # a constant ranks nothing
    table, _ = measured_gain(tmp_path / "run")
    assert "No model" in [column.header for column in table.columns]


def test_folds_test_it_on_every_row(federation: Federation) -> None:
    result = kinfed.run(federation=federation, seeds=(0,), folds=3, **{**RUN, "algorithms": "local"})
    assert result.baselines[0].clients.keys() == {str(k) for k in range(6)}
    assert 0.2 < result.baselines[0].personal["accuracy"] < 0.7


def test_a_page_says_when_one_class_is_most_of_the_accuracy(tmp_path: Path) -> None:
    x, rare = np.random.default_rng(0).normal(size=(80, 2)), np.arange(80) % 10 == 0
    names = np.repeat(["a", "b"], 40)
    for metric, said in (("accuracy", True), ("auroc", False)):
        data = Federation.from_arrays(x, np.where(rare, "ill", "well"), names)
        kinfed.run(federation=data, out=tmp_path / metric, seeds=(0,), metric=metric, **RUN)
        sentence = one_class_sentence(single_run(load_run(tmp_path / metric, "run")))
        assert sentence.startswith("Always predicting a client's own most frequent class is right in ") == said
    kinfed.run(federation=Federation.from_arrays(x, x[:, 0] * 9, names), out=tmp_path / "numbers", seeds=(0,), **RUN)
    page = " ".join(build([tmp_path / "numbers"], tmp_path / "page.html").read_text().split())
    assert "Shown is" not in page
    assert "What RMSE costs in communication" in page


def test_errors_of_the_baseline_are_computed_when_they_are_asked_for(federation: Federation) -> None:
    """Draws take longer than everything else of it, and tables of runs show none."""
    score = baseline_score(federation, torch.arange(6), CROSS_ENTROPY, None)
    assert callable(score.error_or_draws)
    assert score.error is not None
    assert score.error.shape == (6,)
