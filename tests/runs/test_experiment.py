"""Runs: the same clients and starts for all methods, files on disk, interruption and resumption."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import kinfed
from kinfed.algorithms import ALGORITHMS
from kinfed.config.config_reading import make_config
from kinfed.engine.compiled import fused_task
from kinfed.errors import ConfigError, KinfedError, StorageError
from kinfed.records.checkpoint import Checkpoints
from kinfed.records.compare import same_results
from kinfed.records.run_files import RunFiles
from kinfed.runs.experiment import Experiment, read_config
from kinfed.runs.method_run import Interrupted
from kinfed.runs.observer import NullObserver
from kinfed.runs.run_checks import COMPILING

SMALL = {"algorithms": "local,ditto", "rounds": 4, "seeds": (0, 1), "clients": 5, "model": "mlr", "eval_every": 2}
ON_OWN_DATA = {name: value for name, value in SMALL.items() if name != "clients"}


def small_federation() -> kinfed.Federation:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 6)).astype("float32")
    y = (x[:, 0] + 0.3 * draw.normal(size=120) > 0).astype(int) + (x[:, 1] > 0.5)
    return kinfed.Federation.from_arrays(x, y, np.repeat(list("abcd"), 30))


def test_clients_are_compared_with_training_alone_wherever_that_stands_among_the_methods(tmp_path: Path) -> None:
    def lines(name: str, algorithms: str, **more: Any) -> dict[str, list[dict[str, str]]]:
        settings = {**ON_OWN_DATA, "algorithms": algorithms, "seeds": (0,), **more}
        result = kinfed.run(**settings, out=tmp_path / name, federation=small_federation())
        assert [one.label for one in result.results] == algorithms.split(",")
        with (tmp_path / name / "clients.csv").open() as file:
            rows = list(csv.DictReader(file))
        return {label: [row for row in rows if row["algorithm"] == label] for label in algorithms.split(",")}

    last, first = lines("a", "ditto,local"), lines("b", "local,ditto")
    assert last == first
    assert {float(row["personal_error_of_gain"]) for row in first["local"]} == {0.0}
    paired = [float(row["personal_error_of_gain"]) for row in first["ditto"]]
    apart = [
        np.hypot(float(own["personal_error"]), float(alone["personal_error"]))
        for own, alone in zip(first["ditto"], first["local"], strict=True)
    ]
    assert sum(paired) < 0.8 * sum(apart)
    assert {row["personal_error_of_gain"] for row in lines("c", "ditto")["ditto"]} == {""}
    folds = lines("d", "ditto,local", folds=2)["ditto"]
    assert all(float(row["personal_error_of_gain"]) >= 0 for row in folds)
    memory = kinfed.run(**{**ON_OWN_DATA, "algorithms": "ditto,local", "seeds": (0,)}, federation=small_federation())
    values = [client.values["personal_error_of_gain"] for client in memory.run.trials[0].clients]
    assert values == pytest.approx(paired)


def test_a_run_writes_what_the_documentation_says(tmp_path: Path) -> None:
    result = kinfed.run(**SMALL, out=tmp_path / "run")
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * 4
    assert {"algorithm", "seed", "round", "seconds", "active", "dropped", "bytes_down", "bytes_up"} <= set(lines[0])
    assert [line["personal"] is not None for line in lines[:4]] == [False, True, False, True]
    summary = json.loads((folder / "summary.json").read_text())["results"]
    assert {(r["algorithm"], r["seed"]) for r in summary} == {("local", 0), ("ditto", 0), ("local", 1), ("ditto", 1)}
    assert summary[0]["server"] is None
    with (folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 5
    mine = [r for r in rows if r["algorithm"] == "ditto" and r["seed"] == "0" and r["took_part"] == "1"]
    weighted = sum(float(r["personal_accuracy"]) * int(r["n_test"]) for r in mine) / sum(int(r["n_test"]) for r in mine)
    assert weighted == pytest.approx(result.result("ditto", 0).personal["accuracy"], abs=1e-12)
    assert lines[-1]["personal"] == pytest.approx(summary[-1]["personal"])  # figures are those of the last round
    ditto = [line for line in lines if line["algorithm"] == "ditto" and line["seed"] == 1]
    assert sum(line["bytes_up"] for line in ditto) == result.result("ditto", 1).bytes_up


def test_bytes_by_hand(tmp_path: Path) -> None:
    """Logistic regression on 8x8 digits: 650 parameters; 2 of 5 clients, 3 rounds; Ditto sends w up with a count."""
    result = kinfed.run(algorithms="local,ditto", rounds=3, seeds=(0,), clients=5, model="mlr", participation=0.4)
    assert result.result("local").bytes_down == result.result("local").bytes_up == 0
    assert result.result("ditto").bytes_down == 3 * 2 * 4 * 650
    assert result.result("ditto").bytes_up == 3 * 2 * (4 * 650 + 4)


def test_two_equal_runs_give_equal_files(tmp_path: Path) -> None:
    kinfed.run(**SMALL, out=tmp_path / "a")
    kinfed.run(**SMALL, out=tmp_path / "b", workers=1)
    assert same_results(tmp_path / "a", tmp_path / "b", config=False) == []
    assert (tmp_path / "a/clients.csv").read_bytes() == (tmp_path / "b/clients.csv").read_bytes()


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    kinfed.run(**SMALL, out=tmp_path / "whole")
    for stop_after in (1, 3, 6, 11):
        folder = tmp_path / f"cut-{stop_after}"
        calls = iter(range(10**6))
        with pytest.raises(Interrupted):
            kinfed.run(**SMALL, out=folder, should_stop=lambda c=calls, s=stop_after: next(c) >= s)
        kinfed.run(**SMALL, out=folder, resume=True)
        assert same_results(tmp_path / "whole", folder) == [], stop_after


def test_a_killed_process_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 25, "checkpoint_every": 3, "seeds": (0,), "algorithms": "local,fedavg,ditto"}
    kinfed.run(**settings, out=tmp_path / "whole")
    code = f"import kinfed; kinfed.run(**{settings!r}, out={str(tmp_path / 'cut')!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    journal = tmp_path / "cut" / "rounds.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not journal.exists() or journal.read_bytes().count(b"\n") < 32):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "summary.json").exists(), "it ended before it was killed"
    kinfed.run(**settings, out=tmp_path / "cut", resume=True)
    assert same_results(tmp_path / "whole", tmp_path / "cut") == []


@pytest.mark.parametrize(
    ("every", "seconds", "saved"), [(None, 0.0, [1, 2, 3, 4, 5]), (None, 1e9, [5]), (2, 1e9, [2, 4, 5])]
)
def test_checkpoints_come_as_time_passes_or_by_rounds(
    every: int | None, seconds: float, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    save = Checkpoints.save

    def watched(self: Checkpoints, label: str, round: int, *rest: Any) -> None:
        found.append(round)
        save(self, label, round, *rest)

    monkeypatch.setattr(Checkpoints, "save", watched)
    monkeypatch.setattr("kinfed.runs.method_run.CHECKPOINT_SECONDS", seconds)
    settings = {**SMALL, "algorithms": "local", "rounds": 5, "seeds": (0,), "checkpoint_every": every}
    kinfed.run(**settings, out=tmp_path / "run")
    assert found == saved


def test_a_warm_start_is_shared_and_resumes(tmp_path: Path) -> None:
    settings = {**SMALL, "warm_start": 3, "seeds": (0,)}
    whole = kinfed.run(**settings, out=tmp_path / "whole")
    assert {r["round"] for r in RunFiles(tmp_path / "whole").records()} == {4, 5, 6, 7}
    cold = kinfed.run(**{**settings, "warm_start": 0})
    assert whole.result("ditto").personal["loss"] < cold.result("ditto").personal["loss"]
    calls = iter(range(10**6))
    with pytest.raises(Interrupted):
        kinfed.run(**settings, out=tmp_path / "cut", should_stop=lambda: next(calls) >= 5)
    kinfed.run(**settings, out=tmp_path / "cut", resume=True)
    assert same_results(tmp_path / "whole", tmp_path / "cut") == []


def test_own_data_and_own_model(tmp_path: Path) -> None:
    result = kinfed.run(
        federation=small_federation(),
        model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        algorithms="ditto", rounds=3, seeds=(0,), out=tmp_path / "run",
    )  # fmt: skip
    module = result.personal_model("b").module
    part = small_federation().cohort(torch.tensor([1]), 0, 1).test
    x, y = next(part.in_order())[1].x[0], next(part.in_order())[1].y[0]
    right = (module(x).argmax(1) == y).double().mean()
    assert float(right) == pytest.approx(float(result.result().evaluation.personal.correct[1] / len(y)))
    assert result.personal_model(1).module.state_dict().keys() == module.state_dict().keys()
    assert result.server_model() is not None


def test_other_data_is_another_run(tmp_path: Path) -> None:
    common = {"algorithms": "local", "rounds": 1, "seeds": (0,), "model": "mlr", "out": tmp_path / "run"}
    kinfed.run(federation=small_federation(), **common)
    other = small_federation()
    other.labels = (other.labels + 1) % 3
    with pytest.raises(StorageError):
        kinfed.run(federation=other, resume=True, **common)


def test_the_configuration_of_a_folder_can_be_read_back(tmp_path: Path) -> None:
    result = kinfed.run(**SMALL, out=tmp_path / "run")
    assert read_config(tmp_path / "run") == result.config


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KinfedError):
        kinfed.run(algorithms="ditto", rounds=1, clients=5, out=tmp_path / "run", **{"partition": "nonsense"})
    with pytest.raises(ConfigError):
        kinfed.run(algorithms="cgpfl", rounds=1, clients=3, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: r.result(), "say which algorithm"),
        (lambda r: r.result("fedavg"), "no result"),
        (lambda r: r.personal_model("nobody", "ditto"), "no client is called 'nobody'"),
        (lambda r: r.personal_model(99, "ditto"), "0..4"),
    ],
)
def test_results_say_what_they_have(call, words: str) -> None:
    result = kinfed.run(**{**SMALL, "rounds": 1, "seeds": (0,)})
    with pytest.raises(ConfigError, match=words):
        call(result)


def test_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match="cuda"):
        kinfed.run(algorithms="local", rounds=1, clients=5, device="cuda")


def test_simulate_gives_a_round_iterator_and_no_thread_stays() -> None:
    before = threading.active_count()
    with kinfed.simulate(small_federation(), "mlr", "ditto", participation=0.5, lam=0.1, workers=2) as loop:
        assert [report.round for report in loop.rounds(3)] == [1, 2, 3]
        assert loop.evaluate().personal is not None
    assert threading.active_count() == before


class Notes(NullObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_all_means_what_can_run_here(tmp_path: Path) -> None:
    """On a plain network; the run's record holds what was run, so that it resumes from its folder and from "all"."""
    settings = SMALL | {"algorithms": "all", "rounds": 1, "seeds": (0,), "steps": 1, "lr": 0.5}
    everything = make_config(None, settings)
    heard = Notes()
    experiment = Experiment(everything, observer=heard)
    left_out = experiment.inputs.left_out
    assert {"fedbn", "fedsa_lora", "ffa_lora", "feddpa", "pfedme"} <= set(left_out)  # pFedMe: lr * lam > 1
    assert {"local", "fedavg", "mocha", "scaffold"} <= set(experiment.inputs.algorithms)
    assert "the model has none" in left_out["fedbn"]
    few = ",".join(f"-{name}" for name in experiment.inputs.algorithms if name not in ("local", "fedfomo"))
    result = kinfed.run(**{**settings, "algorithms": f"all,{few}"}, out=tmp_path / "run", observer=heard)
    assert [r.label for r in result.results] == ["local", "fedfomo"]
    assert set(read_config(tmp_path / "run").algorithms) == {"local", "fedfomo"}
    assert any(note.startswith("fedbn is left out: ") for note in heard.notes)
    kinfed.run(**{**settings, "algorithms": f"all,{few}"}, out=tmp_path / "run", resume=True)
    kinfed.run(read_config(tmp_path / "run"), out=tmp_path / "run", resume=True)


def test_what_is_left_out_decides_nothing_about_the_data() -> None:
    """Validation examples are set aside for methods that run."""
    few = ",".join(f"-{name}" for name in ALGORITHMS if name not in ("fedfomo", "local"))
    settings = ON_OWN_DATA | {"algorithms": f"all,{few}"}
    refused = make_config(None, settings, sets=("fedfomo.max_gb=1e-9",))
    left, plain = (
        Experiment(config, small_federation())
        for config in (refused, make_config(None, ON_OWN_DATA | {"algorithms": "local"}))
    )
    assert list(left.inputs.algorithms) == ["local"]
    assert left.inputs.contents() == plain.inputs.contents()
    assert left.inputs.config == plain.inputs.config


def test_named_methods_are_refused_and_all_of_nothing_too() -> None:
    for algorithms in ("fedbn,local", "all,fedbn"):
        with pytest.raises(ConfigError, match="FedBN keeps normalization layers"):
            kinfed.run(**{**SMALL, "algorithms": algorithms}, out="unused")
    few = ",".join(f"-{name}" for name in ALGORITHMS if name != "fedbn")
    with pytest.raises(ConfigError, match="no algorithm can run"):
        kinfed.run(**{**SMALL, "algorithms": f"all,{few}"})


def test_loops_of_other_seeds_leave_the_start_of_a_loop_alone() -> None:
    """Clients' states are made when they are first called: after another seed's loop they still begin at their own."""
    config = make_config(None, {**ON_OWN_DATA, "algorithms": "ditto", "warm_start": 2, "participation": 1.0})
    experiment = Experiment(config, small_federation())

    def trained(between: bool) -> torch.Tensor:
        with experiment.make_loop(experiment.inputs.algorithms["ditto"], 0) as loop:
            if between:
                experiment.make_loop(experiment.inputs.algorithms["ditto"], 1).close()
            loop.round()
            models = loop.evaluate(keep_models=True).models
        assert models is not None
        return models

    assert torch.equal(trained(between=False), trained(between=True))


def test_seeds_whose_columns_differ_are_refused_before_the_first_runs(tmp_path: Path) -> None:
    """A category of one row is a feature where that row trains, and none where it is tested."""
    lines = [f"{'ab'[i % 2]},{i % 7},{'once' if i == 3 else 'often' if i % 3 else 'usual'},{i % 2}" for i in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["site,x,kind,y", *lines]) + "\n")
    settings = {"dataset": str(tmp_path / "table.csv"), "client_column": "site", "label_column": "y", "model": "mlr"}
    shapes = {
        seed: kinfed.Federation.from_table(
            tmp_path / "table.csv", client_column="site", label_column="y", seed=seed
        ).features.shape
        for seed in range(12)
    }
    other = next(seed for seed, shape in shapes.items() if shape != shapes[0])
    with pytest.raises(ConfigError, match=f"with seed {other}: training rows differ"):
        kinfed.run(**settings, algorithms="local", rounds=1, seeds=(0, other), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_says_when_accuracy_is_hardly_more_than_one_class() -> None:
    table = {"site": ["a", "b"] * 50, "age": list(range(50, 70)) * 5, "ill": (["no"] * 9 + ["yes"]) * 10}
    data = kinfed.Federation.from_table(table, client_column="site", label_column="ill", columns="age=number")
    few = {"federation": data, "model": "mlr", "algorithms": "local", "rounds": 1, "seeds": (0,), "participation": 1.0}
    for metric, said in ((None, True), ("auroc", False)):
        heard = Notes()
        kinfed.run(**few, metric=metric, observer=heard)
        assert any("are of class no, and always predicting it" in note for note in heard.notes) == said


def test_the_first_run_on_a_machine_says_that_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Events(NullObserver):
        def note(self, text: str) -> None:
            events.append(text)

        def started(self, label: str, seed: int, first: int, rounds: int) -> None:
            events.append("started")

    def run(compiled: bool, backend: str = "fused") -> None:
        events.clear()
        monkeypatch.setattr(fused_task, "is_compiled", lambda *kernel: compiled)
        settings = {**ON_OWN_DATA, "algorithms": "local", "rounds": 1, "seeds": (0,), "backend": backend}
        kinfed.run(**settings, federation=small_federation(), observer=Events())

    events: list[str] = []
    begun = threading.Event()
    monkeypatch.setattr(fused_task.FusedTask, "compile", lambda task: begun.set())
    run(compiled=False, backend="stacked")
    assert COMPILING not in events
    run(compiled=True)
    assert COMPILING not in events
    assert not begun.is_set()
    run(compiled=False)
    assert events.index(COMPILING) < events.index("started")
    assert events.count(COMPILING) == 1
    assert begun.wait(60)
