"""Safe mixtures of finished models: shares by rows of the site alone, files, and models that do not fit together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import kinfed
from kinfed.errors import ConfigError, DataError
from kinfed.serving import ModelPipeline
from kinfed.tabular import insure
from kinfed.theory import safe_mixture
from tests.command_line import kinfed as command
from tests.tabular.conftest import COLUMNS
from tests.tabular.test_watch import rows_of

Models = dict[str, ModelPipeline]
SETTINGS: dict[str, Any] = {"model": "mlr", "rounds": 15, "steps": 5, "seeds": (0,), "participation": 1.0}


@pytest.fixture(scope="module")
def models(table: dict[str, list[Any]]) -> Models:
    """What the lake has alone, and the model of all, which is wrong there."""
    federation = kinfed.Federation.from_table(table, **COLUMNS)
    result = kinfed.run(federation=federation, algorithms="local,fedavg", **SETTINGS)
    server = result.server_model("fedavg")
    assert server is not None
    return {
        "lake": result.personal_model("lake", "local"),
        "north": result.personal_model("north", "local"),
        "all": server,
    }


def test_the_better_model_gets_the_larger_share_and_the_promise_is_that_of_the_rows(models: Models) -> None:
    at_lake = insure(models["lake"], [models["all"]], rows_of("lake", 81), "outcome")
    assert at_lake.shares[0] > 0.85
    assert (at_lake.rows, at_lake.calibrated) == (41, 40)
    assert at_lake.most_it_costs == pytest.approx(np.log(2) / 42)
    assert at_lake.gain >= -np.log(2) / 41 - 1e-9
    wrong = insure(models["lake"], [models["north"]], rows_of("north", 80), "outcome")
    assert wrong.shares[0] < 0.15
    assert wrong.gain > 0
    assert wrong.covered == pytest.approx(0.9, abs=0.1)
    twice = insure(models["lake"], [models["north"], models["all"]], rows_of("north", 80), "outcome", alone_prior=0.9)
    assert twice.shares.sum() == pytest.approx(1)


def test_a_mixture_predicts_as_its_shares_say(models: Models) -> None:
    rows = rows_of("lake", 60)
    one = insure(models["lake"], [models["all"]], rows, "outcome")
    parts = [models["lake"], models["all"]]
    mixed = sum(share * part.predict_proba(rows) for share, part in zip(one.shares, parts, strict=True))
    np.testing.assert_allclose(one.model.predict_proba(rows), mixed, atol=1e-6)
    assert len(one.model.predictions(rows, level=0.9).sets) == 60


def test_numbers_are_mixed_by_normal_densities(table: dict[str, list[Any]]) -> None:
    numbers = {**table, "outcome": [10 * dose for dose in table["dose"]]}
    federation = kinfed.Federation.from_table(numbers, **COLUMNS)
    result = kinfed.run(federation=federation, algorithms="local,fedavg", **SETTINGS)
    fresh = rows_of("north", 60)
    fresh["outcome"] = [10 * dose for dose in fresh["dose"]]
    server = result.server_model("fedavg")
    assert server is not None
    one = insure(result.personal_model("north", "local"), [server], fresh, "outcome")
    assert one.gain >= -safe_mixture.most_it_costs(0) / one.rows - 1e-9
    ends = one.model.predictions(fresh, level=0.9).sets
    assert one.covered == pytest.approx(0.9, abs=0.1)
    assert ends.shape == (60, 2)
    diverged = copy.deepcopy(server)
    with torch.no_grad():
        for parameter in diverged.module.parameters():
            parameter.mul_(1e30)
    with_it = insure(result.personal_model("north", "local"), [server, diverged], fresh, "outcome")
    assert with_it.shares == pytest.approx([*one.shares, 0.0])


def test_rows_and_models_that_do_not_fit_are_refused(models: Models, table: dict[str, list[Any]]) -> None:
    rows = rows_of("lake", 20)
    with pytest.raises(DataError, match="has no column 'sick'"):
        insure(models["lake"], [models["all"]], rows, "sick")
    with pytest.raises(DataError, match="has 1 rows; some set shares"):
        insure(models["lake"], [models["all"]], rows_of("lake", 1), "outcome")
    with pytest.raises(ConfigError, match="between 0 and 1; got 1"):
        insure(models["lake"], [models["all"]], rows, "outcome", alone_prior=1.0)
    elsewhere = {name: values[:60] for name, values in table.items()}
    other = kinfed.run(federation=kinfed.Federation.from_table(elsewhere, **COLUMNS), algorithms="local", **SETTINGS)
    with pytest.raises(DataError, match="take models of one run"):
        insure(models["lake"], [other.personal_model("north", "local")], rows, "outcome")


def test_a_new_client_adopts_and_insures_on_the_command_line(table: dict[str, list[Any]], tmp_path: Path) -> None:
    federation = kinfed.Federation.from_table(table, **COLUMNS)
    kinfed.run(federation=federation, algorithms="local,fedavg", out=tmp_path / "run", **SETTINGS)
    pq.write_table(pa.table(rows_of("north", 40)), tmp_path / "new.parquet")
    pq.write_table(pa.table(rows_of("north", 40, seed=9)), tmp_path / "held.parquet")
    adopted = command(
        "adopt", "run", "--algorithm", "fedavg", "--table", "new.parquet", "--label-column", "outcome",
        "--out", "adopted.safetensors", "--out-alone", "own.safetensors", cwd=tmp_path,
    )  # fmt: skip
    assert adopted.returncode == 0, adopted.stderr
    done = command(
        "insure", "own.safetensors", "adopted.safetensors", "--rows", "held.parquet", "--label-column", "outcome",
        "--out", "safe.safetensors", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "costs at most 0.033 nats" in " ".join(done.stdout.split())
    assert len(ModelPipeline.read(tmp_path / "safe.safetensors").predict(rows_of("north", 5))) == 5
