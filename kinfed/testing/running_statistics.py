"""A check with a model that has running statistics: they move with training, are averaged, and take part in nothing
else."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import RoundInfo, check_algorithm_settings
from kinfed.core import Tree
from kinfed.engine import Task, task_for
from kinfed.errors import ConfigError, ModelError
from kinfed.server import Loop
from kinfed.testing import workbench
from kinfed.testing.workbench import SEED, Bench, Method, State, check, expect, expect_equal, hooked, outcome
from kinfed.updates import trained_columns

ROUNDS = 3
STEPS = 2
SHIFT = 0.5  # of the statistics in updates, of which only averages may tell


@check
def running_statistics_stay_sound(bench: Bench) -> None:
    """With BatchNorm in the model, and momentum and weight decay where the method has them: models stay finite and
    running variances positive; training moves statistics; the server decides by trainable parameters alone; clients
    change nothing that the server holds; workers and chunks do not matter. A method may refuse such a model."""
    if bench.federation.features.is_tokens:
        return  # the model here takes numbers
    features, problem = bench.federation.features, bench.federation.problem
    build = functools.partial(workbench.normalized_model, math.prod(features.shape), problem.outputs)
    method = _with_all_terms(bench.algorithm)
    try:
        check_algorithm_settings(method, bench.make_task(build), bench.federation.population(SEED))
    except (ConfigError, ModelError):
        return
    results = []
    for workers, chunk in ((1, None), (2, 1)):
        task = bench.make_task(build)
        watched = hooked(method, client_update=_client_update, aggregate=_aggregate(method, task))
        with bench.loop(rounds=ROUNDS, algorithm=watched, task=task, workers=workers, chunk=chunk) as loop:
            results.append(_sound_outcome(loop))
    expect_equal(
        results[1], results[0], "two workers and single clients give what one worker gives with all of them", 1e-5
    )


def _with_all_terms(method: Method) -> Method:
    """The method with few local steps, and with the terms of local training that it takes."""
    takes_momentum = "no momentum" not in method.traits and method.training.optimizer == "sgd"
    momentum, decay = 0.9 if takes_momentum else 0.0, 0.0 if "no weight decay" in method.traits else 0.1
    training = replace(method.training, steps=STEPS, epochs=None, momentum=momentum, weight_decay=decay)
    return replace(method, training=training)


def _client_update(inner: Any, task: Task, client: Tree, down: Tree, data: Any) -> tuple[Tree, Tree]:
    before = client.clone(), down.clone()
    answer: tuple[Tree, Tree] = inner(task, client, down, data)
    for old, new in zip(before, (client, down), strict=True):
        expect_equal(dict(new.named()), dict(old.named()), "client_update leaves state and message as they are")
    return answer


def _aggregate(method: Method, task: Task) -> Callable[..., Tree]:
    trained = trained_columns(method, task)

    def aggregate(inner: Any, server: Tree, ids: Tensor, up: Tree, round: RoundInfo) -> Tree:
        new: Tree = inner(server, ids, up, round)
        if trained is None:  # all statistics stay with the clients
            return new

        def shifted(rows: Tensor) -> Tensor:
            if rows.shape[-1:] != trained.shape:
                return rows
            by_client = SHIFT * (1 + ids % 3).to(rows.dtype)  # not the same for all, which distances would not show
            return rows + by_client.view(-1, *(1 for _ in rows.shape[1:])) * ~trained

        def decided(rows: Tensor) -> Tensor:
            """Tensors that must be the same: trainable columns of models, and all that is no row of a model."""
            if rows.shape[-1:] == trained.shape:
                return rows[..., trained]
            return rows[..., :0] if rows.shape[-1:] == (int((~trained).sum()),) else rows

        other: Tree = inner(server, ids, up.map(shifted), round)
        ours, theirs = ({k: decided(v) for k, v in tree.named().items()} for tree in (new, other))
        expect_equal(theirs, ours, "the server decides and moves parameters without a look at running statistics")
        return new

    return aggregate


def _sound_outcome(loop: Loop) -> State:
    state = outcome(loop)
    own = state["personal models"]
    _expect_sound(loop.task, own, "personal models")
    models = loop.algorithm.server_models(loop.server)
    if models is not None:
        _expect_sound(loop.task, models.models, "server models")
    start = task_for(loop.task, own).init(SEED)
    statistics = [slot for slot in task_for(loop.task, own).slots if not slot.trainable]
    moved = any(bool((own[:, slot.start : slot.stop] != start[slot.start : slot.stop]).any()) for slot in statistics)
    # Models without any, as trees are, have none to move.
    expect(
        moved or not statistics, "training moves the running statistics of personal models; all are those of the start"
    )
    return state


def _expect_sound(task: Task, models: Tensor, what: str) -> None:
    expect(bool(torch.isfinite(models).all()), f"{what} stay finite in a model with running statistics")
    for slot in task_for(task, models).slots:
        if slot.name.endswith("running_var"):
            least = float(models[:, slot.start : slot.stop].min())
            expect(least > 0, f"running variances of {what} stay positive; {slot.name} has {least:.3g}")
