"""Numbers from a table to predictions: raw rows in, the target's unit out; resumed to the same bits; split by time; and
what `kinfed describe` says of the columns."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import kinfed
from kinfed.cli.federation_view import picture
from kinfed.data.federations.description import describe
from kinfed.data.partitions import make_federation
from kinfed.data.sources import load_source
from kinfed.records.compare import same_results
from kinfed.runs.method_run import Interrupted
from kinfed.serving.pipeline import ModelPipeline

SETTINGS = {
    "client_column": "site", "label_column": "score", "algorithms": "fedavg", "seeds": (0,), "model": "mlr",
    "participation": 1.0, "rounds": 6, "lr": 0.3, "epochs": 2, "eval_every": 0, "checkpoint_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A score of 200 ± 30 that age and ward explain."""
    numbers = np.random.default_rng(4)
    age = numbers.integers(20, 80, 120)
    ward = np.array(["a", "b", "c"])[numbers.integers(0, 3, 120)]
    score = 150 + age + 20 * (ward == "b") + numbers.normal(size=120)
    lines = ["site,age,ward,score", *(f"s{i % 3},{age[i]},{ward[i]},{score[i]:.3f}" for i in range(120))]
    path = tmp_path_factory.mktemp("scores") / "scores.csv"
    path.write_text("\n".join(lines))
    return path


def test_raw_rows_in_and_the_targets_unit_out(table: Path, tmp_path: Path) -> None:
    result = kinfed.run(dataset=str(table), out=tmp_path / "run", **SETTINGS)
    model = result.personal_model("s1")
    rows = {"ward": ["b", "a", "new"], "age": [50, 50, 30]}
    predicted = model.predict(rows)
    assert predicted[0] == pytest.approx(220, abs=5)
    assert predicted[0] - predicted[1] == pytest.approx(20, abs=5)
    assert result.result().personal["rmse"] < 5
    model.save(tmp_path / "s1.safetensors")
    assert ModelPipeline.read(tmp_path / "s1.safetensors").predict(rows) == pytest.approx(predicted)


def test_an_interrupted_run_resumes_to_the_same_bits(table: Path, tmp_path: Path) -> None:
    calls = iter([False, False, True])
    kinfed.run(dataset=str(table), out=tmp_path / "whole", **SETTINGS)
    with pytest.raises(Interrupted):
        kinfed.run(dataset=str(table), out=tmp_path / "halves", should_stop=lambda: next(calls), **SETTINGS)
    kinfed.run(dataset=str(table), out=tmp_path / "halves", resume=True, **SETTINGS)
    assert same_results(tmp_path / "whole", tmp_path / "halves") == []


def test_predictions_out_of_all_bounds_are_called_diverged(table: Path) -> None:
    """Also while every number is still finite: an error of 24 digits is no result."""
    wild = kinfed.run(dataset=str(table), **SETTINGS | {"lr": 2.5, "epochs": 5})
    assert math.isfinite(wild.result().personal["rmse"])
    assert wild.result().personal["rmse"] > 1e5
    assert wild.result().diverged
    assert not kinfed.run(dataset=str(table), **SETTINGS).result().diverged


def test_the_last_quarter_of_a_clients_time_is_tested(tmp_path: Path) -> None:
    (tmp_path / "parkinsons_telemonitoring").mkdir()
    time = np.r_[np.arange(20.0)[::-1], np.arange(8.0)]
    columns = {
        "client": ["p1"] * 20 + ["p2"] * 8, "test_time": time, "Jitter": time**2,
        "total_UPDRS": 30 + time / 7, "motor_UPDRS": 20 + time / 7,
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "parkinsons_telemonitoring" / "train-00000-of-00001.parquet")
    data = make_federation(load_source("parkinsons_telemonitoring", tmp_path, 0, {}), "column", None)
    assert data.problem.is_regression
    assert data.problem.mean == pytest.approx(float(data.labels[data.train.rows].mean()))
    for client in (0, 1):
        assert time[data.train[client]].max() < time[data.test[client]].min()
    assert data.test.count.tolist() == [5, 2]
    with pytest.raises(kinfed.KinfedError, match="names its test rows"):
        kinfed.run(dataset="parkinsons_telemonitoring", data=tmp_path, folds=3, algorithms="local", rounds=1)


def test_describe_says_what_became_of_every_column(table: Path) -> None:
    data = kinfed.Federation.from_table(table, client_column="site", label_column="score")
    console = Console(width=140)
    with console.capture() as capture:
        console.print(picture(describe(data), 140))
    lines = capture.get().splitlines()
    (age,) = (line for line in lines if line.split()[:1] == ["age"])
    (ward,) = (line for line in lines if line.split()[:1] == ["ward"])
    assert age.split()[1:3] == ["number", "1"]
    assert ward.split()[1:3] == ["category", "3"]
    assert any("regression" in line for line in lines)
