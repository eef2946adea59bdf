"""Checks of what an algorithm declares about itself: types of messages, averages, privacy. An algorithm that does
more than it declares fails here."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import EXAMPLE_COUNT, AveragingAlgorithm, RoundInfo, mean_from_row, privacy_profile
from kinfed.core import Tree, rng
from kinfed.data import Batch, Federation
from kinfed.deploy import message_types
from kinfed.engine import FeatureLoss
from kinfed.errors import ConfigError
from kinfed.privacy import Privacy, PrivateTask, make_budget, seeded_noise
from kinfed.server import Schedule
from kinfed.testing.workbench import SEED, Bench, ContractError, Method, State, check, expect, expect_equal, hooked
from kinfed.updates import ExampleLevel


@check
def message_types_are_declared(bench: Bench) -> None:
    """`client_update` says of which classes its messages are, so that a deployment can check what arrives."""
    try:
        down_type, up_type = message_types(bench.algorithm)
    except (KeyError, IndexError, NameError, TypeError) as error:
        raise ContractError(f"client_update must declare the classes of its messages; {error}") from None

    def client_update(inner: Any, task: Any, client: Tree, down: Tree, data: Any) -> tuple[Tree, Tree]:
        new, up = inner(task, client, down, data)
        for what, message, declared in (("Down", down, down_type), ("Up", up, up_type)):
            promise = f"client_update declares that {what} is a {declared.__name__}; it is a {type(message).__name__}"
            expect(type(message) is declared, promise)
        return new, up

    bench.run(rounds=1, algorithm=hooked(bench.algorithm, client_update=client_update))


@check
def averages_are_only_averaged(bench: Bench) -> None:
    """The fields of an AveragingAlgorithm reach the server through their weighted mean: the server is the same after a
    `step` by that mean."""
    algorithm = bench.algorithm
    if algorithm.single_updates or not algorithm.sends:
        return
    if not isinstance(algorithm, AveragingAlgorithm):
        raise ContractError('single_updates is "", so the server only averages: derive it from AveragingAlgorithm')

    def aggregate(inner: Any, server: Tree, ids: Tensor, up: Tree, round: RoundInfo) -> Tree:
        weight = algorithm.weight(up)
        weight = torch.ones(len(ids)) if weight is None else weight
        p = (weight / weight.sum()).to(torch.float64)
        rows = [getattr(up, name) for name in algorithm.fields]
        means = [torch.tensordot(p, field.to(torch.float64), 1).to(field.dtype).flatten() for field in rows]
        new: Tree = inner(server, ids, up, round)
        info = replace(round, weight=float(weight.sum()))
        same: Tree = algorithm.step(server, mean_from_row(up, algorithm.fields, torch.cat(means)), info)
        expect_equal(same.named(), new.named(), "averaged fields reach the server through their mean only", 1e-4)
        return new

    bench.run(Schedule(), rounds=2, algorithm=hooked(bench.algorithm, aggregate=aggregate))


def _private(algorithm: Method) -> Method:
    training = algorithm.training
    steps = 3 if training.steps is None else training.steps
    return replace(algorithm, training=replace(training, poisson=True, steps=steps, epochs=None, augment=None))


@check
def gradients_are_declared(bench: Bench) -> None:
    """No round and no personalization computes more gradients, or judges more models, than the privacy profile says."""
    count = bench.federation.train.count
    profile = privacy_profile(bench.algorithm, count)
    if profile is None or profile.impossible:
        return
    algorithm, rounds = _private(bench.algorithm), 3
    often = torch.full_like(count, rounds)
    budget = make_budget(Privacy(noise=1.0), algorithm, bench.make_task(), seeded_noise(SEED), count, often)
    try:
        stages = [ExampleLevel(budget)]
        with bench.loop(Schedule(), rounds=rounds, algorithm=algorithm, task=budget.task, stages=stages) as loop:
            loop.evaluate()
    except ConfigError as error:
        raise ContractError(str(error)) from None


class _BlindTask(PrivateTask):
    """A private task whose gradients know nothing of the examples: what still depends on them left by another way."""

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        assert batch.sample is not None  # of a private run
        self._name_gradients(batch.ids, batch.sample)
        return torch.full_like(theta, 0.01)


@check
def nothing_else_leaves(bench: Bench) -> None:
    """Messages of a client depend on its examples through gradients alone, or the privacy profile says what else does.

    Two federations of equal sizes with other examples, gradients that see neither: messages must be equal."""
    profile = privacy_profile(bench.algorithm, bench.federation.train.count)
    if profile is None or profile.impossible or set(profile.uncovered) - {EXAMPLE_COUNT}:
        return
    ours, theirs = (_messages(bench, data) for data in (bench.federation, _other_examples(bench.federation)))
    promise = "without gradients, updates do not depend on examples (or the privacy profile names what does)"
    expect_equal(theirs, ours, promise)


def _other_examples(federation: Federation) -> Federation:
    order = rng.permutation(rng.root(SEED, "examples"), len(federation.labels))
    features = replace(federation.features, raw=-federation.features.raw[order])
    return replace(federation, features=features, labels=federation.labels[order])


def _messages(bench: Bench, federation: Federation) -> State:
    """Every update of two rounds, by name."""
    sent: State = {}
    algorithm = _private(bench.algorithm)

    def client_update(inner: Any, *args: Any) -> tuple[Tree, Tree]:
        client, up = inner(*args)
        start = len(sent)
        for number, (name, tensor) in enumerate(up.named().items()):
            sent[f"update {start + number}, {name}"] = tensor.clone()
        return client, up

    task = _BlindTask(bench.make_task(), 1.0, 0.0, seeded_noise(SEED))
    watched = hooked(algorithm, client_update=client_update)
    with task.recording(), bench.loop(Schedule(), rounds=2, algorithm=watched, federation=federation, task=task):
        return sent
