"""A fixed sample of clients is evaluated: what the run folder and the page then hold, and what stays as it was."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import kinfed
from kinfed.errors import ConfigError
from kinfed.records.run_files import RunFiles
from kinfed.report import build
from kinfed.runs import run_checks
from kinfed.serving.export import export_model

SETTINGS = {"rounds": 3, "seeds": (0,), "clients": 12, "model": "mlr", "participation": 0.25, "steps": 3}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[kinfed.RunResult, Path]:
    folder = tmp_path_factory.mktemp("sampled") / "run"
    return kinfed.run(algorithms="fedavg,ditto,ifca", **SETTINGS, eval_clients=4, out=folder), folder


def test_the_folder_holds_the_sample_and_says_so(sampled: tuple[kinfed.RunResult, Path]) -> None:
    result, folder = sampled
    ids = result.result("ditto").evaluation.ids
    names = [result.federations[0].names[k] for k in ids.tolist()]
    assert len(ids) == 4
    assert result.result("fedavg").evaluation.ids.tolist() == ids.tolist()
    with (folder / "clients.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["client"] for line in lines] == 3 * names
    assert {line["took_part"] for line in lines} == {"1"}
    summary = json.loads((folder / "summary.json").read_text())["results"][0]
    assert (summary["clients"], summary["evaluated"]) == (12, 4)
    description = RunFiles(folder).description(0)
    assert (description.num_clients, description.names, description.listed) == (12, names, ids.tolist())
    assert "sample of 4 of 12 clients" in description.notes[-1]
    assert RunFiles(folder).models("ditto", 0).personal.shape[0] == 4
    journal = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(journal) if line["algorithm"] == "ifca")
    assert len(last["method"]["assignment"]) == 4


def test_the_page_says_whom_it_is_of(sampled: tuple[kinfed.RunResult, Path], tmp_path: Path) -> None:
    page = build([sampled[1]], tmp_path / "page.html").read_text()
    assert "In a sample of 4 of 12 clients" in page
    assert "cover a fixed sample of 4 of 12 clients" in page


def test_training_is_that_of_a_run_without_a_sample(sampled: tuple[kinfed.RunResult, Path]) -> None:
    everyone = kinfed.run(algorithms="fedavg,ditto,ifca", **SETTINGS)
    for label in ("fedavg", "ditto"):
        ours, theirs = sampled[0].result(label), everyone.result(label)
        assert ours.server_model is not None
        assert theirs.server_model is not None
        assert torch.equal(ours.server_model, theirs.server_model)
        assert ours.evaluation.models is not None
        assert theirs.evaluation.models is not None
        # Sizes of chunks, and with them roundings, are those of the clients that are evaluated together.
        torch.testing.assert_close(ours.evaluation.models, theirs.evaluation.models[ours.evaluation.ids])


def test_models_are_those_of_the_sample(sampled: tuple[kinfed.RunResult, Path], tmp_path: Path) -> None:
    result, folder = sampled
    ids = result.result("ditto").evaluation.ids.tolist()
    name = result.federations[0].names[ids[2]]
    row = RunFiles(folder).models("ditto", 0).personal[2]
    weights = torch.cat([p.detach().reshape(-1) for p in result.personal_model(name, "ditto").module.parameters()])
    assert torch.equal(weights, row)
    assert export_model(folder, name, "ditto", out=tmp_path / "model.safetensors").path.exists()
    other = next(k for k in range(12) if k not in ids)
    with pytest.raises(ConfigError, match="not among those that this run evaluated"):
        result.personal_model(other, "ditto")
    with pytest.raises(ConfigError, match="no client is called"):
        export_model(folder, result.federations[0].names[other], "ditto")


def test_states_that_are_only_deployed_are_kept_for_the_sample_alone(sampled: tuple[kinfed.RunResult, Path]) -> None:
    files = RunFiles(sampled[1])
    ids = set(sampled[0].result("fedavg").evaluation.ids.tolist())
    assert set(files.final_state("fedavg-0", 3)["clients.ids"].tolist()) == ids
    assert set(files.final_state("ditto-0", 3)["clients.ids"].tolist()) > ids


def test_models_that_do_not_fit_the_machine_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = SETTINGS | {"model": "mlp"}  # larger than all outputs for the test rows
    monkeypatch.setattr(run_checks, "physical_memory", lambda: 4 * 9_610 * 5)  # five models of digits
    kinfed.run(algorithms="local", **settings, eval_clients=5, out=tmp_path / "five")
    with pytest.raises(ConfigError, match=r"personal models of 12 clients take .*--eval-clients"):
        kinfed.run(algorithms="local", **settings, out=tmp_path / "all")
    assert not (tmp_path / "all").exists()
