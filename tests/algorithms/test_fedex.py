"""FedEx: one configuration is the method itself, a step of the chances by hand, and good settings win."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kinfed
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import RoundInfo
from kinfed.algorithms.common.averaging import DeltaUp
from kinfed.algorithms.fedex import FedEx, Up
from kinfed.cli.app import app
from kinfed.config.config_reading import make_config
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError
from kinfed.testing import Bench, tiny_federation
from kinfed.testing.workbench import SEED, WORK, expect_equal, outcome, state_of
from kinfed.tuning.while_training import tune_while_training


def bench(*rates: float, name: str = "fedavg", **options: Any) -> Bench:
    variants = tuple(make_algorithm(name, replace(WORK, lr=lr), options) for lr in rates)
    return Bench(FedEx.of(variants))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedper"])
def test_one_configuration_is_the_method_itself(name: str) -> None:
    ours = bench(0.05, name=name)
    theirs = Bench(make_algorithm(name, replace(WORK, lr=0.05)), federation=ours.federation).run()
    run = ours.run()
    for key in ("personal models", *(key for key in theirs if key.startswith("clients."))):
        assert torch.equal(run[key], theirs[key]), key
    for key in (key for key in theirs if key.startswith("server.")):
        assert torch.equal(run[key.replace("server.", "server.inner.")], theirs[key]), key


def test_a_step_of_the_chances_by_hand() -> None:
    """Three clients of 2, 1 and 1 validation examples; λ is the first round's mean in both rounds."""
    here = bench(0.1, 0.2)
    method, task = here.algorithm, here.make_task()
    population = here.federation.population(SEED)
    info = RoundInfo(1, population)
    server, _ = method.plan(method.init_server(task, population), torch.arange(3), info)
    ids = torch.arange(3)
    chosen = method.draw(server, ids)  # type: ignore[attr-defined]
    assert set(chosen.tolist()) == {0, 1}  # both are tried, or nothing is tested
    zeros = DeltaUp(torch.zeros(3, task.num_params), torch.ones(3))
    theta, slopes, past = [0.5, 0.5], 0.0, None
    for losses in ([1.0, 0.4, 0.2], [0.5, 0.7, 0.9]):
        server = method.aggregate(server, ids, Up(zeros, torch.tensor(losses), torch.tensor([2.0, 1.0, 1.0])), info)
        p = [0.5, 0.25, 0.25]
        mean = sum(w * x for w, x in zip(p, losses, strict=True))
        past = mean if past is None else past
        g = [0.0, 0.0]
        for i, j in enumerate(chosen.tolist()):
            g[j] += p[i] * (losses[i] - past) / theta[j]
        slopes += max(abs(one) for one in g) ** 2
        eta = math.sqrt(2 * math.log(2)) / math.sqrt(slopes)
        raw = [t * math.exp(-eta * one) for t, one in zip(theta, g, strict=True)]
        theta = [one / sum(raw) for one in raw]
        assert server.theta.tolist() == pytest.approx(theta)
        past = mean
        # The chances have moved, and with them the draws of this round's key.
        chosen = method.draw(server, ids)  # type: ignore[attr-defined]


def test_a_rate_that_learns_beats_one_that_does_not() -> None:
    with bench(1e-6, 0.3).loop() as loop:
        for _ in range(25):
            loop.round()
        chances = loop.server.named()["theta"]
    assert float(chances[1]) > 0.6


def test_chunks_workers_and_a_pause_change_nothing() -> None:
    here = bench(0.05, 0.2, 0.4, name="ditto")
    once = here.run()
    expect_equal(here.run(workers=2, chunk=1), once, "chunks and workers change nothing", 1e-6)
    with here.loop() as loop:
        loop.round()
        completed, state = loop.completed, state_of(loop)
    with here.loop() as loop:
        loop.load(completed, state)
        while loop.completed < 3:
            loop.round()
        ours = outcome(loop)
    with here.loop() as loop:
        for _ in range(3):
            loop.round()
        expect_equal(ours, outcome(loop), "a pause changes nothing")


SETTINGS: dict[str, Any] = {
    "seeds": (0,),
    "rounds": 6,
    "steps": 3,
    "model": "mlr",
    "eval_every": 0,
    "participation": 1.0,
}


def test_it_writes_what_a_run_begins_from_and_resumes(tmp_path: Path) -> None:
    data = tiny_federation((12, 16, 20, 12)).with_validation(0.25, 0)
    config = make_config(None, SETTINGS | {"algorithms": "ditto,fedavgm"})
    notes: list[str] = []

    class Notes(kinfed.runs.observer.NullObserver):  # type: ignore[name-defined,misc]
        def note(self, text: str) -> None:
            notes.append(text)

    result = tune_while_training(config, 4, tmp_path / "once", federation=data, observer=Notes())
    ditto, fedavgm = result.methods
    assert set(ditto.configurations[1]) == {"lr", "lam"}
    assert set(fedavgm.configurations[1]) == {"lr"}  # the rest of it is the server's
    assert any("fedavgm" in note and "does not change what clients do" in note for note in notes)
    assert ditto.configurations[0] == {}
    assert sum(ditto.chances) == pytest.approx(1, abs=1e-4)
    stop = iter([False, False, True])
    with pytest.raises(kinfed.KinfedError):
        tune_while_training(config, 4, tmp_path / "twice", federation=data, should_stop=lambda: next(stop))
    again = tune_while_training(config, 4, tmp_path / "twice", federation=data, resume=True)
    assert again.methods == result.methods
    chosen = make_config(tmp_path / "once" / "best.toml", {})
    assert chosen.algorithms["ditto"] == {"method": "ditto", **ditto.settings}


def test_the_command(tmp_path: Path) -> None:
    words = ["tune", "--while-training", "--algorithms", "fedavg", "--trials", "3", "--rounds", "2", "--clients", "4"]
    run = CliRunner().invoke(app, [*words, "--model", "mlr", "--steps", "2", "--out", str(tmp_path / "tuned")])
    assert run.exit_code == 0, run.output
    assert (tmp_path / "tuned" / "best.toml").exists()


@pytest.mark.parametrize(
    ("settings", "count", "words"),
    [
        ({"dp_noise": 1.0}, 3, "validation loss leaves"),
        ({"mode": "async"}, 3, "synchronous"),
        ({"validation": 0.0}, 3, "validation"),
        ({}, 1, "two configurations"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], count: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        tune_while_training(make_config(None, SETTINGS | settings), count, tmp_path / "out")


def test_kept_moments_belong_to_one_setting() -> None:
    kept = LocalTraining(optimizer_state="kept", momentum=0.9)
    with pytest.raises(ConfigError, match="optimizer_state"):
        FedEx.of((make_algorithm("fedavg", kept),))
