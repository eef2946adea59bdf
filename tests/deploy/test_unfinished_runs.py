"""Notes of runs that have begun: who died is started again, who ended is not. With processes: test_deploy_flower.py."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("flwr", reason="the extra flower is not installed")

from kinfed.deploy.programs import unfinished_runs
from kinfed.deploy.programs.unfinished_runs import Resumer, _is_held, unfinished
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
    assert [path.name[:6] for path in folder.iterdir()] == ["ended-"]


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


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `flwr` is asked for, a line each; the program in its place knows of one run that was stopped."""
    program, asked = tmp_path / "flwr", tmp_path / "asked.txt"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\ncase "$*" in *"--run-id 9"*) echo finished:stopped;; esac\n')
    program.chmod(0o700)
    monkeypatch.setattr(unfinished_runs, "flower_program", lambda name: str(program))
    for name in ("LOOK_SECONDS", "FIRST_PAUSE"):
        monkeypatch.setattr(unfinished_runs, name, 0.0)
    return asked


def test_a_run_that_died_is_started_again_and_no_other(tmp_path: Path, asked: Path) -> None:
    folder, said = tmp_path / "notes", list[str]()
    for number in (7, 8, 9):
        out = tmp_path / f"out-{number}"
        out.mkdir()
        with pytest.raises(MemoryError), unfinished(folder, number, {"method": "ditto", "out": str(out)}):
            raise MemoryError
    with socket.create_server(("127.0.0.1", 0)) as superlink, FileLock(tmp_path / "out-8" / ".lock"):
        resumer = Resumer(folder, tmp_path / "home", superlink.getsockname()[1], tmp_path / "ca.crt", said.append)
        resumer.watch()
        for process in resumer._starting.values():
            process.wait()
    (line,) = said  # run 8 lives, and 9 was stopped by the operator
    assert line.startswith(f"{tmp_path / 'out-7'}: the server's part of this run has died; it is started again")
    assert "has died; it is started again and resumes (try 1)" in (tmp_path / "out-7" / "log.txt").read_text()
    (started,) = [words for words in asked.read_text().splitlines() if words.startswith("run ")]
    assert Path(started.split()[1], "pyproject.toml").exists()
    assert sorted(notes(folder)) == ["7", "8"]


def test_a_server_lives_on_where_flower_does_not_say_what_became_of_a_run(
    tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine `flwr list` took more than a minute, and that ended the server. The run is looked at again."""
    with pytest.raises(MemoryError), unfinished(tmp_path / "notes", 7, {"method": "ditto", "out": str(tmp_path)}):
        raise MemoryError
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        port = superlink.getsockname()[1]
        resumer = Resumer(tmp_path / "notes", tmp_path / "home", port, tmp_path / "ca.crt", lambda _: None)
        with monkeypatch.context() as patch:
            patch.setattr(unfinished_runs, "LIST_SECONDS", -1.0)
            resumer.watch()
        assert notes(tmp_path / "notes") == ["7"]
        assert not resumer._starting
        resumer.watch()
        assert resumer._starting.popitem()[1].wait() == 0


def test_nothing_is_started_while_nobody_listens(tmp_path: Path, asked: Path) -> None:
    with pytest.raises(MemoryError), unfinished(tmp_path / "notes", 7, {"method": "ditto", "out": str(tmp_path / "o")}):
        raise MemoryError
    with socket.create_server(("127.0.0.1", 0)) as former:
        port = former.getsockname()[1]
    Resumer(tmp_path / "notes", tmp_path / "home", port, tmp_path / "ca.crt", print).watch()
    assert not asked.exists()
