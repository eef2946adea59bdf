"""q-FFL: the paper's step by hand, FedAvg at q = 0, and losses that are more even the larger q is."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, TWO_STEPS, by_hand, gradient, info, run, server, two_bowls
from torch import nn

from kinfed.algorithms.common.averaging import ModelState
from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.qffl import QFFL, Up
from kinfed.data.examples.batches import LocalTraining

WORK = LocalTraining(batch=3, steps=None, epochs=2, lr=LR, lr_decay=0.8)


def test_two_quadratics_by_hand() -> None:
    """F = (0.5, 13.5), Δw = (1.9, −15.3), h = (8.61, 369.09)."""
    with two_bowls(QFFL(TWO_STEPS, q=1.0, curvature="step")) as loop:
        loop.round()
        assert float(server(loop)) == pytest.approx(1.5443474, abs=1e-6)


def test_the_length_of_a_step_knows_the_work_behind_it() -> None:
    """θ − w = (−0.19, 1.53) after two steps of 0.1: r = 1 + (θ − w)²/(2 · 0.1 F)."""
    with two_bowls(QFFL(TWO_STEPS, q=1.0)) as loop:
        loop.round()
        loss, delta = (0.5, 13.5), (-0.19, 1.53)
        total = sum(f * (1 + d**2 / (0.2 * f)) for f, d in zip(loss, delta, strict=True))
        step = sum(f * d for f, d in zip(loss, delta, strict=True))
        assert float(server(loop)) == pytest.approx(1 + step / total, abs=1e-6)
    one, other = (run(QFFL(ALL, q=2.0, curvature=curvature)) for curvature in ("work", "step"))  # type: ignore[arg-type]
    assert torch.equal(one["server.w"], other["server.w"])  # with one step they are the same


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_algorithm_2_as_written(q: float) -> None:
    """With the paper's Δ_m and h_m, in the second round of a rate that decays."""
    with by_hand(QFFL(LocalTraining(lr=LR, batch=100, steps=1, lr_decay=0.5), q=q)) as loop:
        loop.round()
        w, scale = server(loop), 1 / (0.5 * LR)  # L
        steps, h = [], []
        for m in range(3):
            rows = loop.pool.federation.train[m]
            x, y = loop.pool.federation.features.gather(rows), loop.pool.federation.labels[rows]
            loss = float(nn.functional.cross_entropy(loop.task.logits(w[None], x[None])[0], y))
            change = scale * 0.5 * LR * gradient(loop, m, w)  # L (w − θ_m)
            steps.append(loss**q * change)
            h.append(q * loss ** (q - 1) * float(change.square().sum()) + scale * loss**q)
        loop.round()
        torch.testing.assert_close(server(loop), w - sum(steps) / sum(h), rtol=1e-4, atol=1e-6)


def test_q_zero_is_fedavg() -> None:
    ours, theirs = run(QFFL(WORK, q=0.0)), run(FedAvg(WORK, weights="equal"))
    for name in ("server.w", "clients.rows.theta", "personal models"):
        assert torch.equal(ours[name], theirs[name]), name


def test_losses_are_more_even_the_larger_q_is() -> None:
    """θ²/2 = 3 (θ − 4)²/2 at θ = 2.536; the mean is least at 3."""
    ends = []
    for q in (0.0, 1.0, 5.0):
        with two_bowls(QFFL(TWO_STEPS, q=q)) as loop:
            for _ in range(300):
                loop.round()
            ends.append(float(server(loop)))
    gaps = [abs(theta**2 - 3 * (theta - 4) ** 2) for theta in ends]
    assert gaps[0] > gaps[1] > gaps[2]
    assert ends[2] == pytest.approx(2.536, abs=0.1)


def test_losses_of_any_size_and_zero_give_a_finite_step() -> None:
    delta = torch.ones(2, 3)
    for loss in ([1e-10, 1e-10], [1e-10, 1e8], [1e8, 1e8]):
        up = Up(delta, torch.tensor(loss), torch.tensor([1.0, 2.0]))
        new = QFFL(q=20.0).aggregate(ModelState(torch.zeros(3)), torch.arange(2), up, info())
        assert bool(((new.w > 0) & (new.w <= 1)).all())
    with two_bowls(QFFL(TWO_STEPS, q=0.5), start=0.0) as loop:  # where the first client's loss is 0
        loop.round()
        assert bool(torch.isfinite(server(loop)).all())


def test_bytes() -> None:
    for q, numbers in ((0.0, 15), (1.0, 17)):
        with by_hand(QFFL(ALL, q=q)) as loop:
            report = loop.round()
            assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * numbers * 4)
