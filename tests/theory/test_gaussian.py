"""The two-level Gaussian task: its draws, its gradients, and that every method runs on it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.data.examples.batches import LocalTraining
from kinfed.engine.training.sgd import sgd
from kinfed.errors import ConfigError, KinfedError
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.theory.gaussian import CASES, Case, GaussianTask, draw

F64 = torch.float64
SMALL = Case(s0=0.01, low=3, high=8, clients=5)
FULL = LocalTraining(lr=1e-3, batch=100, steps=7)


def test_the_papers_two_cases():
    one, two = CASES["homogeneous"], CASES["heterogeneous"]
    assert (one.clients, one.theta0, one.s0, one.v, one.low, one.high) == (20, 1.6, 0.001, 0.1, 10, 20)
    assert (two.clients, two.theta0, two.s0, two.v, two.low, two.high) == (20, 1.6, 1.0, 0.1, 10, 200)


def test_a_draw_is_a_function_of_the_seed_and_test_examples_change_nothing_else():
    a, b, c = draw(SMALL, 4), draw(SMALL, 4), draw(SMALL, 5)
    assert torch.equal(a.federation.features.raw, b.federation.features.raw)
    assert not torch.equal(a.z, c.z)
    without = draw(dataclasses.replace(SMALL, test=0), 4)
    torch.testing.assert_close(without.z, a.z, rtol=0, atol=0)
    assert int(without.federation.test.count.sum()) == 0


def test_z_is_the_mean_of_the_stored_examples_and_s_its_variance():
    world = draw(SMALL, 1)
    for m, rows in enumerate(world.federation.train.lists()):
        x = world.federation.features.raw[rows].to(F64)
        torch.testing.assert_close(world.z[m], x.mean(0))
        assert float(world.s[m]) == pytest.approx(0.1 / len(x))
        assert 3 <= len(x) <= 8
    assert world.federation.test.count.tolist() == [10] * 5


def test_draws_follow_the_model():
    # 400 clients: E θ_m = 1.6, Var θ_m = s0 = 0.5, Var(z − θ) = v/N; every size from low to high occurs.
    world = draw(Case(s0=0.5, low=2, high=4, clients=400, v=0.3), 0)
    assert float(world.theta.mean()) == pytest.approx(1.6, abs=4 * (0.5 / 400) ** 0.5)
    assert float(world.theta.var()) == pytest.approx(0.5, rel=0.3)
    scaled = (world.z - world.theta).squeeze(1) / world.s.sqrt()
    assert float(scaled.var()) == pytest.approx(1.0, rel=0.3)
    assert abs(float(scaled.mean())) < 4 / 20
    sizes = torch.bincount(world.federation.train.count)
    assert sizes[:2].sum() == 0
    assert bool((sizes[2:] > 90).all())
    assert len(sizes) == 5


@given(dims=st.integers(1, 3), batch=st.integers(1, 9), seed=st.integers(0, 50))
def test_the_gradient_is_that_of_the_weighted_losses(dims: int, batch: int, seed: int):
    world = draw(dataclasses.replace(SMALL, dims=dims), seed)
    task = world.task(dtype=F64)
    part = world.federation.cohort(torch.tensor([3, 0, 4]), 0, 1).train
    for rows, b in part.batches(LocalTraining(batch=batch, epochs=1, steps=None)):
        theta = torch.linspace(0, 2, 3 * dims, dtype=F64).reshape(3, dims)[rows].requires_grad_()
        (task.losses(theta, b) * b.weight).sum().backward()
        torch.testing.assert_close(task.grad(theta.detach(), b), theta.grad, rtol=1e-6, atol=1e-6)


def test_full_batches_are_exact_gradient_descent():
    world = draw(SMALL, 2)
    part = world.federation.cohort(torch.arange(5), 0, 1).train
    steps = torch.tensor([1, 7, 3, 20, 2])
    out = sgd(world.task(dtype=F64), torch.full((5, 1), 0.3, dtype=F64), part.batches(FULL, steps))
    expected = world.model().descend(torch.full((5,), 0.3, dtype=F64), 1e-3, steps)
    torch.testing.assert_close(out.squeeze(1), expected, rtol=1e-6, atol=1e-6)


def test_batches_of_an_epoch_average_to_the_full_gradient():
    world = draw(Case(s0=0.1, low=6, high=6, clients=2), 0)
    task = world.task(dtype=F64)
    theta = torch.full((2, 1), 0.5, dtype=F64)
    part = world.federation.cohort(torch.arange(2), 0, 1).train
    grads = [task.grad(theta, batch) for _, batch in part.batches(LocalTraining(batch=2, steps=None, epochs=1))]
    expected = (theta.squeeze(1) - world.z.squeeze(1)) / world.s
    torch.testing.assert_close(torch.stack(grads).mean(0).squeeze(1), expected, rtol=1e-6, atol=1e-5)


def test_a_score_sums_losses_and_has_no_accuracy():
    world = draw(SMALL, 3)
    task = world.task()
    part = world.federation.cohort(torch.arange(5), 0, 1).train
    score = task.score(torch.zeros(5, 1), part)
    for m, rows in enumerate(world.federation.train.lists()):
        x = world.federation.features.raw[rows]
        assert float(score.loss[m]) == pytest.approx(float(x.square().sum() / (2 * world.s[m])), rel=1e-5)
    assert not task.classifies
    assert int(score.correct.sum()) == 0


def test_starts():
    task = GaussianTask(torch.ones(2), 1.0, dims=2, start=0.25)
    assert task.init(0).tolist() == [0.25, 0.25]
    assert task.init(0, 1).tolist() != task.init(0, 2).tolist()
    assert task.init(0, 1).tolist() == task.init(0, 1).tolist()
    task.init(0).add_(1)
    assert task.init(0).tolist() == [0.25, 0.25]
    warm = task.starting_at(torch.tensor([1.0, 2.0]))
    assert warm.init(5).tolist() == [1.0, 2.0]
    assert task.init(5).tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"low": 0}, "1 <= low <= high"),
        ({"low": 9}, "1 <= low <= high"),
        ({"s0": -1.0}, "s0 is a variance"),
        ({"v": 0.0}, "s0 is a variance"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"dims": 0}, "dims must be at least 1"),
        ({"test": -1}, "test must be at least 0"),
    ],
)
def test_impossible_cases_are_refused(change: dict[str, float], says: str):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(SMALL, **change)


def test_unknown_cases_are_refused():
    with pytest.raises(ConfigError, match="homogeneous, heterogeneous"):
        draw("mixed", 0)


# Kin mixes what models say of an example; these models say nothing.
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "kin"])
def test_every_method_runs(name: str):
    world = draw(SMALL, 0)
    federation, task = world.federation.with_validation(0.3, 0), world.task()
    algorithm = make_algorithm(name, LocalTraining(lr=1e-3, batch=2, steps=3))
    try:
        loop = Loop(algorithm, task, LocalPool(algorithm, task, federation, 1), federation.population(1, 0.6))
    except KinfedError as error:  # a method that needs what this task does not have, such as several layers
        pytest.skip(str(error))
    for _ in range(3):
        loop.round()
    evaluation = loop.evaluate(keep_models=True)
    loop.pool.close()
    assert evaluation.models is not None
    assert evaluation.models.shape == (5, 1)
    assert bool(evaluation.models.isfinite().all())
    assert evaluation.personal is not None
    assert bool((evaluation.personal.loss > 0).all())
