"""Runs in folds: the sums of all folds, one seed each, resumed to the same bits, and no model that was kept."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import kinfed
from kinfed.config.config_reading import make_config
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions.partition import fold_of_federation
from kinfed.errors import ConfigError
from kinfed.newcomers.adoption import adopt
from kinfed.records.reader import load_run
from kinfed.report import build
from kinfed.runs.experiment import Experiment
from kinfed.runs.method_run import Interrupted

SETTINGS = {
    "algorithms": "local,fedavg", "rounds": 2, "seeds": (0, 1), "folds": 2, "model": "mlr", "participation": 1.0,
    "eval_every": 0, "checkpoint_every": 1, "metric": "auroc",
}  # fmt: skip


@pytest.fixture(scope="module")
def sites() -> Federation:
    numbers = np.random.default_rng(2)
    y = numbers.integers(0, 2, 60)
    x = numbers.normal(size=(60, 3)) + y[:, None]
    return Federation.from_arrays(x, y, np.repeat(["north", "south", "tiny"], [40, 18, 2]))


@pytest.fixture(scope="module")
def folder(sites: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folds") / "run"
    kinfed.run(federation=sites, out=path, **SETTINGS)
    return path


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_row_is_tested_once_and_sums_of_folds_are_added(sites: Federation) -> None:
    once = {**SETTINGS, "algorithms": "fedavg", "seeds": (1,), "folds": 3}
    result = kinfed.run(federation=sites, **once).result("fedavg")
    assert result.evaluation.personal is not None
    assert result.evaluation.personal.count.tolist() == [40, 18, 2]
    assert result.folds == 3
    # By hand: the accuracy of each fold's own run, weighted by its rows.
    right = torch.zeros(3, dtype=torch.float64)
    squares = torch.zeros(3, dtype=torch.float64)
    pairs = torch.zeros(3, 2, dtype=torch.float64)
    for fold in range(3):
        part = Experiment(make_config(None, once), sites, fold=fold).run_method("fedavg", 1, None)
        assert part.evaluation.personal is not None
        right += part.evaluation.personal.correct
        pairs += part.evaluation.personal.sums["auroc"]
        errors = part.evaluation.personal.error
        squares += torch.nan_to_num(part.evaluation.personal.sums["auroc"][:, 1] * errors) ** 2
    assert torch.equal(result.evaluation.personal.correct, right)
    assert torch.equal(result.evaluation.personal.sums["auroc"], pairs)
    assert result.personal["accuracy"] == pytest.approx(float(right.sum() / 60))
    assert float(result.evaluation.personal.error[0]) == pytest.approx(float(squares[0].sqrt() / pairs[0, 1]))


def test_a_folder_has_one_line_per_client_and_seed(folder: Path) -> None:
    assert [(row["client"], row["n_test"]) for row in lines(folder)][:3] == [
        ("north", "40"),
        ("south", "18"),
        ("tiny", "2"),
    ]
    assert len(lines(folder)) == 2 * 2 * 3
    summary = json.loads((folder / "summary.json").read_text())["results"]
    assert len(summary) == 4
    assert {entry["folds"] for entry in summary} == {2}
    run = load_run(folder, "run")
    assert len(run.trials) == 4
    assert all(trial.finished and len(trial.rounds) == 2 for trial in run.trials)
    assert not list((folder / "models").glob("local*"))
    page = build([folder], folder.parent / "page.html").read_text()
    assert "cross-validation in 2 folds: every row is tested once" in page
    with pytest.raises(ConfigError, match="cross-validation"):
        adopt(folder, Federation.from_arrays(np.zeros((4, 3)), [0, 1, 0, 1], ["new"] * 4), "fedavg")


def stopping_after(rounds: int) -> Callable[[], bool]:
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count >= rounds

    return stop


def test_an_interrupted_cross_validation_resumes_to_the_same_bits(
    sites: Federation, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):  # in the second fold of the second method
        kinfed.run(federation=sites, out=tmp_path / "run", should_stop=stopping_after(7), **SETTINGS)
    unfinished = load_run(tmp_path / "run", "run")
    assert any("not started" in note for note in unfinished.notes)
    kinfed.run(federation=sites, out=tmp_path / "run", resume=True, **SETTINGS)
    assert lines(tmp_path / "run") == lines(folder)


def test_refusals(sites: Federation) -> None:
    with pytest.raises(ConfigError, match="epsilon would count one training"):
        kinfed.run(federation=sites, **SETTINGS, dp_noise=1.0)
    with pytest.raises(ConfigError, match="foreign_targets shuffles them"):
        kinfed.run(federation=sites, **SETTINGS, foreign_targets=True)
    result = kinfed.run(federation=sites, **{**SETTINGS, "rounds": 1, "seeds": (0,), "algorithms": "local"})
    with pytest.raises(ConfigError, match="keeps no models"):
        result.personal_model("north")


def test_numbers_in_folds_are_judged_in_the_unit_of_their_own_scale(tmp_path: Path) -> None:
    """Every fold standardizes by its own training rows: RMSE of a model that predicts their mean is known."""
    numbers = np.random.default_rng(3)
    y = 100 + 10 * numbers.normal(size=30)
    sites = Federation.from_arrays(np.zeros((30, 1)), y, ["a"] * 15 + ["b"] * 15)
    result = kinfed.run(
        federation=sites,
        algorithms="fedavg",
        rounds=10,
        seeds=(0, 1),
        eval_every=0,
        folds=5,
        model="mlr",
        participation=1.0,
        lr=0.5,
    )
    for seed in (0, 1):
        errors = []
        for fold in range(5):
            data = fold_of_federation(sites, 5, fold, seed)
            errors += ((y[data.train.rows].mean() - y[data.test.rows]) ** 2).tolist()
        assert result.result("fedavg", seed).personal["rmse"] == pytest.approx(np.sqrt(np.mean(errors)), rel=0.02)
