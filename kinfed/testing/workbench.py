"""A method on a tiny federation: the workbench of the contract's checks."""

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kinfed.algorithms import Algorithm, check_algorithm_settings, make_algorithm, prepare_data
from kinfed.core import rng
from kinfed.data import Features, Federation, LocalTraining, Problem, Ragged
from kinfed.engine import ModuleTask, Task, lora, make_objective, make_task
from kinfed.errors import ConfigError, ModelError
from kinfed.pools import LocalPool
from kinfed.server import Loop, Schedule
from kinfed.updates import Stage

HIDDEN = 6


def tiny_model() -> nn.Module:
    """115 parameters in three dense layers: enough for methods that split a model by layers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def normalized_model(inputs: int = 4, classes: int = 3) -> nn.Module:
    """A small network with BatchNorm."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    )


def adapted_model(*, freeze_a: bool = False, pair: bool = False, residual: bool = False) -> nn.Module:
    """The tiny model, its first two layers frozen with adapters of rank 2: 24 + 28 parameters, and 21 of the head."""
    kinds = {"freeze_a": freeze_a, "pair": pair, "residual": residual}
    return lora(tiny_model(), targets="1,3", rank=2, alpha=4.0, train="5", **kinds)


def linear_model(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))


# What a method is tried on: the first that it accepts.
MODELS: tuple[Callable[[], nn.Module], ...] = (
    tiny_model,
    normalized_model,
    adapted_model,
    functools.partial(adapted_model, freeze_a=True),
    functools.partial(adapted_model, pair=True),
    functools.partial(adapted_model, residual=True),
)


Method = Algorithm[Any, Any, Any, Any]
State = dict[str, Tensor]

SEED = 7
ROUNDS = 3
SOME = Schedule(participation=0.67)  # 4 of the tiny federation's 6 clients
WORK = LocalTraining(batch=5, steps=5)


class ContractError(AssertionError):
    """A method breaks a promise that every method makes."""


def tiny_federation(sizes: tuple[int, ...] = (1, 4, 16, 7, 13, 10), test: int = 8) -> Federation:
    """Three well separated classes in four dimensions; `sizes` training examples of the clients, who see the
    classes in unequal shares; two public groups."""
    clients, classes, width = len(sizes), 3, 4
    owner = torch.repeat_interleave(torch.arange(clients), torch.tensor(sizes) + test)
    count = len(owner)
    key = rng.root(SEED, "tiny-federation")
    # Two of three examples are of the client's own class, the others of any.
    any_class = (rng.uniform(rng.fold(key, 1), count) * classes).to(torch.int64)
    own = rng.uniform(rng.fold(key, 2), count) < 0.67
    labels = torch.where(own, owner % classes, any_class)
    noise = rng.normal(rng.fold(key, 3), count * width).reshape(count, width)
    raw = (5.0 * torch.eye(classes, width, dtype=torch.float64)[labels] + 0.5 * noise).to(torch.float32)
    rows = torch.arange(count)
    first = torch.tensor(sizes)[owner] > rows - torch.searchsorted(owner, owner)  # the first rows of a client train
    return Federation(
        Features(raw), labels, Problem.of_classes(classes),
        train=Ragged.grouped(rows[first], owner[first], clients),
        val=Ragged.empty(clients),
        test=Ragged.grouped(rows[~first], owner[~first], clients),
        names=[f"client-{k}" for k in range(clients)],
        groups=torch.arange(clients) % 2,
    )  # fmt: skip


def of_numbers(federation: Federation) -> Federation:
    """The same examples with numbers to predict, which clients have different levels of."""
    x = federation.features.raw.to(torch.float64)
    y = x[:, 0] - 0.5 * x[:, 1] + 0.1 * federation.labels
    return replace(federation, labels=y, problem=Problem.of_numbers(y[federation.train.rows]))


def of_two_classes(federation: Federation) -> Federation:
    return replace(federation, labels=(federation.labels > 0).to(torch.int64), problem=Problem.of_classes(2))


def of_survival(federation: Federation) -> Federation:
    """The same examples with times to an event, whose hazard follows the first column; a fifth are censored."""
    count = len(federation.labels)
    chance = rng.uniform(rng.root(SEED, "tiny-survival"), count).to(torch.float64)
    time = -torch.log1p(-chance) * torch.exp(-0.3 * federation.features.raw[:, 0].to(torch.float64))
    labels = torch.stack([time, (torch.arange(count) % 5 > 0).to(torch.float64)], 1)
    return replace(federation, labels=labels, problem=Problem.of_survival(labels[federation.train.rows], periods=4))


class Bench:
    """A method on a tiny federation, and the runs of it that several checks share."""

    def __init__(
        self,
        method: str | Method,
        *,
        options: Mapping[str, Any] | None = None,
        federation: Federation | None = None,
        model: Callable[[], nn.Module] | None = None,
    ) -> None:
        if isinstance(method, str):
            self.algorithm: Method = make_algorithm(method, WORK, options)
        elif options:
            raise ConfigError("options go with a method's name; a method given as an object has them already")
        else:
            self.algorithm = method
        self.federation = self.fitting(federation or tiny_federation())
        self.model = model or tiny_model
        if model is None:
            self._choose(() if federation is not None else (of_numbers, of_two_classes, of_survival))

    def fitting(self, federation: Federation) -> Federation:
        """The federation as the method needs it."""
        lacks = "needs validation" in self.algorithm.traits and not int(federation.val.count.sum())
        federation = federation.with_validation(0.25, SEED) if lacks else federation
        if "needs public data" in self.algorithm.traits and federation.public is None:
            public = federation.test.rows[:6]  # the examples of these few clients are too few to give any
            test = federation.test.filter(~torch.isin(federation.test.rows, public))
            federation = replace(federation, test=test, public=public)
        return federation

    def _choose(self, others: Sequence[Callable[[Federation], Federation]]) -> None:
        """The first of the tiny models that the method accepts, with classes or, where it accepts none, with `others`
        to predict; the usual ones, whose refusal says why, if it accepts nothing."""
        usual = self.federation
        for federation in (usual, *(self.fitting(change(usual)) for change in others)):
            self.federation = federation
            linear = functools.partial(linear_model, federation.problem.outputs)
            builds: tuple[Callable[[], nn.Module], ...] = (*(MODELS if federation is usual else ()), linear)
            for build in builds:
                try:
                    check_algorithm_settings(self.algorithm, self.make_task(build), federation.population(SEED))
                except (ConfigError, ModelError):
                    continue
                self.model = build
                return
        self.federation = usual

    def make_task(self, build: Callable[[], nn.Module] | None = None, backend: str = "auto") -> ModuleTask:
        """The task of the bench's model, or of that of `build`, for the federation's problem."""
        return make_task(build or self.model, backend=backend, objective=make_objective(self.federation.problem))

    def resized(self, sizes: tuple[int, ...], test: int) -> Federation:
        """The federation's examples dealt to other clients, with `sizes` training and `test` test examples."""
        data, clients = self.federation, len(sizes)

        def deal(rows: Tensor, counts: Tensor) -> Ragged:
            owner = torch.repeat_interleave(torch.arange(clients), counts)
            return Ragged.grouped(rows[torch.arange(len(owner)) % len(rows)], owner, clients)

        names = [f"client-{k}" for k in range(clients)]
        groups = None if data.groups is None else torch.arange(clients) % 2
        train, val = deal(data.train.rows, torch.tensor(sizes)), Ragged.empty(clients)
        tested = deal(data.test.rows, torch.full((clients,), test))
        return self.fitting(replace(data, train=train, val=val, test=tested, names=names, groups=groups))

    @functools.cached_property
    def fewest(self) -> int:
        """The smallest population that the method accepts with these hyper-parameters."""
        task = self.make_task()
        for count in range(1, len(self.federation)):
            try:
                check_algorithm_settings(self.algorithm, task, self.resized((1,) * count, 0).population(SEED))
            except ConfigError:
                continue
            return count
        return len(self.federation)

    @contextmanager
    def loop(
        self,
        schedule: Schedule = SOME,
        *,
        rounds: int = 0,
        algorithm: Method | None = None,
        federation: Federation | None = None,
        task: Task | None = None,
        workers: int = 1,
        chunk: int | None = 2,
        stages: Sequence[Stage] = (),
        evaluated: Tensor | None = None,
    ) -> Iterator[Loop]:
        """A run after a number of rounds. Method and task are new objects: what they hide is not carried over."""
        algorithm = replace(self.algorithm) if algorithm is None else algorithm
        federation = self.federation if federation is None else federation
        task = self.make_task() if task is None else task
        federation, clients = prepare_data(algorithm, federation, federation.population(SEED))
        pool = LocalPool(
            algorithm, task, federation, SEED, workers=workers, chunk=chunk, evaluated=evaluated, stages=stages
        )
        try:
            loop = Loop(algorithm, task, pool, clients, replace(schedule, evaluates=evaluated), stages)
            for _ in range(rounds):
                loop.round()
            yield loop
        finally:
            pool.close()

    def run(self, schedule: Schedule = SOME, rounds: int = ROUNDS, **changes: Any) -> State:
        with self.loop(schedule, rounds=rounds, **changes) as loop:
            return outcome(loop)

    @property
    def usual(self) -> State:
        """Result of ROUNDS rounds when nothing is special."""
        return self.usual_run[0]

    @functools.cached_property
    def usual_run(self) -> tuple[State, list[str]]:
        """That result, and the global generators that the run drew from."""
        before = _global_generators()
        state = self.run()
        after = _global_generators()
        return state, [name for name in before if after[name] != before[name]]


def outcome(loop: Loop) -> State:
    """Copies of all that a run has led to: states of server and clients (by id), personal models and scores."""
    state = state_of(loop)
    order = torch.argsort(state["clients.ids"])
    for name in state:
        if name.startswith("clients."):
            state[name] = state[name][order]
    evaluation = loop.evaluate(keep_models=True)
    assert evaluation.models is not None
    state["personal models"] = evaluation.models
    scores = {"personal": evaluation.personal, "server": evaluation.server_model, **evaluation.alternatives}
    for kind, score in scores.items():
        if score is not None:
            state |= {f"{kind} correct": score.correct, f"{kind} loss": score.loss}
    return state | {f"figure {name}": value for name, value in evaluation.figures.items()}


def _global_generators() -> dict[str, Any]:
    """States of the generators that a process has one of."""
    numpy: Any = np.random.get_state()
    numpy_state = numpy[1].tolist(), numpy[2:]
    return {"torch": torch.get_rng_state().tolist(), "numpy": numpy_state, "random": random.getstate()}


def state_of(loop: Loop) -> State:
    return {name: tensor.clone() for name, tensor in loop.state().items()}


def expect(holds: bool, promise: str) -> None:
    if not holds:
        raise ContractError(promise)


def expect_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], promise: str, within: float = 0.0) -> None:
    """Same names, types, shapes and values; `within` 0 means bit for bit."""
    same = ours.keys() == theirs.keys()
    expect(same, f"{promise}: there is {sorted(ours)} on one side, {sorted(theirs)} on the other")
    for name, a in ours.items():
        b = theirs[name]
        kinds = f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}"
        expect(kinds[0] == kinds[1], f"{promise}: {name} is {kinds[0]} on one side, {kinds[1]} on the other")
        if not a.is_floating_point():  # counts, choices and keys are right or wrong
            expect(torch.equal(a, b), f"{promise}: {name} differs")
        elif not torch.allclose(a, b, rtol=within, atol=within, equal_nan=True):
            gap = float((a - b).abs().nan_to_num(torch.inf).max())
            raise ContractError(f"{promise}: {name} differs by up to {gap:.2g}")


def hooked(algorithm: Method, **hooks: Callable[..., Any]) -> Method:
    """A copy of the method that calls hook(original, *args) in place of each of the methods named."""
    copy = replace(algorithm)
    for name, hook in hooks.items():
        object.__setattr__(copy, name, functools.partial(hook, getattr(copy, name)))
    return copy


CHECKS: dict[str, Callable[[Bench], None]] = {}


def check(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Register a check; its failures begin with the method's and the check's name."""

    @functools.wraps(function)
    def named(bench: Bench) -> None:
        try:
            function(bench)
        except ContractError as error:
            raise ContractError(f"{type(bench.algorithm).__name__}, {function.__name__}: {error}") from None

    CHECKS[function.__name__] = named
    return named
