"""A round iterator, for users with a loop of their own.

    with kinfed.simulate(federation, lambda: my_module(), "ditto", participation=0.5, lam=0.1) as loop:
        for report in loop.rounds(50):
            if report.round % 10 == 0:
                print(loop.evaluate().personal)

The loop has threads of its own until it is closed, which `with` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kinfed.algorithms import AnyAlgorithm, make_algorithm, prepare_data
from kinfed.data import Federation, LocalTraining
from kinfed.engine import Builder, Task, build_model, make_objective, make_task, own_model
from kinfed.errors import ConfigError
from kinfed.pools import LocalPool
from kinfed.runs.build import example_batch
from kinfed.server import Loop, Schedule
from kinfed.updates import Sampling, Stage


def simulate(
    federation: Federation,
    model: Task | Builder | str,
    algorithm: AnyAlgorithm | str,
    *,
    seed: int = 0,
    training: LocalTraining | None = None,
    participation: float = 1.0,
    dropout: float = 0.0,
    stragglers: float = 0.0,
    sampling: Sampling = "fixed",
    workers: int | None = None,
    stages: Sequence[Stage] = (),
    **options: Any,
) -> Loop:
    """A server loop over a federation, ready for `round()`, `rounds(n)` and `evaluate()`.

    `model` is a name, a function that makes a module, or a task; `stages` is what
    happens to updates on their way (kinfed.updates); `options` are those of a method given by name."""
    if isinstance(model, Task):
        task = model
    else:
        shape, outputs = federation.features.shape, federation.problem.outputs
        build = (
            partial(build_model, model, shape, outputs) if isinstance(model, str) else own_model(model, shape, outputs)
        )
        task = make_task(
            build, example=example_batch(federation), outputs=outputs, objective=make_objective(federation.problem)
        )
    if isinstance(algorithm, str):
        algorithm = make_algorithm(algorithm, training or LocalTraining(), options)
    if "needs validation" in algorithm.traits and not int(federation.val.count.sum()):
        raise ConfigError(
            f"{type(algorithm).__name__} judges models on validation examples, and the federation has none; "
            "give it some: federation.with_validation(0.2, seed)"
        )
    federation, population = prepare_data(algorithm, federation, federation.population(seed, participation))
    pool = LocalPool(algorithm, task, federation, seed, workers=workers, stages=stages)
    schedule = Schedule(participation, dropout, stragglers, sampling)
    return Loop(algorithm, task, pool, population, schedule, stages)
