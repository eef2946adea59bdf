"""FedAMP: the mix by hand, local training at λ = 0, whom clients are drawn to, and models that are not known yet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from method_bench import TWO_STEPS, WORKS, by_hand, close, info, linear, models, run, server, state, two_bowls

from kinfed.algorithms.fedamp import Down, FedAMP, Server, Up
from kinfed.algorithms.local import Local
from kinfed.data import Population
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.task_factory import make_task
from kinfed.errors import ConfigError


def mixed(method: FedAMP, theta: list[list[float]], known: tuple[int, ...] | None = None) -> Server:
    """The server after these models [N, P] have arrived from `known` clients (all)."""
    rows = torch.tensor(theta)
    n = len(rows)
    ids = torch.tensor(range(n) if known is None else known)
    nobody = torch.zeros(n, dtype=torch.bool)
    empty = Server(torch.zeros_like(rows), nobody, torch.eye(n, dtype=torch.float64), nobody)
    return method.aggregate(empty, ids, Up(rows[ids]), info(clients=n))


def test_the_mix_by_hand() -> None:
    method = FedAMP(alpha=0.5, sigma=1.0, relative=False, self_weight=0.0)
    new = mixed(method, [[0.0], [1.0], [3.0]])
    assert new.xi[0].tolist() == pytest.approx([0.81600, 0.18394, 0.00006], abs=1e-5)
    u = method.download(new, torch.arange(3)).u[:, 0]
    assert u.tolist() == pytest.approx([0.18412, 0.83438, 2.98150], abs=1e-5)


def test_cosines_by_hand() -> None:
    """Client 0 beside one that points its way and one at a right angle: exp(2) and exp(0) of what is not its own."""
    new = mixed(FedAMP(attention="cosine", self_weight=0.4, sharpness=2.0), [[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
    both = math.exp(2) + 1
    assert new.xi[0].tolist() == pytest.approx([0.4, 0.6 * math.exp(2) / both, 0.6 / both])
    assert not bool(new.scaled.any())  # the shares leave ξ_ii as it was asked for


@pytest.mark.parametrize("attention", ["distance", "cosine"])
def test_rows_are_weights_of_a_mean_and_the_size_of_models_does_not_matter(attention: Any) -> None:
    theta = torch.linspace(-1, 1, 60).reshape(6, 10).sin()
    small, large = (mixed(FedAMP(attention=attention), (scale * theta).tolist()) for scale in (1.0, 1000.0))
    assert bool((small.xi >= 0).all())
    close(small.xi.sum(1), torch.ones(6))
    assert float(small.xi.diagonal().min()) >= 0.5 - 1e-9  # self_weight
    close(small.xi, large.xi, 1e-5)


def test_equal_models_share_equally() -> None:
    new = mixed(FedAMP(self_weight=0.4), [[1.0, 2.0]] * 3)
    close(new.xi, torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]]))
    assert bool(new.scaled.all())


def test_models_that_never_came_are_not_mixed() -> None:
    method = FedAMP()
    new = mixed(method, [[1.0], [9.0], [2.0], [9.0]], known=(0, 2))
    assert new.xi[:, [1, 3]].abs().sum() == 0
    assert method.download(new, torch.tensor([1, 3])).u.tolist() == [[1.5], [1.5]]  # the mean of those that did
    alone = mixed(method, [[1.0], [9.0]], known=(0,))
    assert alone.xi.tolist() == [[1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("work", WORKS)
def test_without_a_hold_it_is_local_training(work: str) -> None:
    ours, theirs = run(FedAMP(WORKS[work], lam=0.0)), run(Local(WORKS[work]))
    took_part = ours["clients.rows.seen"]
    mine = ours["clients.rows.theta"]
    other = next(
        value for name, value in theirs.items() if name.startswith("clients.rows") and value.shape == mine.shape
    )
    assert bool(took_part.any())
    assert torch.equal(mine, other)


@pytest.mark.parametrize(("lam", "alpha"), [(1.0, 1.0), (0.5, 0.5), (3.0, 1.2)])
def test_a_round_by_hand(lam: float, alpha: float) -> None:
    """Two steps of θ ← θ − η (f' + (λ/α) (θ − u)); in the first round u is the start, 1, in the second the mix."""
    method = FedAMP(TWO_STEPS, lam=lam, alpha=alpha, self_weight=0.5)
    with two_bowls(method) as loop:
        loop.round()
        theta = [float(state(loop, m, "theta")) for m in range(2)]
        if lam == alpha:
            assert theta == pytest.approx([0.82, 2.44])  # as MR-MTL's with λ = 1
        own = 1 - min(alpha * math.exp(-1), 0.5)
        u = [own * theta[0] + (1 - own) * theta[1], own * theta[1] + (1 - own) * theta[0]]
        loop.round()
        for m, (curve, center) in enumerate(((1.0, 0.0), (3.0, 4.0))):
            x = theta[m]
            for _ in range(2):
                x -= 0.1 * (curve * (x - center) + lam / alpha * (x - u[m]))
            assert float(state(loop, m, "theta")) == pytest.approx(x)


def test_clients_are_drawn_to_their_like() -> None:
    """Two groups of models: almost all of what a client takes from others comes from its own group."""
    theta = torch.tensor([[0.0, 0.0], [0.2, 0.0], [5.0, 5.0], [5.0, 5.2]])
    for method in (FedAMP(sigma=0.2), FedAMP(attention="cosine", sharpness=50.0)):
        xi = mixed(method, (theta + torch.tensor([1.0, -1.0])).tolist()).xi
        assert float(xi[:2, 2:].max()) < 0.02
        assert float(xi[0, 1]) > 0.3


def test_a_client_that_never_trained_deploys_the_mean_of_all() -> None:
    with by_hand(FedAMP(TWO_STEPS), participation=0.67) as loop:
        loop.round()
        away = int((~loop.took_part).nonzero()[0])
        close(models(loop)[away], server(loop, "theta")[loop.took_part].mean(0))


@pytest.mark.parametrize("lam", [1.0, 0.0])
def test_a_client_that_is_called_first_in_a_late_round_begins_at_the_mean_of_all(lam: float) -> None:
    """By hand: θ ← u − η f'(u), as the hold is 0 at u. Without a hold it is local training, from the common start."""
    method = FedAMP(LocalTraining(lr=0.1, batch=10, steps=1), lam=lam)
    with two_bowls(method) as loop:
        seen = loop.pool.clients.take(torch.tensor([1]))
        cohort = loop.pool.federation.cohort(torch.tensor([1]), 0, 9)
        u = torch.tensor([[3.0]], dtype=torch.float64)
        new, _ = method.client_update(loop.task, method.init_client(loop.task, cohort), Down(u), cohort)
        begin = 3.0 if lam else 1.0
        assert float(new.theta) == pytest.approx(begin - 0.1 * 3 * (begin - 4.0))
        assert not bool(seen.seen.any())


def test_bytes_and_refusals() -> None:
    with by_hand(FedAMP(TWO_STEPS)) as loop:
        report = loop.round()
        assert (report.bytes_down, report.bytes_up) == (3 * 15 * 4, 3 * 15 * 4)
    with pytest.raises(ConfigError, match="unstable"):
        FedAMP(LocalTraining(lr=0.5), lam=4.0)


def test_models_that_would_not_fit_are_refused() -> None:
    """15 parameters and two shares of 8 bytes for each pair: 4 · 100,000 · 200,015 bytes."""
    with pytest.raises(ConfigError, match=r"all 100,000 clients.*: 80.0 GB, more than max_gb=4"):
        FedAMP().check(make_task(linear), Population(100_000, 0))
    FedAMP(max_gb=81).check(make_task(linear), Population(100_000, 0))
