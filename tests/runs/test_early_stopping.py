"""Rounds where clients and the server would have stopped: by hand, by validation rows alone, in records, resumed."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kinfed
from kinfed.algorithms import ServerModels
from kinfed.core import rng
from kinfed.data import Features, Problem, Ragged
from kinfed.engine import METRICS, Score
from kinfed.errors import ConfigError
from kinfed.pools import Evaluation
from kinfed.runs.early_stopping import EarlyStopping
from kinfed.runs.method_run import Interrupted

SETTINGS: dict[str, Any] = {
    "algorithms": "fedavg,ditto", "model": "mlr", "rounds": 12, "lr": 0.5, "seeds": (0,), "eval_every": 2,
    "early_stopping": 2,
}  # fmt: skip


def sites() -> kinfed.Federation:
    """Four clients with ten to thirty training rows, eight of validation, ten of test; a fifth of labels is noise."""
    sizes, count = (20, 10, 16, 30), 4 * 48
    x = rng.normal(rng.root(7, "sites"), count * 4).reshape(count, 4).to(torch.float32)
    rows, flip = torch.arange(count), rng.uniform(rng.root(8, "noise"), count) < 0.2
    owner, place = rows % 4, rows // 4
    y = (((x[:, 0] + owner * x[:, 1]) > 0) ^ flip).long()
    train = place < torch.tensor(sizes)[owner]
    val, test = (place >= 30) & (place < 38), place >= 38
    parts = {
        name: Ragged.grouped(rows[mask], owner[mask], 4)
        for name, mask in (("train", train), ("val", val), ("test", test))
    }
    return kinfed.Federation(Features(x), y, Problem.of_classes(2), **parts, names=list("abcd"))


def judged(rights: list[float], losses: list[float], counts: list[int]) -> Score:
    count = torch.tensor(counts)
    right = torch.tensor(rights, dtype=torch.float64)
    sums = {"accuracy": torch.stack([right, count.double()], 1)}
    return Score(right, torch.tensor(losses, dtype=torch.float64), count, sums)


def evaluation(score: Score, server: Score | None = None, models: Tensor | None = None) -> Evaluation:
    return Evaluation(torch.arange(len(score.count)), score, server, models=models)


def test_rounds_by_hand() -> None:
    """Three clients with ten validation rows and one with none, patience 2. The first is best after round 2 and stops,
    so that its later best does not count; the second ties in accuracy and has the lower loss after round 4; the third
    gets better all the time. The server's hits are 12, 15, 15 at a higher loss, 14, and 29 when it has stopped."""
    stopping = EarlyStopping(2, METRICS.named("accuracy"), keeps_models=True)
    hits = [(5, 6, 1), (7, 6, 2), (6, 6, 3), (7, 5, 4), (10, 6, 5)]
    losses = [(5, 9, 9), (4, 8, 8), (4, 8, 7), (5, 9, 6), (1, 1, 5)]
    for round, (right, loss, whole) in enumerate(zip(hits, losses, [12, 15, 15, 14, 29], strict=True), 1):
        own = judged([*map(float, right), 0.0], [*map(float, loss), 0.0], [10, 10, 10, 0])
        server = judged([float(whole), 0, 0, 0], [10.0 + round, 0, 0, 0], [10, 10, 10, 0])
        test = judged([float(round)] * 4, [1.0] * 4, [20] * 4)
        models = torch.full((4, 3), float(round))
        kept = ServerModels(torch.full((1, 3), float(round)))
        stopping.look(round, evaluation(own, server), evaluation(test, test, models), kept)
    assert stopping.clients is not None
    assert stopping.server is not None
    assert stopping.clients.round.tolist() == [2, 2, 5, 5]
    assert stopping.server.round.unique().tolist() == [2]
    assert stopping.figures() == {"clients": 2, "server_round": 2}
    assert not stopping.all_stopped
    result = stopping.applied(evaluation(test, test, models))
    assert result.models is not None
    assert result.personal is not None
    assert result.server_model is not None
    assert result.models[:, 0].tolist() == [2, 2, 5, 5]
    assert result.personal.correct.tolist() == [2, 2, 5, 5]
    assert result.server_model.correct.tolist() == [2] * 4
    assert result.alternatives["last_round"].correct.tolist() == [5] * 4
    assert stopping.server_models is not None
    assert stopping.server_models.models[0, 0] == 2
    again = EarlyStopping(2, METRICS.named("accuracy"), keeps_models=True)
    again.load(stopping.tensors(), stopping.names)
    assert again.tensors().keys() == stopping.tensors().keys()
    assert again.applied(evaluation(test, test, models)).personal.sums["accuracy"].tolist() == (  # type: ignore
        result.personal.sums["accuracy"].tolist()
    )


@pytest.mark.parametrize(
    ("losses", "round"), [((5.0, 4.0, math.nan, math.nan), 2), ((math.nan, 5.0, math.nan, 6.0), 2)]
)
def test_a_model_that_has_diverged_is_nobodys_best(losses: tuple[float, ...], round: int) -> None:
    stopping = EarlyStopping(9, METRICS.named("accuracy"))
    for number, loss in enumerate(losses, 1):
        score = judged([3.0, 0.0], [loss, 0.0], [10, 0])
        stopping.look(number, evaluation(score, score), evaluation(score, score), None)
    assert stopping.clients is not None
    assert stopping.server is not None
    assert stopping.clients.round.tolist() == [round, 4]
    assert stopping.server.round[0] == round


def test_of_a_metric_that_should_be_small_the_smallest_is_best() -> None:
    stopping = EarlyStopping(1, METRICS.named("log_loss"))
    for round, loss in enumerate([3.0, 2.0, 4.0], 1):
        count = torch.tensor([10])
        score = Score(torch.zeros(1), torch.tensor([loss]), count, {"log_loss": torch.tensor([[loss, 10.0]])})
        stopping.look(round, evaluation(score), evaluation(score), None)
    assert stopping.clients is not None
    assert stopping.clients.round.tolist() == [2]
    assert stopping.all_stopped


def test_the_last_round_stays_what_it_is_and_records_have_the_others(tmp_path: Path) -> None:
    data = sites()
    plain = kinfed.run(federation=data, **SETTINGS | {"early_stopping": 0})
    ours = kinfed.run(federation=data, out=tmp_path / "run", **SETTINGS)
    for label in ("fedavg", "ditto"):
        one, other = ours.result(label), plain.result(label)
        assert one.personal == other.personal
        assert torch.equal(one.evaluation.models, other.evaluation.models)  # type: ignore[arg-type]
        assert one.stopped is not None
        assert set(one.stopped.tolist()) <= {2, 4, 6, 8, 10, 12}
        assert one.stopped.unique().numel() > 1
        assert {"early_stopped", "server_early_stopped"} <= one.alternatives.keys()
        with (tmp_path / "run" / "clients.csv").open() as file:
            cells = [line["stopped_at"] for line in csv.DictReader(file) if line["algorithm"] == label]
        assert cells == [str(round) for round in one.stopped.tolist()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["results"]
    assert [entry["server_stopped"] for entry in summary] == [one.server_stopped for one in ours.results]


def test_test_rows_have_no_say() -> None:
    data = sites()
    turned = replace(data, labels=data.labels.clone())
    turned.labels[data.test.rows] = 1 - data.labels[data.test.rows]
    ours, theirs = (kinfed.run(federation=one, **SETTINGS).result("ditto") for one in (data, turned))
    assert ours.personal != theirs.personal
    assert torch.equal(ours.stopped, theirs.stopped)  # type: ignore[arg-type]
    assert ours.server_stopped == theirs.server_stopped


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(kept: bool, tmp_path: Path) -> None:
    data, settings = sites(), SETTINGS | {"stopped_models": kept, "algorithms": "ditto"}
    whole = kinfed.run(federation=data, **settings).result()
    calls = itertools.count(1)
    with pytest.raises(Interrupted):
        kinfed.run(federation=data, out=tmp_path / "run", should_stop=lambda: next(calls) == 5, **settings)
    again = kinfed.run(federation=data, out=tmp_path / "run", resume=True, **settings).result()
    assert again.personal == whole.personal
    assert again.alternatives == whole.alternatives
    assert torch.equal(again.stopped, whole.stopped)  # type: ignore[arg-type]
    assert torch.equal(again.evaluation.models, whole.evaluation.models)  # type: ignore[arg-type]


def test_models_of_the_rounds_where_all_stopped() -> None:
    data = sites()
    settings = SETTINGS | {"algorithms": "fedavg", "rounds": 60}
    last, ours = (kinfed.run(federation=data, **settings, stopped_models=kept).result() for kept in (False, True))
    assert ours.rounds < last.rounds == 60
    assert torch.equal(ours.stopped, last.stopped)  # type: ignore[arg-type]
    assert ours.personal["accuracy"] == last.alternatives["early_stopped"]["accuracy"]
    rounds = int(ours.stopped[0])  # type: ignore[index]
    then = kinfed.run(federation=data, **settings | {"rounds": rounds, "early_stopping": 0}).result()
    assert torch.equal(ours.evaluation.models[0], then.evaluation.models[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_every": 0}, "set eval_every"),
        ({"early_stopping": 0, "stopped_models": True}, "set early_stopping, to 5"),
        ({"stopped_models": True, "save_models": False}, "set save_models"),
        ({"stopped_models": True, "dp_noise": 1.0}, "chosen by rows that epsilon does not cover"),
        ({"folds": 2}, "stop at rounds of their own"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kinfed.run(federation=sites(), **SETTINGS | changes)


def test_without_validation_rows_there_is_nothing_to_stop_by() -> None:
    with pytest.raises(ConfigError, match=r"set validation, to 0\.2"):
        kinfed.run(dataset="digits", clients=4, validation=0.0, **SETTINGS)
