"""`kinfed init` writes what `kinfed run` reads; `kinfed doctor` says what is here and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import kinfed

from kinfed.cli import doctor_command
from kinfed.cli.doctor_command import BASE, requirements


def test_a_file_to_edit_runs(tmp_path: Path) -> None:
    quick = ["--clients", "4", "--model", "mlr", "--rounds", "1", "--seeds", "0", "--algorithms", "local,ditto"]
    done = kinfed("init", "study.toml", *quick, "--set", "ditto.lam=0.5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kinfed run study.toml" in done.stdout
    run = kinfed("run", "study.toml", "--no-report", "--out", "r", cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 3\n")
    done = kinfed("init", cwd=tmp_path)
    assert done.returncode == 2
    assert "run.toml exists already" in done.stderr
    assert (tmp_path / "run.toml").read_text() == "rounds = 3\n"


def test_settings_that_are_wrong_leave_no_file(tmp_path: Path) -> None:
    done = kinfed("init", "--algorithms", "dito", "--rounds", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-00000-of-00001.parquet").touch()
    (tmp_path / "empty").mkdir()
    done = kinfed("doctor", cwd=tmp_path, KINFED_DATA=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("torch 2.", "stacked", "cores", "nothing is wrong", "(KINFED_DATA): mnist\n"):
        assert words in done.stdout


def test_packages_that_are_missing_or_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = ["numpy>=1", "no-such-thing>=2", "rich<1", "optuna>=1; extra == 'tune'", "gone; extra == 'ray'"]
    packages = requirements(texts)
    assert [package.fits for package in packages[BASE]] == [True, False, False]
    assert "no-such-thing>=2 is not installed" in map(str, packages[BASE])
    assert [package.name for package in packages["tune"]] == ["optuna"]
    assert not packages["ray"][0].fits
    monkeypatch.setattr(doctor_command, "requirements", lambda: packages)
    done = kinfed("doctor", cwd=tmp_path)
    assert done.returncode == 1
    assert "rich" in done.stdout.split("wrong ")[1]
    assert "kinfed[ray" in done.stdout.replace("\n", "")
