"""Notes of runs that have begun: who died is started again, who ended is not. With processes: test_deploy_flower.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("flwr", reason="the extra flower is not installed")

from kinfed.deploy.programs.unfinished_runs import _is_held, unfinished
from kinfed.errors import PoolError


def notes(folder: Path) -> list[str]:
    return [json.loads(file.read_text())["run"] for file in sorted(folder.glob("run-*.json"))]


def test_a_run_is_noted_while_it_goes_on_with_all_it_takes_to_start_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    with unfinished(folder, 7, {"method": "ditto", "eval-every": 3, "out": str(tmp_path / "out")}):
        assert notes(folder) == ["7"]
        (app,) = (path for path in folder.iterdir() if path.is_dir())
        text = (app / "pyproject.toml").read_text()
        assert "eval-every = 3" in text
        assert str(tmp_path / "out") in text
    assert list(folder.iterdir()) == []


def test_a_run_that_ends_with_a_reason_of_its_own_is_not_started_again_and_one_that_dies_is(tmp_path: Path) -> None:
    config = {"method": "ditto", "out": str(tmp_path / "out")}
    with pytest.raises(PoolError), unfinished(tmp_path, 1, config):
        raise PoolError("too few clients")
    assert notes(tmp_path) == []
    with pytest.raises(MemoryError), unfinished(tmp_path, 2, config):
        raise MemoryError
    assert notes(tmp_path) == ["2"]
    with unfinished(tmp_path, 3, config):  # the same results, taken up by another process: one note
        assert notes(tmp_path) == ["3"]


def test_a_run_lives_while_somebody_holds_the_lock_of_its_results(tmp_path: Path) -> None:
    assert not _is_held(tmp_path)
    with FileLock(tmp_path / ".lock"):
        assert _is_held(tmp_path)
    assert not _is_held(tmp_path / "never written")
