"""MR-MTL: rounds by hand, its fixed point, local training at λ = 0, and its kinship with mocha_deep."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_bench import TWO_STEPS, WORKS, by_hand, close, run, server, state, two_bowls
from torch import nn

from kinfed.algorithms.local import Local
from kinfed.algorithms.mocha_deep import MochaDeep
from kinfed.algorithms.mrmtl import MRMTL
from kinfed.data.examples.batches import LocalTraining
from kinfed.errors import ConfigError


def test_two_quadratics_by_hand() -> None:
    with two_bowls(MRMTL(TWO_STEPS, lam=1.0)) as loop:
        for theta, w in (([0.82, 2.44], 1.63), ([0.8182, 3.0592], 1.9387)):
            loop.round()
            assert [float(state(loop, m, "theta")) for m in range(2)] == pytest.approx(theta)
            assert float(server(loop)) == pytest.approx(w)


def test_the_fixed_point_solves_the_joint_problem() -> None:
    """θ + (θ − w) = 0 and 3 (θ − 4) + (θ − w) = 0 with w their mean: θ = (1.2, 3.6), w = 2.4."""
    with two_bowls(MRMTL(replace(TWO_STEPS, steps=20), lam=1.0)) as loop:
        for _ in range(60):
            loop.round()
        assert [float(state(loop, m, "theta")) for m in range(2)] == pytest.approx([1.2, 3.6])
        assert float(server(loop)) == pytest.approx(2.4)


@pytest.mark.parametrize("work", WORKS)
def test_without_a_hold_it_is_local_training(work: str) -> None:
    ours, theirs = run(MRMTL(WORKS[work], lam=0.0)), run(Local(WORKS[work]))
    mine = ours["clients.rows.theta"]
    other = next(
        value for name, value in theirs.items() if name.startswith("clients.rows") and value.shape == mine.shape
    )
    assert torch.equal(mine, other)


def test_it_is_mocha_deep_with_half_of_lambda() -> None:
    training = WORKS["epochs"]
    ours, theirs = run(MRMTL(training, lam=0.4)), run(MochaDeep(training, lam1=0.0, lam2=0.2))
    close(ours["clients.rows.theta"], theirs["clients.rows.w"])
    close(ours["server.w"], theirs["server.models"][0])


def test_the_server_follows_the_mean_of_all_models() -> None:
    """Whoever took part; running statistics too, which stay variances."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3))

    with by_hand(MRMTL(WORKS["steps"]), sizes=(3, 6, 4, 9), participation=0.5, model=model) as loop:
        start = server(loop)
        for _ in range(5):
            loop.round()
        rows = torch.stack([state(loop, m, "theta") if loop.took_part[m] else start for m in range(4)])
        close(server(loop), rows.mean(0))
        variance = next(slot for slot in loop.task.slots if slot.name.endswith("running_var"))
        assert bool((server(loop)[variance.start : variance.stop] > 0).all())


def test_bytes_and_refusals() -> None:
    with by_hand(MRMTL(TWO_STEPS)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)
    with pytest.raises(ConfigError, match="unstable"):
        MRMTL(LocalTraining(lr=0.5), lam=4.0)
