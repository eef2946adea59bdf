"""Kin's panel of the report, from a real run, and its sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy.special import stdtrit

import kinfed
from kinfed.analysis.comparison import Method, compare
from kinfed.analysis.statistics import Interval
from kinfed.errors import ConfigError
from kinfed.records.reader import load_runs
from kinfed.report import build
from kinfed.report.panels.shares_panel import ClientShares, in_short, shares, shares_in_short
from kinfed.report.sentences import findings
from kinfed.runs.experiment import run
from kinfed.testing import tiny_federation, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kin") / "run"
    run(
        federation=tiny_federation(), model=tiny_model, algorithms="local,kin", rounds=4, seeds=[0, 1], lr=0.1,
        batch=5, steps=5, out=target,
    )  # fmt: skip
    return target


def method(folder: Path, name: str) -> Method:
    (comparison,) = compare(load_runs([folder]))
    return next(m for m in comparison.methods if m.algorithm == name)


def test_the_panel_shows_what_the_clients_measured(folder: Path, tmp_path: Path) -> None:
    panel = shares(method(folder, "kin"))
    assert panel is not None
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    last = next(x["method"]["clients"] for x in lines if (x["algorithm"], x["seed"], x["round"]) == ("kin", 0, 4))
    alone, together, adapted = (layer["y"] for layer in panel.figures[0].data)
    assert alone == pytest.approx(sorted(last["alone"]), abs=1e-5)
    assert [sum(values) for values in zip(alone, together, adapted, strict=True)] == pytest.approx(
        [1.0] * len(alone), abs=1e-5
    )
    assert "No groups proved better" in panel.sentence
    assert "Shown is seed 0" in panel.sentence
    assert "against training alone" in panel.sentence
    page = build([folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Alone, together, or with one’s kin" in page


def test_the_page_begins_with_what_was_found(folder: Path) -> None:
    (comparison,) = compare(load_runs([folder]))
    alone = [answer.alone for seed in (0, 1) for answer in kinfed.load(folder).answers(seed=seed)]
    share = round(100 * sum(alone) / len(alone))
    assert findings(comparison)[-1] == (
        "Kin found no groups of clients that are alike: in the mean, a client learns "
        f"{100 - share} % from all and {share} % alone."
    )


def test_groups_that_some_seeds_have_are_said_to_be_of_some() -> None:
    grouped = {seed: [ClientShares("a", 0.1, 0.5, 0.4, 5 if seed else 0)] for seed in (0, 1)}
    assert shares_in_short("Kin", grouped) == (
        "Kin found groups of clients that are alike with 1 of 2 seeds: in the mean, a client learns 90 % from all or "
        "from its group and 10 % alone."
    )


def test_other_methods_have_none(folder: Path) -> None:
    assert shares(method(folder, "local")) is None
    assert in_short(method(folder, "local")) is None


def test_a_result_gives_the_answers_by_method_and_seed(folder: Path) -> None:
    result = kinfed.load(folder)
    answers = result.answers()
    assert [answer.client for answer in answers] == list(result.describe(0).names)
    assert result.answers("kin", 0) == answers != result.answers(seed=1)
    of_local, of_kin = (method(folder, name).trials[0].clients[2].values for name in ("local", "kin"))
    gain = 100 * (of_kin["personal_accuracy"] - of_local["personal_accuracy"])
    assert answers[2].gain is not None
    assert answers[2].gain.mean == pytest.approx(gain)
    reach = 100 * stdtrit(answers[2].gain.n - 1, 0.975) * of_kin["personal_error_of_gain"]
    assert answers[2].gain.high - answers[2].gain.mean == pytest.approx(reach)
    with pytest.raises(ConfigError, match="no shares of clients by local"):
        result.answers("local")
    with pytest.raises(ConfigError, match="seed 7"):
        result.answers(seed=7)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            ClientShares("site a", 0.3, 0.08, 0.62, 5, Interval(3.1, -0.5, 6.7, 90)),
            "site a learns 70 % from its group of 5 (8 % as it is, 62 % adapted to its own examples), 30 % alone; "
            "expected gain over alone +3.1 points [−0.5, +6.7].",
        ),
        (ClientShares("b", 1.0, 0.0, 0.0, 0), "b learns 100 % alone."),
        (ClientShares("c", 0.4, 0.6, 0.0, 0), "c learns 60 % from all, 40 % alone."),
        (ClientShares("d", 0.0, 0.0, 1.0, 0), "d learns 100 % from all, adapted to its own examples."),
    ],
)
def test_in_words(answer: ClientShares, says: str) -> None:
    assert str(answer) == says


def test_who_is_helped_and_who_is_hurt_is_said_beyond_chance_only() -> None:
    assert ClientShares("a", 0, 1, 0, 0, Interval(0.1, 0.02, 0.18, 9)).is_helped
    assert not ClientShares("a", 0, 1, 0, 0, Interval(0.1, -0.02, 0.22, 9)).is_helped
    assert ClientShares("a", 0, 1, 0, 0, Interval(-0.1, -0.18, -0.02, 9)).is_hurt
    assert not ClientShares("a", 0, 1, 0, 0).is_hurt
