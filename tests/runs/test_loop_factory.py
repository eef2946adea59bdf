"""Loops as settings describe them: whatever stages stand between clients and server, both remember the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kinfed.algorithms import ALGORITHMS, make_algorithm
from kinfed.algorithms.base import Algorithm
from kinfed.config import make_config
from kinfed.errors import ConfigError
from kinfed.pools.local_pool import LocalPool
from kinfed.runs.loop_factory import CommonStart, LoopFactory
from kinfed.runs.run_inputs import RunInputs
from kinfed.server.loop import Loop
from kinfed.testing.workbench import WORK, tiny_federation, tiny_model
from kinfed.updates import STAGES

ROUNDS = 4
WITH_INVARIANT = [name for name in ALGORITHMS if type(make_algorithm(name, WORK)).invariant is not Algorithm.invariant]
# Settings that put each stage on the road of an update.
SETTINGS: dict[str, dict[str, Any]] = {
    "privacy": {"dp_noise": 0.5, "dp_clip": 1.0},
    "compression": {"compress": "qsgd:1"},
    "staleness": {"mode": "fedbuff"},
    "screening": {"largest_norm": 0.25},
    "secure_sum": {"secure_sum": True},
    "robust": {"robust": "median"},
    "user_level": {"user_noise": 0.5},
}
# These leave the server nothing but a mean or a share of each update, from which it cannot follow single clients.
NEED_AVERAGES = {"staleness", "secure_sum", "robust", "user_level"}


def make_loop(name: str, **settings: Any) -> Loop:
    work = {"participation": 0.67, "dropout": 0.2, "batch": 5, "steps": 5, "workers": 1}
    config = make_config(settings={"algorithms": [name], "rounds": ROUNDS, "seeds": [0], **work, **settings})
    inputs = RunInputs(config, tiny_federation(), tiny_model)
    return LoopFactory(inputs, print).make(inputs.algorithms[name], 0, range(1, ROUNDS + 1), CommonStart())


def test_every_registered_stage_is_tried() -> None:
    assert set(SETTINGS) == set(STAGES)


@pytest.mark.parametrize("stage", sorted(set(STAGES) - NEED_AVERAGES))
@pytest.mark.parametrize("name", WITH_INVARIANT)
def test_every_declared_invariant_survives_every_stage(name: str, stage: str) -> None:
    """c = mean c_m, h = mean g_m, w = mean θ_m, after every round, whoever took part and whatever was refused."""
    with make_loop(name, **SETTINGS[stage]) as loop:
        assert stage in [each.name for each in loop.stages]
        pool, largest, refused, sent = loop.pool, 0.0, 0, 0
        assert isinstance(pool, LocalPool)
        for _ in range(ROUNDS):
            report = loop.round()
            refused, sent = refused + len(report.rejected), sent + report.active
            clients = pool.clients.take(torch.arange(loop.population.num_clients))
            pair = loop.algorithm.invariant(loop.task, loop.server, clients)
            assert pair is not None
            of_server, of_clients = pair
            scale = float(of_server.abs().max().clamp_min(1e-3))
            torch.testing.assert_close(of_server, of_clients, rtol=0, atol=1e-5 * scale)
            largest = max(largest, scale)
    assert largest > 1e-3  # something was learnt
    assert stage != "screening" or 0 < refused < sent


@pytest.mark.parametrize("stage", sorted(NEED_AVERAGES))
@pytest.mark.parametrize("name", WITH_INVARIANT)
def test_a_stage_that_leaves_only_a_mean_refuses_methods_with_an_invariant(name: str, stage: str) -> None:
    with pytest.raises(ConfigError, match=type(make_algorithm(name, WORK)).__name__):
        make_loop(name, **SETTINGS[stage])
