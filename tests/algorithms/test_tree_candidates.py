"""Candidates of boosted trees and their weights against closed forms and a general optimizer; rounds of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

import kinfed
from kinfed import Federation, simulate
from kinfed.algorithms import make_algorithm
from kinfed.algorithms.trees.tree_candidates import LINEAR, NAMES, newton_step
from kinfed.algorithms.trees.tree_linear import FIXED, LinearModels, effects_of, linear_sums, newton
from kinfed.algorithms.trees.tree_weights import least_on_simplex, own_weights, weight_sums
from kinfed.data import Problem
from kinfed.data.examples.local_training import LocalTraining
from kinfed.engine import make_objective
from kinfed.engine.trees import ClientRows, TreeLoss

Array = np.ndarray[Any, Any]
SQUARED = TreeLoss(make_objective(Problem.of_numbers()), 1)
LOGISTIC = TreeLoss(make_objective(Problem.of_classes(2)), 2)
SOFTMAX = TreeLoss(make_objective(Problem.of_classes(3)), 3)


def left_out(loss: TreeLoss, rows: int = 60, seed: int = 0) -> tuple[Array, Array]:
    """Scores [R, 4, C] of candidates and targets that the second and third tell best."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(rows, 4, loss.scores)).astype(np.float32)
    truth = scores[:, 1] + 0.5 * scores[:, 2] + 0.3 * draw.normal(size=(rows, loss.scores))
    if not loss.objective.classifies:
        return scores, truth[:, 0]
    return scores, truth.argmax(1) if loss.scores > 1 else (truth[:, 0] > 0).astype(np.int64)


@pytest.mark.parametrize("loss", [SQUARED, LOGISTIC, SOFTMAX])
def test_weights_are_those_of_a_general_optimizer(loss: TreeLoss) -> None:
    scores, y = left_out(loss)
    ones, w = np.ones(len(y)), np.full(4, 0.25)
    for _ in range(6):
        _, g, h = weight_sums(loss, scores, y, ones, w[None])
        w = least_on_simplex(g.sum(0)[None], h.sum(0)[None], w[None], np.ones(4, np.bool_))[0]

    def value(weight: Array) -> float:
        return float(weight_sums(loss, scores, y, ones, weight[None])[0].sum())

    wanted = minimize(
        value, np.full(4, 0.25), method="SLSQP", bounds=[(0, 1)] * 4,
        constraints={"type": "eq", "fun": lambda weight: weight.sum() - 1},
    )  # fmt: skip
    assert w.sum() == pytest.approx(1)
    assert (w >= 0).all()
    assert value(w) <= wanted.fun + 1e-4


@pytest.mark.parametrize("loss", [SQUARED, LOGISTIC, SOFTMAX])
def test_sums_of_weights_are_derivatives(loss: TreeLoss) -> None:
    scores, y = left_out(loss)
    at, step = np.array([0.4, 0.3, 0.2, 0.1]), 1e-2

    def sums(weight: Array) -> tuple[float, Array, Array]:
        parts = weight_sums(loss, scores.astype(np.float64), y, np.ones(len(y)), weight[None])
        return float(parts[0].sum()), parts[1].sum(0), parts[2].sum(0)

    _, g, h = sums(at)
    for a in range(4):
        up, down = at + step * np.eye(4)[a], at - step * np.eye(4)[a]
        assert (sums(up)[0] - sums(down)[0]) / (2 * step) == pytest.approx(g[a], rel=2e-3, abs=2e-2)
        assert np.allclose((sums(up)[1] - sums(down)[1]) / (2 * step), h[a], rtol=2e-3, atol=2e-2)


def test_a_client_with_few_rows_stays_with_all_and_one_with_many_goes_its_own_way() -> None:
    draw = np.random.default_rng(1)
    owner = np.repeat([0, 1], [3, 600])
    scores = draw.normal(size=(len(owner), 2, 1)).astype(np.float32)
    y, common = scores[:, 1, 0].astype(np.float64), np.array([0.8, 0.2])  # the second candidate is right everywhere
    few, many = own_weights(SQUARED, scores, y, np.ones(len(y)), owner, common, 1.0, 2)
    assert few[1] < 0.4
    assert many[1] > 0.85
    settled = own_weights(SQUARED, scores, y, np.ones(len(y)), owner, np.array([1.0, 0.0]), 1.0, 2)
    assert np.array_equal(settled, [[1.0, 0.0], [1.0, 0.0]])  # what serves nobody is taken up by none


def test_a_step_of_the_linear_model_is_the_penalized_least_squares_of_all_rows() -> None:
    """β and b jointly minimize Σ (y − Xβ − b)²/2 + τ|b|²/2 + |β without the constant|²/2, whatever τ is."""
    draw = np.random.default_rng(0)
    owner, tau = np.repeat([0, 1, 2], [30, 5, 80]), 0.7
    x = np.column_stack([np.ones(len(owner)), draw.normal(size=(len(owner), 2))])
    y = x @ [0.5, 1.0, -2.0] + np.array([2.0, -1.0, 0.5])[owner] + 0.1 * draw.normal(size=len(owner))
    data = ClientRows(np.zeros((0, 2), np.uint8), np.arange(len(y)), np.array([0, 30, 35, 115]), y)
    models = LinearModels(np.zeros((1, 3, 1)), np.array([tau, FIXED, FIXED])[None, :, None], np.ones(1))
    sums = linear_sums(SQUARED, data, x, np.ones((len(y), 1), np.float32), models)
    beta = newton(SQUARED, models, sums.sum(0)).beta[0, :, 0]
    both = np.column_stack([x, np.eye(3)[owner]])
    wanted = np.linalg.solve(both.T @ both + np.diag([1e-6, 1.0, 1.0, tau, tau, tau]), both.T @ y)
    assert np.allclose(beta, wanted[:3], atol=1e-4)


def sites_with_slopes(logistic: bool = False) -> tuple[ClientRows, Array]:
    """60 sites whose level and first slope differ, and whose second does not."""
    draw = np.random.default_rng(3)
    owner = np.repeat(np.arange(60), 25)
    x = np.column_stack([np.ones(len(owner)), draw.normal(size=(len(owner), 2))])
    u = draw.normal(size=(60, 3)) * [0.7, 0.4, 0.0]
    score = (x * ([0.5, 1.0, -0.5] + u[owner])).sum(1)
    y = draw.random(len(owner)) < 1 / (1 + np.exp(-score)) if logistic else score + 0.5 * draw.normal(size=len(owner))
    first = np.arange(0, len(owner) + 1, 25)
    return ClientRows(np.zeros((0, 2), np.uint8), np.arange(len(owner)), first, y.astype(np.float64)), x


def test_variances_of_slopes_are_those_of_greatest_likelihood() -> None:
    """From sums alone, against the likelihood of all rows; a variance that is nothing ends as nothing."""
    data, x = sites_with_slopes()
    models, ones = LinearModels(np.zeros((1, 3, 1)), np.full((1, 3, 1), 5.0), np.ones(1)), np.ones((len(x), 1))
    for _ in range(40):
        sums = linear_sums(SQUARED, data, x, ones.astype(np.float32), models)
        models = newton(SQUARED, models, sums.sum(0) / 60, clients=60)

    def deviance(logs: Array) -> float:
        psi, phi, total = np.exp(logs[:3]), float(np.exp(logs[3])), 0.0
        moments, right = 1e-9 * np.eye(3), np.zeros(3)
        parts = []
        for k in range(60):
            own, y = x[25 * k : 25 * k + 25], data.y[25 * k : 25 * k + 25]
            v = phi * (np.eye(25) + own @ np.diag(psi) @ own.T)
            inverse = np.linalg.inv(v)
            moments, right = moments + own.T @ inverse @ own, right + own.T @ inverse @ y
            parts.append((own, y, inverse))
            total += np.linalg.slogdet(v)[1]
        beta = np.linalg.solve(moments, right)
        return float(total + sum((y - own @ beta) @ inverse @ (y - own @ beta) for own, y, inverse in parts))

    best = minimize(deviance, [0.0, 0.0, -4.0, -1.0], method="L-BFGS-B", bounds=[(-12, 5)] * 4).x
    assert 1 / models.tau[0, :2, 0] == pytest.approx(np.exp(best[:2]), rel=0.03)
    assert models.phi[0] == pytest.approx(np.exp(best[3]), rel=0.03)
    assert abs(1 / models.tau[0, 2, 0] - np.exp(best[2])) < 0.01


def test_effects_of_classes_are_where_the_penalized_loss_is_least() -> None:
    data, x = sites_with_slopes(logistic=True)
    tau = np.array([2.0, 4.0, FIXED])
    models = LinearModels(np.array([0.5, 1.0, -0.5])[None, :, None], tau[None, :, None], np.ones(1))
    u = effects_of(LOGISTIC, data, x, np.ones((len(x), 1), np.float32), models)[:, 0, :, 0]
    gradient = 1 / (1 + np.exp(-(x * (models.beta[0, :, 0] + np.repeat(u, 25, 0))).sum(1))) - data.y
    slope = (gradient[:, None] * x).reshape(60, 25, 3).sum(1)[:, :2] + tau[:2] * u[:, :2]
    assert np.allclose(slope, 0, atol=1e-4)
    assert not u[:, 2].any()


def linear_federation(sites: int = 6, each: int = 40) -> Federation:
    draw = np.random.default_rng(0)
    site = np.repeat(np.arange(sites), each)
    x = draw.normal(size=(len(site), 4)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5, 1.5]) + draw.normal(size=sites)[site] + 0.3 * draw.normal(size=len(site))
    return Federation.from_arrays(x, y, site)


def test_where_the_world_is_linear_the_mixed_model_is_taken() -> None:
    data = linear_federation()
    with simulate(data, "mlr", "trees", trees=10, bins=16, min_rows=5, folds=2, rate=0.3) as loop:
        while loop.round().active:
            pass
        server: Any = loop.server
        personal, mixed = loop.evaluate().personal, None
    with simulate(data, "mlr", "lmm") as loop:
        loop.round()
        mixed = loop.evaluate().personal
    assert float(server.best[LINEAR:].sum()) > 0.9, dict(zip(NAMES, server.best.tolist(), strict=True))
    assert personal is not None
    assert mixed is not None
    assert float(personal.loss.sum()) < 1.1 * float(mixed.loss.sum())


def test_a_method_with_rounds_of_its_own_runs_to_its_end_in_any_comparison(tmp_path: Path) -> None:
    """Others take the rounds of the run; one whose sums are all there ends before."""
    options = {"trees": 4, "depth": 2, "bins": 8, "folds": 1, "personal": False, "min_rows": 5}
    algorithms: dict[str, Any] = {"fedavg": {}, "lmm": {}, "trees": options}
    settings: dict[str, Any] = {
        "model": "mlr",
        "rounds": 3,
        "participation": 1.0,
        "seeds": (0,),
        "steps": 2,
        "progress": False,
    }
    result = kinfed.run(federation=linear_federation(), algorithms=algorithms, out=tmp_path / "run", **settings)
    rounds = {one.label: one.rounds for one in result.results}
    assert (rounds["fedavg"], rounds["lmm"]) == (3, 1)
    assert 3 < rounds["trees"] <= make_algorithm("trees", LocalTraining(), options).rounds_in(3)
    again = kinfed.run(
        federation=linear_federation(), algorithms=algorithms, out=tmp_path / "run", resume=True, **settings
    )
    assert [one.personal for one in again.results] == [one.personal for one in result.results]


def test_newtons_step_leaves_trees_without_intercepts_alone() -> None:
    y = np.array([5.0, 7.0])
    data = ClientRows(np.zeros((0, 1), np.uint8), np.arange(2), np.array([0, 2]), y)
    zeros, tau = np.zeros((2, 2, 1), np.float32), np.array([[1.0], [1e30]])
    b = newton_step(SQUARED, data, zeros, np.ones((2, 2), np.float32), np.zeros((1, 2, 1), np.float32), tau)
    assert b[0, 0, 0] == pytest.approx(4.0)
    assert abs(b[0, 1, 0]) < 1e-20
