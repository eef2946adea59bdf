"""FedPHP: the distance of features by autograd, rounds by hand, and FedAvg where nothing is inherited."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, cut_gradient, deep, features, run, server, state, weighted
from torch import Tensor, nn

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedphp import SCALES, FedPHP, mmd_slope
from kinfed.data.examples.batches import LocalTraining


def mmd(phi: Tensor, other: Tensor, p: Tensor) -> Tensor:
    """MMD² of features [B, d_f], as the docstring prints it."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        square = (a[:, None] - b).square().sum(-1)
        return torch.stack([torch.exp(-square / (s * width)) for s in SCALES]).mean(0)

    width = (p @ (phi[:, None] - other).square().sum(-1) @ p).detach()
    return p @ (kernel(phi, phi) + kernel(other, other) - 2 * kernel(phi, other)) @ p


def test_the_slope_of_the_distance_is_autograds() -> None:
    key = torch.linspace(-2, 2, 2 * 5 * 3).reshape(2, 5, 3)
    phi, other = torch.sin(3 * key).requires_grad_(), torch.cos(2 * key)
    weight = torch.tensor([[0.2] * 5, [1 / 3, 1 / 3, 1 / 3, 0, 0]])
    total = torch.stack([mmd(phi[n], other[n], weight[n]) for n in range(2)]).sum()
    assert float(total.detach()) > 0
    (wanted,) = torch.autograd.grad(total, phi)
    close(mmd_slope(phi.detach(), other, weight), wanted)
    assert bool((mmd_slope(phi.detach(), phi.detach(), weight).abs() < 1e-6).all())  # nothing to learn from oneself


def test_one_example_by_hand() -> None:
    """MMD² = 2 − 2 k with ‖φ − ψ‖² = σ² = 4: its slope in φ is (4/σ²)(φ − ψ) times the mean of exp(−1/s)/s."""
    phi, other = torch.tensor([[[2.0, 0.0]]]), torch.zeros(1, 1, 2)
    factor = sum(torch.exp(torch.tensor(-1 / s)).item() / s for s in SCALES) / 5
    close(mmd_slope(phi, other, torch.ones(1, 1)), torch.tensor([[[4 / 4 * 2.0 * factor, 0.0]]]))


@pytest.mark.parametrize("training", WORKS.values(), ids=WORKS.keys())
def test_without_guidance_it_trains_as_fedavg(training: LocalTraining) -> None:
    ours, theirs = run(FedPHP(training, lam=0.0, mu=0.0)), run(FedAvg(training))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    inherited = run(FedPHP(training, lam=0.0, mu=0.9, growth=2))
    assert torch.equal(inherited["server.w"], theirs["server.w"])
    assert not torch.equal(inherited["personal models"], theirs["personal models"])


def test_rounds_by_hand() -> None:
    """Plain autograd of the whole loss, two of three at a time; v grows stiffer until round 4."""
    method = FedPHP(ALL.with_steps(2), lam=0.3, mu=0.8, growth=4)
    with by_hand(method, model=deep, participation=0.67) as loop:
        inherited: dict[int, Tensor] = {}
        for number in range(1, 7):
            w, trained = server(loop), []
            active = loop.schedule.active(loop.pool.seed, number, 3).tolist()
            for m in active:
                theta, v = w, inherited.get(m)

                def loss(x: Tensor, phi: Tensor, z: Tensor, y: Tensor, v: Tensor | None = v) -> Tensor:
                    plain = nn.functional.cross_entropy(z, y)
                    if v is None:
                        return plain
                    return 0.7 * plain + 0.3 * mmd(phi, features(loop, v, x), torch.full((len(x),), 1 / len(x)))

                for _ in range(2):
                    theta = theta - LR * cut_gradient(loop, m, theta, loss)
                trained.append(theta)
                mu = 0.8 * min(number / 4, 1)
                inherited[m] = theta if v is None else (1 - mu) * theta + mu * v
            report = loop.round()
            close(server(loop), weighted(trained, tuple((2, 6, 4)[m] for m in active)), 1e-5)
            for m in active:
                close(state(loop, m, "theta"), inherited[m], 1e-5)
            assert (report.bytes_down, report.bytes_up) == (len(active) * 4 * 47, len(active) * 4 * 48)
        assert len(inherited) == 3


def test_what_is_inherited_for_good_stays() -> None:
    with by_hand(FedPHP(ALL, mu=1.0, growth=1), model=deep) as loop:
        loop.round()
        first = [state(loop, m, "theta") for m in range(3)]
        for _ in range(2):
            loop.round()
        assert all(torch.equal(state(loop, m, "theta"), first[m]) for m in range(3))


def test_features_stay_nearer_to_the_inherited_models() -> None:
    """After a round in which the server's model has moved away, features of the trained model are closer to those of v
    the larger λ is."""
    gaps = []
    for lam in (0.0, 0.3, 0.9):
        with by_hand(FedPHP(LocalTraining(lr=0.3, batch=100, steps=10), lam=lam), model=deep) as loop:
            loop.round()
            x = loop.pool.federation.features.gather(loop.pool.federation.train[1])
            v = features(loop, state(loop, 1, "theta"), x)
            data = loop.pool.federation.cohort(torch.tensor([1]), seed=7, round=1)
            client = loop.pool.clients.take(torch.tensor([1]))
            down = loop.algorithm.download(loop.server, torch.tensor([1]))
            _, up = loop.algorithm.client_update(loop.task, client, down, data)
            p = torch.full((len(x),), 1 / len(x))
            gaps.append(float(mmd(features(loop, down.w[0] + up.delta[0], x), v, p)))
    assert gaps[0] > gaps[1] > gaps[2]


def test_a_newcomer_among_others_trains_as_in_fedavg() -> None:
    training = ALL.with_steps(3)
    with by_hand(FedPHP(training, lam=0.5), model=deep) as loop:
        loop.round()
        data = loop.pool.federation.cohort(torch.arange(3), seed=7, round=2)
        clients = loop.pool.clients.take(torch.arange(3))
        clients.seen = torch.tensor([True, False, True])
        down = loop.algorithm.download(loop.server, torch.arange(3))
        client, _ = loop.algorithm.client_update(loop.task, clients, down, data)
        plain = FedAvg(training).train(loop.task, down.w, data)
        close(client.theta[1], plain[1])
        assert not torch.allclose(client.theta[0], plain[0], atol=1e-4)


def test_rows_of_unequal_steps_are_guided_each_by_its_own() -> None:
    """Sorted by their steps for training; one of them has inherited nothing."""
    training = LocalTraining(batch=2, steps=None, epochs=2, lr=0.2)
    with by_hand(FedPHP(training, lam=0.6), sizes=(3, 9, 5), model=deep) as loop:
        loop.round()
        ids, method = torch.arange(3), loop.algorithm
        clients = loop.pool.clients.take(ids)
        clients.seen = torch.tensor([True, False, True])
        down = method.download(loop.server, ids)
        data = loop.pool.federation.cohort(ids, seed=7, round=2)
        together, _ = method.client_update(loop.task, clients, down, data)
        for m in range(3):
            one = torch.tensor([m])
            own = loop.pool.federation.cohort(one, seed=7, round=2)
            alone, _ = method.client_update(loop.task, clients.take(one), down.take(one), own)
            close(alone.theta[0], together.theta[m])


def test_examples_that_are_compared_cannot_be_private() -> None:
    assert FedPHP(ALL).privacy(torch.tensor([4])).impossible
    assert not FedPHP(ALL, lam=0.0).privacy(torch.tensor([4])).impossible
