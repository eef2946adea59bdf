"""What the report says about private runs, from real ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import kinfed
from kinfed.analysis.comparison import Comparison, Method, compare
from kinfed.records.reader import load_runs
from kinfed.report import build
from kinfed.report.panels.privacy_panel import accuracy_against_epsilon, privacy
from kinfed.testing import tiny_federation, tiny_model

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("privacy")
    common = {
        "federation": tiny_federation((3, 4, 16, 7)), "model": tiny_model, "rounds": 4, "eval_every": 2,
        "seeds": (0, 1), "batch": 5, "steps": 2, "participation": 1.0,
    }  # fmt: skip
    kinfed.run(**common, algorithms="local,fedavg", dp_noise=4.0, out=top / "private")
    kinfed.run(**common, algorithms="fedavg", dp_noise=0.0, out=top / "clipped")
    kinfed.run(**common, algorithms="fedavg", dp_noise=4.0, dp_budget=1.8, dp_delta=1e-3, out=top / "budget")
    kinfed.run(**common, algorithms="fedavg", out=top / "open")
    return {path.name: path for path in top.iterdir()}


def together(*folders: Path) -> Comparison:
    (comparison,) = compare(load_runs(list(folders)))
    return comparison


def method(folder: Path, name: str = "fedavg") -> Method:
    return next(m for m in together(folder).methods if m.algorithm == name)


def test_every_client_has_its_bar(runs: dict[str, Path]) -> None:
    made = privacy(method(runs["private"]))
    assert made is not None
    with (runs["private"] / "clients.csv").open() as file:
        epsilon = [float(row["epsilon"]) for row in csv.DictReader(file) if row["algorithm"] == "fedavg"]
    (figure,) = made.figures
    assert figure.data[0]["y"] == sorted(epsilon, reverse=True)
    assert figure.data[0]["text"][-1] == "client-2, 16 training examples"
    assert (
        f"No client’s ε exceeds {max(epsilon):.3g} at δ = 1e-5 (clipping norm 1, noise 4 times that)" in made.sentence
    )
    assert f"the mean over clients is {sum(epsilon) / len(epsilon):.3g}" in made.sentence
    assert "Not covered by ε: the number of training examples of each client." in made.sentence


def test_what_else_there_is_to_say(runs: dict[str, Path]) -> None:
    local = privacy(method(runs["private"], "local"))
    assert local is not None
    assert "Not covered" not in local.sentence
    clipped = privacy(method(runs["clipped"]))
    assert clipped is not None
    assert "there is no privacy, ε is infinite" in clipped.sentence
    assert clipped.figures == ()
    limited = privacy(method(runs["budget"]))
    assert limited is not None
    assert "2 clients had to stop early to stay within the budget." in limited.sentence
    assert privacy(method(runs["open"])) is None


def test_accuracy_over_epsilon(runs: dict[str, Path]) -> None:
    figure = accuracy_against_epsilon(together(runs["private"], runs["open"], runs["clipped"]))
    assert figure is not None
    lines = [json.loads(line) for line in (runs["private"] / "rounds.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["algorithm"] == "fedavg" and line["seed"] == 0 and line["personal"]]
    drawn = {
        trace["name"]: trace for trace in figure.data if trace["meta"]["view"] == "personal" and "fill" not in trace
    }
    private, free = drawn["FedAvg · private"], drawn["FedAvg · open"]
    assert private["x"] == pytest.approx([line["method"]["privacy"]["epsilon_max"] for line in mine], rel=1e-5)
    assert len(private["y"]) == 2
    assert free["y"][0] == free["y"][1]
    assert free["x"] == pytest.approx([min(private["x"]), max(private["x"])])
    assert drawn["FedAvg · clipped"]["line"]["dash"] == "dot"  # clipping alone has no epsilon to stand over
    assert accuracy_against_epsilon(together(runs["open"], runs["clipped"])) is None


def test_the_page_has_it(runs: dict[str, Path], tmp_path: Path) -> None:
    page = build([runs["private"], runs["budget"]], tmp_path / "report.html").read_text("utf-8")
    assert "What privacy costs" in page
    assert "at δ = 1e-5" in page
    assert "What privacy costs" not in build([runs["open"]], tmp_path / "open.html").read_text("utf-8")
