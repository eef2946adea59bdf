"""MOON: the contrast of features by hand and by autograd; FedAvg as its limit and in a client's first round."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, cut_gradient, deep, features, run, server, state, weighted
from torch import Tensor, nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.moon import MOON, ModelContrast, cosine_and_slope
from kinfed.data.examples.batches import Batch, LocalTraining


class Features:
    """A task whose models are their features."""

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        return theta[:, None]


def contrast(phi: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """[B] l_con as the paper prints it (3)."""
    cosine = nn.functional.cosine_similarity
    a, b = (cosine(phi, near, -1) / tau).exp(), (cosine(phi, far, -1) / tau).exp()
    return -(a / (a + b)).log()


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_contrast_it_is_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(MOON(training, mu=0.0)), run(FedAvg(training))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("phi", "near", "far", "loss", "slope"),
    [
        ((1, 0), (1, 0), (0, 1), 0.126928, (0.0, 0.238406)),
        ((1, 1), (1, 0), (0, 1), log(2), (-0.707107, 0.707107)),
        ((1, 0), (1, 1), (0, 1), 0.217622, (0.0, 0.114562)),
        ((1, 0), (7, 7), (0, 3), 0.217622, (0.0, 0.114562)),  # lengths do not matter
        ((0, 0), (1, 1), (0, 1), log(2), (0.0, 0.0)),  # no direction
    ],
)
def test_one_example_by_hand(
    phi: tuple[int, int], near: tuple[int, int], far: tuple[int, int], loss: float, slope: tuple[float, float]
) -> None:
    """τ = 0.5, μ = 1: l_con and its gradient, which is orthogonal to φ."""
    at, w, prev = (torch.tensor([value], dtype=torch.float32) for value in (phi, near, far))
    (close_cosine, _), (far_cosine, _) = cosine_and_slope(at, w), cosine_and_slope(at, prev)
    assert float(nn.functional.softplus((far_cosine - close_cosine) / 0.5)) == pytest.approx(loss, abs=1e-6)
    task: Any = Features()
    batch = Batch(at[None], torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), torch.tensor([0]))
    dz, dphi = ModelContrast(task, w, prev, 1.0, 0.5)(at[None], at[None], batch, torch.tensor([0]))
    assert dz is None
    assert dphi is not None
    close(dphi[0, 0], torch.tensor(slope))
    assert float((dphi[0, 0] * at[0]).sum()) == pytest.approx(0.0, abs=1e-6)


def test_rounds_by_hand() -> None:
    """Plain autograd of the whole loss at every client, two of three at a time; bytes are FedAvg's."""
    with by_hand(MOON(ALL.with_steps(2), mu=2.0), model=deep, participation=0.67) as loop:
        last: dict[int, Tensor] = {}
        for number in range(1, 5):
            w = server(loop)
            active = loop.schedule.active(loop.pool.seed, number, 3).tolist()
            for m in active:
                prev, theta = last.get(m, w), w

                def loss(x: Tensor, phi: Tensor, z: Tensor, y: Tensor, w: Tensor = w, prev: Tensor = prev) -> Tensor:
                    term = contrast(phi, features(loop, w, x), features(loop, prev, x), 0.5).mean()
                    return nn.functional.cross_entropy(z, y) + 2.0 * term

                for _ in range(2):
                    theta = theta - LR * cut_gradient(loop, m, theta, loss)
                last[m] = theta
            report = loop.round()
            close(server(loop), weighted([last[m] for m in active], tuple((2, 6, 4)[m] for m in active)), 1e-5)
            for m in active:
                close(state(loop, m, "theta"), last[m], 1e-5)
            assert (report.bytes_down, report.bytes_up) == (len(active) * 4 * 47, len(active) * 4 * 48)


def test_everybodys_first_round_is_fedavgs() -> None:
    training = ALL.with_steps(3)
    with by_hand(MOON(training, mu=5.0), model=deep) as ours, by_hand(FedAvg(training), model=deep) as theirs:
        for loop in (ours, theirs):
            loop.round()
        assert torch.equal(server(ours), server(theirs))
        for loop in (ours, theirs):
            loop.round()
        assert not torch.equal(server(ours), server(theirs))


def test_a_newcomer_among_others_trains_as_in_fedavg() -> None:
    """In one cohort with clients that have a model of their own."""
    with by_hand(MOON(ALL.with_steps(3), mu=5.0), model=deep) as loop:
        loop.round()
        data = loop.pool.federation.cohort(torch.arange(3), seed=7, round=2)
        method, w = loop.algorithm, server(loop).expand(3, -1)
        clients = loop.pool.clients.take(torch.arange(3))
        clients.seen = torch.tensor([True, False, True])
        down = method.download(loop.server, torch.arange(3))
        client, _ = method.client_update(loop.task, clients, down, data)
        plain = FedAvg(ALL.with_steps(3)).train(loop.task, w, data)
        assert torch.equal(client.theta[1], plain[1])
        assert not torch.equal(client.theta[0], plain[0])


def test_features_turn_to_the_received_model_and_from_the_last_one() -> None:
    """From the same state, cosines to φ_w less those to φ_prev are larger with the contrast than without."""
    training = LocalTraining(lr=0.3, batch=100, steps=10)
    with by_hand(FedAvg(training), model=deep) as loop:
        for _ in range(2):
            loop.round()
        everybody = torch.arange(3)
        clients, down = loop.pool.clients.take(everybody), loop.algorithm.download(loop.server, everybody)
        data = loop.pool.federation.cohort(everybody, seed=7, round=3)
        gap = {}
        for mu in (0.0, 5.0):
            trained, _ = MOON(training, mu=mu).client_update(loop.task, clients, down, data)
            ((_, batch),) = data.train.in_order()
            phi, near, far = (loop.task.features(model, batch.x) for model in (trained.theta, down.w, clients.theta))
            cosine = nn.functional.cosine_similarity
            gap[mu] = ((cosine(phi, near, -1) - cosine(phi, far, -1)) * batch.weight).sum(1) / batch.weight.sum(1)
        assert bool((gap[5.0] > gap[0.0] + 0.01).all())
