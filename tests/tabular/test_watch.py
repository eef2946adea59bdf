"""The watch over deployed models: silent where nothing changed, alarmed where it did, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kinfed
from kinfed.errors import DataError
from kinfed.tabular import FitResult
from kinfed.tabular.watch import watch_models, watch_site
from tests.command_line import kinfed as command
from tests.tabular.conftest import COLUMNS, SMALL

Table = dict[str, list[Any]]


@pytest.fixture(scope="module")
def result(table: Table, tmp_path_factory: pytest.TempPathFactory) -> FitResult:
    settings = SMALL | {"deploy": "chosen", "rounds": 20, "algorithms": "fedavg"}
    return kinfed.fit(table, **COLUMNS, **settings, out=tmp_path_factory.mktemp("watch") / "fitted")


def rows_of(site: str, count: int, turned: bool = False, seed: int = 5) -> Table:
    """New rows by the rule of a site (tests.tabular.conftest), or by its opposite."""
    draw = np.random.default_rng(seed)
    dose = draw.normal(size=count)
    ill = (dose > 0) != (turned != (site == "lake"))
    return {
        "age": [50.0] * count, "dose": dose.round(3).tolist(), "group": ["a"] * count,
        "outcome": np.where(ill, "ill", "well").tolist(),
    }  # fmt: skip


def test_the_watch_is_silent_while_all_is_well_and_cries_when_sets_no_longer_cover(result: FitResult) -> None:
    well = watch_site(result, "north", rows_of("north", 200))
    assert not well.is_alarmed
    assert well.covered is not None
    assert well.covered > 0.8
    ill = watch_site(result, "north", rows_of("north", 200, turned=True))
    assert ill.alarm(ill.coverage_evidence) is not None
    assert ill.sentences()[1].startswith("ALARM: since row")


def test_a_model_that_has_become_worse_than_the_own_one_is_noticed(result: FitResult) -> None:
    own, other = result.model("north"), result.model()  # the model of all is wrong at the lake
    lake = watch_models(other, result.model("lake"), rows_of("lake", 300), "outcome")
    assert lake.harm > 0
    assert lake.alarm(lake.harm_evidence) is not None
    same = watch_models(own, own, rows_of("north", 50), "outcome")
    assert same.harm == 0
    assert same.harm_evidence.tolist() == [1.0] * 50


def test_columns_that_have_moved_are_named(result: FitResult) -> None:
    moved = rows_of("north", 50) | {"age": [90.0] * 50}
    assert next(iter(watch_site(result, "north", moved).moved)) == "age"


def test_labels_that_the_model_does_not_know_are_refused(result: FitResult) -> None:
    with pytest.raises(DataError, match="'sick', which the model does not know; its classes are ill, well"):
        watch_site(result, "north", rows_of("north", 3) | {"outcome": ["ill", "sick", "well"]})
    with pytest.raises(DataError, match="has no column 'outcome'"):
        watch_site(result, "north", {"age": [1.0]})


def test_the_command_exits_with_one_where_there_is_an_alarm(result: FitResult, tmp_path: Path) -> None:
    folder = result.folder
    pq.write_table(pa.table(rows_of("north", 200, turned=True)), tmp_path / "new.parquet")
    done = command("watch", folder, "new.parquet", "--client", "north", cwd=tmp_path)
    assert done.returncode == 1
    assert "ALARM" in done.stdout
    assert "one of the sites of the fit" in command("watch", folder, "new.parquet", cwd=tmp_path).stderr
    model = Path(str(folder)) / "models" / "sites" / "north.safetensors"
    assert "--against FILE" in command("watch", model, "new.parquet", cwd=tmp_path).stderr
