"""FedPA: the update of posterior samples against a dense inverse, iterates by hand, and FedAvg as its limits."""

from __future__ import annotations

import pytest
import torch
from method_bench import ALL, LR, WORKS, by_hand, close, info, models, run, server, two_bowls

from kinfed.algorithms.fedavg import FedAvg
from kinfed.algorithms.fedpa import FedPA, posterior_delta
from kinfed.core import rng
from kinfed.data.examples.batches import LocalTraining
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.theory.gaussian import GaussianTask

FOUR_STEPS = LocalTraining(lr=LR, batch=100, steps=4)


def test_two_samples_by_hand() -> None:
    """x = (1, 3), w = 0, ρ = 1: x̄ = 2, Cov = 2, ρ_l = ½, Ŝ = 1.5, Δ = −4/3."""
    x = torch.tensor([[[1.0], [3.0]]], dtype=torch.float64)
    w = torch.zeros(1, 1, dtype=torch.float64)
    assert float(posterior_delta(w, x, torch.tensor([2]), 1.0)) == pytest.approx(-4 / 3)
    assert float(posterior_delta(w, x, torch.tensor([2]), 0.0)) == -2.0


def test_the_update_solves_the_papers_system() -> None:
    """Against numbers of samples that differ by client, zeros standing for those that are not there."""
    draw = torch.sin(torch.arange(4 * 5 * 7, dtype=torch.float64) ** 1.5).reshape(4, 5, 7)
    w, number = torch.cos(torch.arange(28, dtype=torch.float64)).reshape(4, 7), torch.tensor([5, 3, 1, 0])
    x = torch.where(torch.arange(5)[None, :, None] < number[:, None, None], draw, 0.0)
    found = posterior_delta(w, x, number, 0.7)
    for n, count in enumerate(number.tolist()):
        if not count:
            assert not bool(found[n].any())
            continue
        samples = draw[n, :count]
        rho = 1 / (1 + (count - 1) * 0.7)
        covariance = torch.cov(samples.T) if count > 1 else torch.zeros(7, 7, dtype=torch.float64)
        shrunk = rho * torch.eye(7, dtype=torch.float64) + (1 - rho) * covariance
        close(found[n], torch.linalg.solve(shrunk, w[n] - samples.mean(0)))


def test_exact_posteriors_meet_at_the_minimum_of_the_sum() -> None:
    """θ²/2 and 3 (θ − 4)²/2: samples μ ± 1/√(2a) have the covariance 1/a, and at 3 the two updates cancel."""
    a, mu = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0.0, 4.0], dtype=torch.float64)
    half = 1 / (2 * a).sqrt()
    x = torch.stack([mu - half, mu + half], 1)[..., None]
    for w in (3.0, 1.0):
        deltas = posterior_delta(torch.full((2, 1), w, dtype=torch.float64), x, torch.tensor([2, 2]), 1e9)
        close(deltas[:, 0], a * (w - mu), 1e-5)  # gradients


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_its_first_rounds_are_fedavg(name: str) -> None:
    ours, theirs = run(FedPA(WORKS[name], fedavg_rounds=5)), run(FedAvg(WORKS[name]))
    for field in ("server.w", "clients.rows.theta", "personal models"):
        assert torch.equal(ours[field], theirs[field]), field


@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_one_sample_of_the_last_iterate_is_fedavg(name: str) -> None:
    ours = run(FedPA(WORKS[name], fedavg_rounds=0, samples=1, burn_in=0.99))
    theirs = run(FedAvg(WORKS[name]))
    for field in ("server.w", "clients.rows.theta", "personal models"):
        close(ours[field], theirs[field])


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_iterates_by_hand(rho: float) -> None:
    """Seven steps, of which three are burn-in and four make two windows; η_s = 0.5."""
    method = FedPA(
        FOUR_STEPS.with_steps(7), weights="equal", samples=2, burn_in=0.4, rho=rho, server_lr=0.5, fedavg_rounds=0
    )
    with two_bowls(method) as loop:
        loop.round()
        deltas = []
        for curve, center in ((1.0, 0.0), (3.0, 4.0)):
            x, iterates = 1.0, []
            for _ in range(7):
                x -= LR * curve * (x - center)
                iterates.append(x)
            one, two = sum(iterates[3:5]) / 2, sum(iterates[5:]) / 2  # floor(2.8) = 2, and one is left over
            mean, variance = (one + two) / 2, (one - two) ** 2 / 2
            shrink = 1 / (1 + rho)
            deltas.append((1 - mean) / (shrink + (1 - shrink) * variance))
        assert float(server(loop)) == pytest.approx(1 - 0.5 * sum(deltas) / 2)


def test_few_steps_give_few_samples() -> None:
    """One step is one sample, with any l; what it ends in is FedAvg's."""
    with by_hand(FedPA(ALL, samples=5, fedavg_rounds=0)) as ours, by_hand(FedAvg(ALL)) as theirs:
        for _ in range(3):
            ours.round()
            theirs.round()
        close(server(ours), server(theirs))


def test_unequal_steps_are_sampled_each_by_itself() -> None:
    training = LocalTraining(batch=2, steps=None, epochs=3, lr=LR)
    with by_hand(FedPA(training, samples=3, rho=0.5, fedavg_rounds=0), sizes=(3, 9, 5, 1)) as loop:
        ids = torch.arange(4)
        data = loop.pool.federation.cohort(ids, seed=7, round=1)
        method, clients = loop.algorithm, loop.algorithm.init_client(loop.task, data)
        planned, _ = method.plan(loop.server, ids, info())
        down = method.download(planned, ids)
        _, together = method.client_update(loop.task, clients, down, data)
        for m in range(4):
            one = torch.tensor([m])
            own = loop.pool.federation.cohort(one, seed=7, round=1)
            _, alone = method.client_update(loop.task, clients.take(one), down.take(one), own)
            close(alone.delta[0], together.delta[m])


def test_a_late_client_and_bytes() -> None:
    with by_hand(FedPA(ALL, fedavg_rounds=0), participation=0.67) as loop:
        report = loop.round()
        away = int((~loop.took_part).nonzero()[0])
        assert torch.equal(models(loop)[away], server(loop))
        assert (report.bytes_down, report.bytes_up) == (2 * (15 * 4 + 1), 2 * (15 + 1) * 4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_surer_client_weighs_more(seed: int) -> None:
    """What it was invented for. Examples around 0 of variance 1 and around 4 of variance ⅓, under losses of curvature 1
    and 3, trained to the end in every round: FedAvg is at the middle of the two minima, 2, the sum is least at 3. The
    iterates of the steep client spread less, so that the model goes some of that way: a few samples of windows that
    are not independent do not show the whole difference."""
    s, z, count = torch.tensor([1.0, 1 / 3], dtype=torch.float64), torch.tensor([0.0, 4.0]), 50
    noise = rng.normal(rng.root(seed, "planted"), 2 * count).reshape(2, count)
    noise = (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True, correction=0)
    x = torch.cat([(z[:, None] + s.sqrt()[:, None] * noise).reshape(-1), z]).to(torch.float32)
    rows = torch.arange(2 * count)
    data = Federation(
        Features(x[:, None]), torch.zeros(len(x), dtype=torch.int64), Problem.of_classes(1),
        train=Ragged.grouped(rows, rows // count, 2), val=Ragged.empty(2),
        test=Ragged.grouped(torch.tensor([2 * count, 2 * count + 1]), torch.arange(2), 2), names=["flat", "steep"],
    )  # fmt: skip
    training, places = LocalTraining(lr=LR, batch=5, steps=80), {}
    ours = FedPA(training, weights="equal", samples=5, rho=100.0, server_lr=0.01, burn_in=0.3, fedavg_rounds=0)
    for method in (ours, FedAvg(training, weights="equal")):
        task = GaussianTask(s, 1.0, start=1.0, dtype=torch.float64)
        pool = LocalPool(method, task, data, seed, workers=1)
        loop = Loop(method, task, pool, data.population(seed))
        places[type(method)] = []
        for _ in range(40):
            loop.round()
            places[type(method)].append(float(server(loop)))
        pool.close()
    assert sum(places[FedAvg][20:]) / 20 == pytest.approx(2.0, abs=0.06)
    assert 2.2 < sum(places[FedPA][20:]) / 20 < 3.2
