"""FedDyn: the paper's recursion number by number, its first round, its invariant and its limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import LR, TWO_STEPS, by_hand, close, models, run, server, state, two_bowls
from torch import nn

from kinfed.algorithms.feddyn import FedDyn
from kinfed.algorithms.fedprox import FedProx
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError

WORK = LocalTraining(batch=3, steps=None, epochs=2, lr=LR, lr_decay=0.8)  # unequal steps, another rate every round
EXACT = replace(TWO_STEPS, steps=200)  # local problems solved to the last digits


def both(loop: object, name: str) -> list[float]:
    return [float(state(loop, m, name)) for m in range(2)]  # type: ignore[arg-type]


def test_exact_solves_by_hand() -> None:
    with two_bowls(FedDyn(EXACT, alpha=1.0)) as loop:
        loop.round()
        assert both(loop, "theta") == pytest.approx([0.5, 3.25])
        assert both(loop, "g") == pytest.approx([0.5, -2.25])  # the gradients θ and 3 (θ − 4) there
        assert float(server(loop, "h")) == pytest.approx(-0.875)
        assert float(server(loop)) == pytest.approx(2.75)
        loop.round()
        assert both(loop, "theta") == pytest.approx([1.625, 3.125])
        assert float(server(loop)) == pytest.approx(2.875)
        loop.round()
        assert float(server(loop)) == pytest.approx(2.9375)


def test_two_steps_by_hand_and_the_limit() -> None:
    with two_bowls(FedDyn(TWO_STEPS, alpha=1.0)) as loop:
        loop.round()
        assert both(loop, "theta") == pytest.approx([0.82, 2.44])
        assert float(server(loop, "h")) == pytest.approx(-0.63)
        assert float(server(loop)) == pytest.approx(2.26)
        assert float(server(loop, "mean")) == pytest.approx(1.63)
        loop.round()
        assert both(loop, "theta") == pytest.approx([1.8856, 2.8648])
        assert float(server(loop)) == pytest.approx(3.1204)
        for _ in range(150):
            loop.round()
        assert [float(server(loop)), float(server(loop, "mean")), *both(loop, "theta")] == pytest.approx([3.0] * 4)


def test_the_first_local_training_is_fedprox() -> None:
    ours, theirs = run(FedDyn(WORK, alpha=0.3), 1), run(FedProx(WORK, mu=0.3, weights="equal"), 1)
    assert torch.equal(ours["clients.rows.theta"], theirs["clients.rows.theta"])
    assert torch.equal(ours["server.mean"], theirs["server.w"])


def test_the_first_server_step_is_twice_the_mean_update() -> None:
    with by_hand(FedDyn(WORK)) as loop:
        start = server(loop)
        loop.round()
        close(server(loop) - start, 2 * (server(loop, "mean") - start))


def test_the_server_follows_the_mean_of_all_gradients() -> None:
    with by_hand(FedDyn(WORK), sizes=(2, 6, 4, 9), participation=0.5) as loop:
        for _ in range(6):
            loop.round()
            close(server(loop, "h"), loop.pool.clients.take(torch.arange(4)).named()["g"].mean(0))


def test_the_servers_model_is_the_mean_or_what_is_sent() -> None:
    for choice, name in (("mean", "mean"), ("sent", "w")):
        with by_hand(FedDyn(WORK, server_model=choice)) as loop:
            loop.round()
            shown = loop.algorithm.server_models(loop.server)
            assert torch.equal(shown.models[0], server(loop, name))
            for m in range(3):
                assert torch.equal(models(loop)[m], state(loop, m, "theta"))


def test_statistics_are_averaged() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))

    with by_hand(FedDyn(WORK), model=model) as loop:
        for _ in range(3):
            loop.round()
        behind = slice(loop.task.trainable.stop, None)
        assert server(loop)[behind].numel() == 8
        assert torch.equal(server(loop)[behind], server(loop, "mean")[behind])
        close(server(loop)[behind], torch.stack([state(loop, m, "theta")[behind] for m in range(3)]).mean(0))


def test_bytes_and_refusals() -> None:
    with by_hand(FedDyn(WORK)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)
    with pytest.raises(ConfigError, match="alpha"):
        FedDyn(alpha=0.0)
    with pytest.raises(ConfigError, match="unstable"):
        FedDyn(LocalTraining(lr=0.5), alpha=4.0)
