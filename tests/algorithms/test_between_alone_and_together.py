"""Clients that are alike but not equal: methods that hold personal models near a common one must beat both extremes.

    θ_m ~ N(θ_0, 1)      z_m ~ N(θ_m, s_m), the mean of the client's examples, s_m between 0.44 and 2

Alone a client ends at z_m, with the mean squared error s_m; one model for all is near θ_0, with the error 1. The least
error has the posterior mean, (z_m/s_m + θ_0)/(1/s_m + 1), of which a pull of strength λ = 1 to the common model is the
stationary point: about half of either extreme's error.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kinfed.algorithms import make_algorithm
from kinfed.data.examples.batches import LocalTraining
from kinfed.pools.local_pool import LocalPool
from kinfed.server.loop import Loop
from kinfed.theory.gaussian import Case, GaussianWorld, draw

WORK = LocalTraining(lr=0.1, batch=100, steps=2)  # gradients of all examples: curvature 1/s_m
# Strengths that amount to λ = 1: mocha_deep has 2 λ₂, and L2SGD's move of θ = 0.2 stands against two steps of 0.1.
HELD: dict[str, dict[str, Any]] = {
    "ditto": {"lam": 1.0},
    "pfedme": {"lam": 1.0, "inner_steps": 20},
    "mrmtl": {"lam": 1.0},
    "mocha_deep": {"lam1": 0.0, "lam2": 0.5},
    "l2sgd": {"theta": 0.2},
    "selffl_exact": {"known_variances": True, "contraction": "gd"},
}


def error(name: str, world: GaussianWorld, **options: Any) -> tuple[float, float]:
    """Mean squared errors of personal models and of the server's (or of the personal ones' mean)."""
    method, task = make_algorithm(name, WORK, options), world.task(dtype=torch.float64)
    pool = LocalPool(method, task, world.federation, 0, workers=1)
    loop = Loop(method, task, pool, world.federation.population(0))
    for _ in range(50):
        loop.round()
    models = loop.evaluate(keep_models=True).models
    pool.close()
    assert models is not None
    server = method.server_models(loop.server)
    common = models.mean(0) if server is None else server.models[0]
    return float((models - world.theta).square().mean()), float((common - world.theta).square().mean())


@functools.cache
def extremes(seed: int) -> tuple[GaussianWorld, float, float, float]:
    """A draw, and the errors of every client alone, of one model for all, and of the posterior mean."""
    world = draw(Case(s0=1.0, low=2, high=9, clients=200, v=4.0, test=1), seed)
    s = world.s[:, None]
    best = float(((world.z / s + world.case.theta0) / (1 / s + 1) - world.theta).square().mean())
    return world, error("local", world)[0], error("fedavg", world)[1], best


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", HELD)
def test_personal_models_have_less_error_than_alone_and_than_one_for_all(name: str, seed: int) -> None:
    world, alone, together, best = extremes(seed)
    ours, _ = error(name, world, **HELD[name])
    assert ours < 0.7 * min(alone, together)
    assert ours < 1.15 * best


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_selffl_with_the_papers_posterior_lies_between_the_best_and_the_extremes(seed: int) -> None:
    """Its others count with the sum of their precisions, as if they knew this client's θ_m and not only θ_0."""
    world, alone, together, best = extremes(seed)
    ours, _ = error("selffl", world, known_variances=True, contraction="gd")
    assert 1.15 * best < ours < min(alone, together)
