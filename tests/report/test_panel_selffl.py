"""Self-FL's panel of the report, from a real run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kinfed.analysis.comparison import Method, compare
from kinfed.records.reader import load_runs
from kinfed.report import build
from kinfed.report.panels.selffl_panel import Decision, decisions, in_words
from kinfed.runs.experiment import run
from kinfed.testing import tiny_federation, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("selffl") / "run"
    run(
        federation=tiny_federation(), model=tiny_model, algorithms="fedavg,selffl,selffl_cluster", rounds=8,
        eval_every=2, participation=0.67, seeds=[0, 1], lr=0.1, batch=5, steps=5, out=target,
    )  # fmt: skip
    return target


def method(folder: Path, name: str) -> Method:
    (comparison,) = compare(load_runs([folder]))
    return next(m for m in comparison.methods if m.algorithm == name)


@pytest.mark.parametrize("name", ["selffl", "selffl_cluster"])
def test_the_panel_shows_what_the_clients_recorded(folder: Path, name: str):
    made = decisions(method(folder, name))
    assert made is not None
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    last = [line["method"]["clients"] for line in lines if line["algorithm"] == name and line["round"] == 8]
    raw = [value for clients in last for value in clients["raw_steps"] if value >= 0]
    weights = [value for clients in last for value in clients["weight_of_others"] if value >= 0]
    histogram, trajectory, gain = made.figures
    assert sum(histogram.data[0]["y"]) == len(raw) > 0
    assert trajectory.data[1]["x"][-1] == 8
    assert gain.data[0]["y"] == pytest.approx(sorted((1 / (1 - w) for w in weights), reverse=True), rel=1e-5)
    assert gain.data[0]["text"][0].startswith("client-")
    assert f"of {len(raw)} clients learn mostly from all" in made.sentence


def test_only_methods_that_decide_have_it(folder: Path):
    assert decisions(method(folder, "fedavg")) is None


def test_the_page_has_it(folder: Path, tmp_path: Path):
    page = build([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Who learns alone, who from all" in page


@pytest.mark.parametrize(
    ("weight", "raw", "steps", "says"),
    [
        (0.95, 3.4, 3, "ada learns almost entirely from all: its models vary by 0.25 from round to round, so the "
                       "others are given a weight of 95 % and it trains 3 steps (the rule asks for 3.4)."),
        (0.6, 0.2, 1, "learns mostly from all"),
        (0.6, 0.2, 1, "trains 1 step (the rule asks for 0.2)"),
        (0.3, 70.0, 40, "learns mostly alone"),
        (0.05, 70.0, 40, "learns almost entirely alone"),
        (-1.0, -1.0, 5, "does not know its uncertainty yet and trains as in FedAvg, 5 steps a round"),
        (-1.0, -1.0, 0, "has not taken part yet and uses the model for all"),
    ],
)  # fmt: skip
def test_a_sentence_for_every_client(weight: float, raw: float, steps: int, says: str):
    assert says in in_words(Decision("ada", 0, 0.25, weight, raw, steps))


def test_believed_gain():
    assert Decision("ada", 0, 1.0, 0.75, 1.0, 1).gain == 4.0
    assert Decision("ada", 0, 1.0, 1.0, 1.0, 1).gain == math.inf
