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
from method_bench import LR, by_hand, close, gradient, info, server

import kinfed
from kinfed.algorithms import ALGORITHMS
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.core.plugins import load as load_plugin
from kinfed.data.examples.batches import LocalTraining
from kinfed.records.compare import same_results
from kinfed.testing import CHECKS, Bench, tiny_federation

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples" / "my_method.py"
SETTINGS = ("--plugin", str(PLUGIN), "--algorithms", "fedexp,fedavg", "--seeds", "0", "--clients", "6")


@pytest.fixture(scope="module")
def fedexp() -> Iterator[Any]:
    yield load_plugin(PLUGIN).FedExP
    ALGORITHMS.unregister("fedexp")  # other tests count the methods of the package


@pytest.fixture(scope="module")
def bench(fedexp: Any) -> Bench:
    return Bench(fedexp(training=LocalTraining(batch=5, steps=5)), federation=tiny_federation())


@pytest.mark.parametrize("check", CHECKS)
def test_the_plugin_keeps_the_contract(bench: Bench, check: str) -> None:
    CHECKS[check](bench)


def test_a_round_by_hand(fedexp: Any) -> None:
    """One step of FedAvg with equal weights, prolonged by η_g."""
    with by_hand(fedexp(LocalTraining(lr=LR, batch=100, steps=1), eps=1e-4)) as loop:
        for _ in range(2):
            w = server(loop)
            delta = torch.stack([-LR * gradient(loop, m, w) for m in range(3)])
            mean = delta.mean(0)
            rate = max(1.0, float(delta.square().sum(1).mean() / (2 * (mean.square().sum() + 1e-4))))
            loop.round()
            close(server(loop), w + rate * mean)
            close(server(loop, "rate"), torch.tensor(rate), 1e-5)


def test_updates_that_disagree_are_extrapolated(fedexp: Any) -> None:
    """Two updates at a right angle: mean ‖Δ‖² = 1, ‖mean Δ‖² = 1/2, so η_g = 1/(1 + 2 ε); opposite ones go furthest."""
    rates = []
    for other in ([1.0, 0.0], [0.0, 1.0], [-0.9, 0.0]):
        up = DeltaUp(torch.tensor([[1.0, 0.0], other]), None)
        start = load_plugin(PLUGIN).Server(torch.zeros(2), torch.tensor(1.0))
        rates.append(float(fedexp(eps=1e-3).aggregate(start, torch.arange(2), up, info()).rate))
    assert rates[:2] == [1.0, 1.0]
    assert rates[2] == pytest.approx((1 + 0.81) / 2 / (2 * (0.05**2 + 1e-3)), rel=1e-5)


def typed(*arguments: str, cwd: Path) -> str:
    """What a command that succeeds prints."""
    done = command_line.kinfed(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("fedexp")
def test_a_plugin_is_listed_and_compared_and_in_the_report(tmp_path: Path) -> None:
    assert "eps" in typed("list", "fedexp", "--plugin", str(PLUGIN), cwd=tmp_path)
    typed("run", *SETTINGS, "--rounds", "2", "--out", "run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [result["algorithm"] for result in summary["results"]] == ["fedexp", "fedavg"]
    assert "FedExP" in (tmp_path / "run" / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("fedexp")
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


@pytest.mark.usefixtures("fedexp")
def test_a_plugin_is_tuned(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra tune is not installed")
    typed("tune", *SETTINGS, "--rounds", "2", "--trials", "2", "--out", "tuned", cwd=tmp_path)
    assert "fedexp" in (tmp_path / "tuned" / "best.toml").read_text()
    assert "eps" in (tmp_path / "tuned" / "study.jsonl").read_text()  # the range that the option declares
    typed("run", "tuned/best.toml", "--rounds", "1", "--out", "best", cwd=tmp_path)


def test_objects_are_compared_with_names(fedexp: Any) -> None:
    methods = [fedexp(eps=0.5), fedexp(), "fedavg"]
    result = kinfed.run(algorithms=methods, rounds=2, seeds=(0,), clients=5)
    assert [one.label for one in result.results] == ["fedexp", "fedexp-2", "fedavg"]
    assert result.config.algorithms["fedexp"]["eps"] == 0.5
