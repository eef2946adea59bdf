"""Clients that took part in no round: what they deploy, and which figures they are in."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import kinfed as command
from torch import Tensor

import kinfed
from kinfed.records.compare import same_results
from kinfed.records.run_files import RunFiles
from kinfed.report import build
from kinfed.runs.method_run import Interrupted
from kinfed.runs.observer import NullObserver
from kinfed.server.schedule import Schedule
from kinfed.serving.export import export_model
from kinfed.testing import Bench

RARE: dict[str, Any] = {
    "algorithms": "local,ditto,fedavg", "rounds": 3, "seeds": (0,), "clients": 8, "model": "mlr", "participation": 0.25,
    "eval_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "rare"
    kinfed.run(**RARE, out=path)
    return path


def outsiders(folder: Path) -> list[str]:
    with (folder / "clients.csv").open() as file:
        return [r["client"] for r in csv.DictReader(file) if r["algorithm"] == "ditto" and r["took_part"] == "0"]


def test_the_figures_are_of_clients_that_took_part_and_of_all(folder: Path) -> None:
    with (folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    for result in json.loads((folder / "summary.json").read_text())["results"]:
        mine = [r for r in rows if r["algorithm"] == result["algorithm"]]
        took_part = [r for r in mine if r["took_part"] == "1"]
        assert (result["took_part"], result["clients"]) == (len(took_part), 8)
        assert 0 < len(took_part) < 8
        for figures, some in ((result, took_part), (result["all_clients"], mine)):
            examples = sum(int(r["n_test"]) for r in some)
            by_hand = sum(float(r["personal_accuracy"]) * int(r["n_test"]) for r in some) / examples
            assert figures["personal"]["accuracy"] == pytest.approx(by_hand, abs=1e-12)
    last = RunFiles(folder).records()[-1]
    assert last["took_part"] == len(took_part)
    assert last["all_clients"]["personal"] == pytest.approx(result["all_clients"]["personal"])


def test_without_training_of_its_own_a_client_has_the_servers_model(folder: Path, tmp_path: Path) -> None:
    files = RunFiles(folder)
    names = files.description(0).names
    who = names.index(outsiders(folder)[0])
    for label in ("ditto", "fedavg"):
        models = files.models(label, 0)
        assert models.server_model is not None
        assert not bool(models.took_part[who])
        assert torch.equal(models.personal[who], models.server_model)
        summary = export_model(folder, names[who], label, 0, tmp_path / "model.safetensors").summary
        assert summary.endswith("the client took part in no round: this is the server's model")
    summary = export_model(folder, names[who], "local", 0, tmp_path / "model.safetensors").summary
    assert summary.endswith("took part in no round, so nothing of its own is in this model")
    other = next(name for name in names if name not in outsiders(folder))
    assert "took part" not in export_model(folder, other, "ditto", 0, tmp_path / "model.safetensors").summary


def test_a_resumed_run_knows_who_took_part(folder: Path, tmp_path: Path) -> None:
    stops = iter([False, True])
    with pytest.raises(Interrupted):
        kinfed.run(**RARE, out=tmp_path / "run", should_stop=lambda: next(stops))
    kinfed.run(**RARE, out=tmp_path / "run", resume=True)
    assert same_results(folder, tmp_path / "run") == []


@pytest.mark.parametrize("finetune", [0, 2])
def test_who_did_not_train_is_replaced_before_fine_tuning(finetune: int) -> None:
    """A newcomer of a fine-tuned method fine-tunes the server's model."""
    with Bench("ditto", options={"finetune": finetune}).loop(Schedule(0.34)) as loop:
        loop.round()
        evaluation = loop.evaluate(keep_models=True)
        assert evaluation.took_part is not None
        assert evaluation.models is not None
        outside = int((~evaluation.took_part).nonzero()[0])
        models = loop.algorithm.server_models(loop.server)
        assert models is not None
        start: Tensor = models.models[0]
        assert torch.equal(evaluation.models[outside], start) == (finetune == 0)
        assert float((evaluation.models[outside] - start).norm()) < 1.0


def test_the_terminal_and_the_page_tell_how_many_took_part(folder: Path, tmp_path: Path) -> None:
    count = 8 - len(outsiders(folder))
    page = re.sub(r"\s+", " ", build([folder], tmp_path / "page.html").read_text())
    assert f"{8 - count} of 8 clients took part in no round; all figures are of the clients that did." in page
    assert "Why, and what all clients together give" in page
    assert f"{count} of 8" in page
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in RARE.items() if name != "seeds"]
    done = command("run", *arguments, "--seeds", "0", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert f"last round, test data of the {count} of 8 clients that took part" in text
    assert "clients that took part in no round are not counted" in text
    assert "calls a client 0.75 times on average, and about 3 of 8 never" in text


class Notes(NullObserver):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_few_calls_are_noted_and_many_are_not() -> None:
    for settings, noted in ((RARE, True), (RARE | {"participation": 1.0, "rounds": 5}, False)):
        notes = Notes()
        kinfed.run(**settings, observer=notes)
        assert any("times on average" in text for text in notes.texts) == noted


def test_calls_by_poisson_sampling_are_counted_by_the_rate_and_not_by_one_client_a_round() -> None:
    """A client is called with probability 0.001 in each of 5 rounds, though a round of fixed size calls one of 8."""
    notes = Notes()
    kinfed.run(**RARE | {"participation": 0.001, "rounds": 5, "sampling": "poisson"}, observer=notes)
    assert any("calls a client 0.005 times on average, and about 8 of 8 never" in text for text in notes.texts)


def test_a_diverged_run_is_called_so(tmp_path: Path) -> None:
    fast = ("run", "--rounds", "3", "--clients", "4", "--seeds", "0", "--model", "mlr")
    done = command(*fast, "--algorithms", "fedavg,local", "--lr", "1e6", "--out", "run", cwd=tmp_path)
    assert "fedavg seed 0 has diverged" in done.stdout
    assert "fedavg (diverged)" in done.stdout
    assert all(r["diverged"] for r in json.loads((tmp_path / "run" / "summary.json").read_text())["results"])
    assert "FedAvg has diverged: losses or updates are not finite" in (tmp_path / "run" / "report.html").read_text()
    calm = command(*fast, "--algorithms", "fedavg", "--out", "calm", cwd=tmp_path)
    assert "diverged" not in calm.stdout + (tmp_path / "calm" / "report.html").read_text()
