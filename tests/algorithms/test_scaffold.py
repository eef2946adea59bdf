"""SCAFFOLD: the paper's recursion number by number, its limits, and the optimum that FedAvg misses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import LR, TWO_STEPS, by_hand, close, run, server, state, two_bowls
from torch import nn

from kinfed.algorithms.base import check_algorithm_settings
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.scaffold import Scaffold
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError

WORK = LocalTraining(batch=3, steps=None, epochs=2, lr=LR, lr_decay=0.8)  # unequal steps, another rate every round


def test_two_quadratics_by_hand() -> None:
    with two_bowls(Scaffold(TWO_STEPS)) as loop:
        loop.round()
        assert float(server(loop)) == pytest.approx(1.67, abs=1e-6)  # FedAvg's: θ = (0.81, 2.53)
        assert [float(state(loop, m, "c")) for m in range(2)] == pytest.approx([0.95, -7.65], abs=1e-6)
        assert float(server(loop, "c")) == pytest.approx(-3.35, abs=1e-6)
        loop.round()
        assert [float(state(loop, m, "y")) for m in range(2)] == pytest.approx([2.1697, 2.1273], abs=1e-6)
        assert float(server(loop)) == pytest.approx(2.1485, abs=1e-6)
        assert float(server(loop, "c")) == pytest.approx(-2.3925, abs=1e-6)
        loop.round()
        assert float(server(loop)) == pytest.approx(2.458465, abs=1e-6)


def test_the_limit_is_the_minimum_of_the_mean() -> None:
    """Of θ²/2 and 3 (θ − 4)²/2 that is 3, where gradients are 3 and −3; FedAvg with two steps stops at 2.914."""
    with two_bowls(Scaffold(TWO_STEPS)) as loop, two_bowls(FedAvg(TWO_STEPS, weights="equal")) as plain:
        for _ in range(150):
            loop.round()
            plain.round()
        assert float(server(loop)) == pytest.approx(3, abs=1e-6)
        assert float(server(loop, "c")) == pytest.approx(0, abs=1e-5)
        assert [float(state(loop, m, "c")) for m in range(2)] == pytest.approx([3, -3], abs=1e-5)
        assert float(server(plain)) == pytest.approx(2.9142857, abs=1e-6)


def test_the_first_round_is_fedavg() -> None:
    ours, theirs = run(Scaffold(WORK), 1), run(FedAvg(WORK, weights="equal"), 1)
    assert torch.equal(ours["server.w"], theirs["server.w"])
    assert torch.equal(ours["clients.rows.y"], theirs["clients.rows.theta"])
    assert torch.equal(ours["personal models"], theirs["personal models"])


def test_one_client_alone_is_fedavg() -> None:
    with by_hand(Scaffold(WORK), sizes=(7,)) as loop, by_hand(FedAvg(WORK), sizes=(7,)) as plain:
        for _ in range(4):
            loop.round()
            plain.round()
        close(server(loop), server(plain))


def test_the_server_follows_the_mean_of_all_control_variates() -> None:
    """Whoever takes part, with unequal steps and a rate that decays. The server divides by all clients."""
    with by_hand(Scaffold(WORK), sizes=(2, 6, 4, 9), participation=0.5) as loop:
        for _ in range(6):
            loop.round()
            seen = loop.pool.clients.take(torch.arange(4)).named()["c"]
            close(server(loop, "c"), seen.mean(0), 1e-5)


def test_statistics_have_no_control_variate_and_no_longer_step() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))

    with by_hand(Scaffold(WORK, server_lr=1.4), model=model) as loop:
        for _ in range(4):
            loop.round()
        trainable = loop.task.trainable.stop
        assert server(loop, "c").shape == (trainable,)
        variance = next(slot for slot in loop.task.slots if slot.name.endswith("running_var"))
        assert bool((server(loop)[variance.start : variance.stop] > 0).all())


def test_a_reply_is_half_of_the_papers() -> None:
    with by_hand(Scaffold(WORK)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 2 * 15 * 4, 3 * (15 + 1) * 4)


def test_momentum_is_refused_and_weight_decay_is_not() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        check_algorithm_settings(
            Scaffold(replace(WORK, momentum=0.9)), make_task(lambda: nn.Linear(4, 3)), Population(3, 0)
        )
    with two_bowls(Scaffold(replace(TWO_STEPS, weight_decay=1.0))) as loop:
        for _ in range(150):
            loop.round()
        assert float(server(loop)) == pytest.approx(2, abs=1e-6)  # θ + 3 (θ − 4) + 2 θ = 0


def test_epochs_tell_how_much_data_a_client_has() -> None:
    assert Scaffold(WORK).privacy(torch.tensor([4])).uncovered
    assert not Scaffold(TWO_STEPS).privacy(torch.tensor([4])).uncovered
