"""Methods outside the package join everything: comparison, contract, tuning, resume, report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch
from method_bench import LR, by_hand, close, gradient, server

import kinfed
from kinfed.algorithms import ALGORITHMS
from kinfed.core.registry import load_plugin
from kinfed.data.batches import LocalTraining
from kinfed.runs.compare import same_results
from kinfed.testing import CHECKS, Bench, tiny_federation

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples" / "my_method.py"
SETTINGS = ("--plugin", str(PLUGIN), "--algorithms", "scaffold,fedavg", "--seeds", "0", "--clients", "6")


@pytest.fixture(scope="module")
def scaffold() -> Iterator[Any]:
    yield load_plugin(PLUGIN).Scaffold
    ALGORITHMS.unregister("scaffold")  # other tests count the methods of the package


@pytest.fixture(scope="module")
def bench(scaffold: Any) -> Bench:
    return Bench(scaffold(training=LocalTraining(batch=5, steps=5)), federation=tiny_federation())


@pytest.mark.parametrize("check", CHECKS)
def test_the_plugin_keeps_the_contract(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


def test_a_round_of_scaffold_by_hand(scaffold: Any) -> None:
    """First round: no control variates, one step of FedAvg with equal weights; c_i becomes the gradient, c their mean.
    Second round: every client steps along its gradient corrected by c − c_i."""
    with by_hand(scaffold(LocalTraining(lr=LR, batch=100, steps=1))) as loop:
        x = server(loop, "x")
        g = torch.stack([gradient(loop, m, x) for m in range(3)])
        loop.round()
        close(server(loop, "x"), x - LR * g.mean(0))
        close(server(loop, "c"), g.mean(0), 1e-5)
        x = server(loop, "x")
        h = torch.stack([gradient(loop, m, x) for m in range(3)])
        loop.round()
        close(server(loop, "x"), x - LR * (h - g + g.mean(0)).mean(0))


def typed(*arguments: str, cwd: Path) -> str:
    """What a command that succeeds prints."""
    done = command_line.kinfed(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("scaffold")
def test_a_plugin_is_listed_and_compared_and_in_the_report(tmp_path: Path) -> None:
    assert "server_lr" in typed("list", "scaffold", "--plugin", str(PLUGIN), cwd=tmp_path)
    typed("run", *SETTINGS, "--rounds", "2", "--out", "run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [result["algorithm"] for result in summary["results"]] == ["scaffold", "fedavg"]
    assert "SCAFFOLD" in (tmp_path / "run" / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("scaffold")
def test_a_killed_run_of_a_plugin_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = (*SETTINGS, "--rounds", "40", "--checkpoint-every", "1", "--no-report")
    typed("run", *settings, "--out", "whole", cwd=tmp_path)
    command = [sys.executable, "-m", "kinfed", "run", *settings, "--out", "killed"]
    process = subprocess.Popen(command, cwd=tmp_path)
    journal = tmp_path / "killed" / "rounds.jsonl"
    limit = time.monotonic() + 100
    while time.monotonic() < limit and not (journal.exists() and len(journal.read_text().splitlines()) >= 5):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    typed("run", "--out", "killed", "--resume", "--no-report", cwd=tmp_path)
    assert not list(same_results(tmp_path / "whole", tmp_path / "killed"))


@pytest.mark.usefixtures("scaffold")
def test_a_plugin_is_tuned(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra tune is not installed")
    typed("tune", *SETTINGS, "--rounds", "2", "--trials", "2", "--out", "tuned", cwd=tmp_path)
    assert "scaffold" in (tmp_path / "tuned" / "best.toml").read_text()
    assert "server_lr" in (tmp_path / "tuned" / "study.jsonl").read_text()  # the range that the option declares
    typed("run", "tuned/best.toml", "--rounds", "1", "--out", "best", cwd=tmp_path)


def test_objects_are_compared_with_names(scaffold: Any) -> None:
    methods = [scaffold(server_lr=0.5), scaffold(), "fedavg"]
    result = kinfed.run(algorithms=methods, rounds=2, seeds=(0,), clients=5)
    assert [one.label for one in result.results] == ["scaffold", "scaffold-2", "fedavg"]
    assert result.config.algorithms["scaffold"]["server_lr"] == 0.5
