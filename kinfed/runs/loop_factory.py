"""A method before its first round: its common start, pool of clients, schedule, privacy and stages of updates; and
`simulate`, a round iterator for users with a loop of their own:

    with kinfed.simulate(federation, lambda: my_module(), "ditto", participation=0.5, lam=0.1) as loop:
        for report in loop.rounds(50):
            if report.round % 10 == 0:
                print(loop.evaluate().personal)

The loop has threads of its own until it is closed, which `with` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.algorithms import (
    COUNT,
    DELTA,
    AnyAlgorithm,
    averaged_changes,
    check_architectures,
    make_algorithm,
    prepare_data,
    update_template,
)
from kinfed.config import RunConfig
from kinfed.core import Tree
from kinfed.data import Federation, LocalTraining, Moments, Population
from kinfed.engine import (
    Architectures,
    Builder,
    GradientCount,
    Task,
    counting,
    make_objective,
    make_task,
    model_for,
)
from kinfed.errors import ConfigError
from kinfed.pools import GroupPool, LocalPool, Pool, physical_memory
from kinfed.privacy import Ledger, check_weights, make_budget, seeded_noise
from kinfed.records import Checkpoints
from kinfed.runs.method_run import Interrupted
from kinfed.runs.observer import Observer
from kinfed.runs.run_inputs import RunInputs, example_batch
from kinfed.server import AsyncLoop, Clock, Loop, Schedule, gradients_per_round
from kinfed.updates import (
    Compression,
    ExampleLevel,
    RobustAverage,
    Sampling,
    Screening,
    SecureSum,
    Stage,
    Staleness,
    UserLevel,
    shortened_fields,
    trained_columns,
    user_level,
)

if TYPE_CHECKING:
    from kinfed.pools import RayCluster


Model = Task | Builder | str


@dataclass(frozen=True)
class CommonStart:
    """The start that all algorithms of a seed share."""

    model: Tensor | None = None  # [P]; None: the module's own random start
    ledger: Ledger = field(default_factory=Ledger)  # what it has asked of clients' data


class LoopFactory:
    """Makes the loops of one run; workers in other processes are shared by all of them, until `close`."""

    def __init__(self, inputs: RunInputs, note: Callable[[str], None]) -> None:
        self.inputs = inputs
        self._note = note
        self._cluster: RayCluster | None = None
        self._owner = self  # of the cluster

    def share_workers(self, owner: LoopFactory) -> None:
        """Take workers in other processes from another factory of the same settings."""
        self._owner = owner

    def make(
        self, algorithm: AnyAlgorithm, seed: int, rounds: range, start: CommonStart, state_folder: Path | None = None,
        count: GradientCount | None = None,
    ) -> Loop:  # fmt: skip
        """Make it from `start` on. Clients' states are kept in `state_folder` if given, else in memory; gradients of
        clients in this process go into `count`, if given."""
        inputs, config, schedule = self.inputs, self.inputs.config, self.inputs.config.schedule
        rounds = range(rounds.start, rounds.start + algorithm.rounds_in(len(rounds)))
        whole, data = inputs.training_parts(seed, algorithm)
        data, population = prepare_data(algorithm, data, data.population(seed, config.participation))
        task: Task = whole.starting_at(start.model)
        if count is not None:
            task = counting(task, count)
        task.problem = data.problem  # the mean and scale of a number to predict are those of the seed's training rows
        stages = StageFactory(config, type(algorithm).__name__, algorithm, task, data, population).make(rounds)
        if config.privacy is not None:
            calls = schedule.calls(seed, rounds, data.num_clients)
            budget = make_budget(
                config.privacy, algorithm, task, seeded_noise(seed), data.train.count, calls, start.ledger
            )
            task = budget.task
            stages.append(ExampleLevel(budget))
        pool: Pool
        if config.pool == "ray":
            pool = self._ray().pool(algorithm, task, data, seed, stages)
        else:
            local = partial(
                LocalPool, algorithm, federation=data, seed=seed, workers=config.workers, state_folder=state_folder,
                state_bytes=(physical_memory() or 0) // 4 if config.state == "auto" else 0,
                evaluated=inputs.evaluated(seed), stages=stages,
            )  # fmt: skip
            models = inputs.models()
            pool = _pool_of(models.of_problem(data.problem) if isinstance(models, Architectures) else task, data, local)
        clock = None
        if config.speeds is not None:
            clock = Clock(config.speeds, gradients_per_round(algorithm, data.train.count), seed)
        schedule = replace(schedule, first_round=rounds.start, clock=clock, evaluates=inputs.evaluated(seed))
        loop = AsyncLoop if any(isinstance(stage, Staleness) for stage in stages) else Loop
        return loop(algorithm, task, pool, population, schedule, stages)

    def _ray(self) -> RayCluster:
        """Workers for all methods, seeds and folds, from the first one that needs them."""
        if self._owner is not self:
            return self._owner._ray()
        if self._cluster is None:
            from kinfed.pools import RayCluster

            config = self.inputs.config
            self._cluster = RayCluster(config.ray_address, config.workers, self._note, gpus=config.ray_gpus)
        return self._cluster

    def close(self) -> None:
        """End the workers in other processes, if there are any."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class StartMaker:
    """Makes the common start of each seed; finished ones are taken from the checkpoints."""

    def __init__(self, loops: LoopFactory, observer: Observer, should_stop: Callable[[], bool]) -> None:
        self._loops = loops
        self._inputs = loops.inputs
        self._observer = observer
        self._should_stop = should_stop

    def make(self, seed: int, checkpoints: Checkpoints | None) -> CommonStart:
        """Pre-trained where that is asked for, then warmed up."""
        config, start = self._inputs.config, CommonStart()
        parts = (("pretrained", config.pretrain, self._pretrained), ("warm-start", config.warm_start, self._warmed_up))
        for name, rounds, train in parts:
            label = f"{name}-{seed}{self._inputs.fold_mark}"
            if not rounds:
                continue
            if checkpoints is not None and (snapshot := checkpoints.latest(label)) is not None:
                ledger = Ledger() if config.privacy is None else Ledger.load(snapshot.tensors)
                start = CommonStart(snapshot.tensors["w"].to(self._inputs.task().device), ledger)
                continue
            start, tensors = train(seed, start)
            if checkpoints is not None:
                checkpoints.save(label, rounds, tensors, {})
        return start

    def _pretrained(self, seed: int, start: CommonStart) -> tuple[CommonStart, dict[str, Tensor]]:
        """Train some rounds on the training data of all clients in one place; the start, and a checkpoint of it."""
        config = self._inputs.config
        algorithm = make_algorithm("fedavg", config.training, {})
        task, data = self._inputs.training_parts(seed, algorithm)
        pooled = data.pooled()
        pool = LocalPool(algorithm, task, pooled, seed, workers=config.workers)
        with Loop(algorithm, task, pool, pooled.population(seed), Schedule(1.0)) as loop:
            w = self._server_model_after(config.pretrain, loop, "pre-training")
        return CommonStart(w), {"w": w}

    def _warmed_up(self, seed: int, start: CommonStart) -> tuple[CommonStart, dict[str, Tensor]]:
        """Train some rounds of FedAvg; the start has their ledger."""
        config, rounds = self._inputs.config, self._inputs.config.warm_start
        strict = config.privacy is not None and config.privacy.strict
        algorithm = make_algorithm("fedavg", config.training, {"weights": "equal"} if strict else {})
        with self._loops.make(algorithm, seed, range(1, rounds + 1), start) as loop:
            w = self._server_model_after(rounds, loop, "warm start")
            ledger = Ledger() if loop.privacy is None else loop.privacy.ledger
        return CommonStart(w, ledger), {"w": w} | ledger.named()

    def _server_model_after(self, rounds: int, loop: Loop, label: str) -> Tensor:
        """[P]"""
        seed = loop.population.seed
        self._observer.started(label, seed, 0, rounds)
        for report in loop.rounds(rounds):
            self._observer.round(label, seed, report, None, None)
            if self._should_stop():
                raise Interrupted("stopped as asked; the last finished round is saved")
        models = loop.algorithm.server_models(loop.server)
        assert models is not None  # of FedAvg
        return models.models[0]


@dataclass(frozen=True)
class StageFactory:
    """Makes the stages of one method under one seed."""

    config: RunConfig
    label: str
    algorithm: AnyAlgorithm
    task: Task
    data: Federation
    population: Population

    def make(self, rounds: range) -> list[Stage]:
        """All stages of these rounds; those of a warm start are synchronous."""
        compression = self.compression()
        staleness = self.staleness(compression) if rounds.start > self.config.warm_start else None
        others = (self.screening(), self.secure_sum(), self.robust(), self.user_level(rounds))
        return [stage for stage in (compression, staleness, *others) if stage is not None]

    def compression(self) -> Compression | None:
        """How updates are coded; changes of models get error feedback."""
        codec = self.config.codec
        if codec is None:
            return None
        method = self.algorithm, self.task, self.data, self.population
        return Compression(codec, (DELTA, *(() if codec.unbiased else averaged_changes(*method)[0])))

    def staleness(self, compression: Compression | None) -> Staleness | None:
        """How late updates count. Refuses methods that need synchronous rounds."""
        rule = self.config.staleness_rule
        if rule is None:
            return None
        changes = shortened_fields(self.label, self.algorithm, self.task, self.data, self.population)
        update, first = self._template(), torch.zeros(1, dtype=torch.int64)
        sent = update if compression is None else compression.at_client(update, Moments(), first)
        return Staleness(rule, changes, sent.nbytes)

    def screening(self) -> Screening | None:
        """Checks before the server uses an update; a pool leaves out what is not finite by itself."""
        if self.config.robust_rule is None and not self.config.largest_norm:
            return None
        return Screening(self.config.largest_norm, trained_columns(self.algorithm, self.task))

    def secure_sum(self) -> SecureSum | None:
        """The secure sum, after the method was held against it."""
        settings = self.config.secure
        if settings is None:
            return None
        averages = settings.averaged_fields(self.label, self.algorithm)
        check_weights(self.data, "secure_sum hides single updates, and not")
        update, clients = self._template().named(), self.data.num_clients
        settings.check_update(self.label, self.algorithm, update, self.config.schedule.size(clients))
        total = int(self.data.train.count.sum()) if COUNT in update else clients
        return SecureSum(settings, averages, total, adds_up=self.config.user_privacy is None)

    def robust(self) -> RobustAverage | None:
        rule = self.config.robust_rule
        return None if rule is None else RobustAverage(rule, self.algorithm, trained_columns(self.algorithm, self.task))

    def user_level(self, rounds: range) -> UserLevel | None:
        privacy, schedule, clients = self.config.user_privacy, self.config.schedule, self.data.num_clients
        if privacy is None:
            return None
        averages = privacy.check(self.label, self.algorithm, self.task)
        expected = schedule.expected_replies(clients, keeps_stragglers="keeps stragglers" in self.algorithm.traits)
        # A warm start is over before the rounds of a method begin, and has the noise that is right for both together.
        last, seed, secure = self.config.warm_start + self.config.rounds, self.population.seed, self.config.secure
        sampling, shares, calls, noise = schedule.client_sampling(clients), None, None, 0.0
        if privacy.at_nodes:
            sampling, shares = user_level.NO_SAMPLING, user_level.seeded_shares(seed)
            calls = schedule.calls(seed, range(1, rounds.start), clients)
            noise = privacy.noise_over(sampling, int(schedule.calls(seed, range(1, last + 1), clients).max()))
        share = None if secure is None else user_level.Share.of(privacy, clients, noise, secure.least)
        return UserLevel(
            privacy, self._template(), averages, seeded_noise(seed), sampling, expected, range(rounds.start, last + 1),
            share=share, shares=shares, calls=calls,
        )  # fmt: skip

    def _template(self) -> Tree:
        server = self.algorithm.init_server(self.task, self.population)
        return update_template(self.algorithm, self.task, self.data, server)


def simulate(
    federation: Federation, model: Model | Mapping[str, Model], algorithm: AnyAlgorithm | str, *, seed: int = 0,
    training: LocalTraining | None = None, participation: float = 1.0, dropout: float = 0.0, stragglers: float = 0.0,
    sampling: Sampling = "fixed", workers: int | None = None, stages: Sequence[Stage] = (), **options: Any,
) -> Loop:  # fmt: skip
    """Make the server loop of one method over a federation, ready for `round()`, `rounds(n)` and `evaluate()`.

    - `model`: a name, a function that makes a module, or a task; several by name where clients have their own
      architectures: that of their group's name, or where they have no groups in turn. The first is the server's.
    - `algorithm`: a name, with its `options` by name, or an object; `training` are its local steps.
    - `participation`: share of the clients in a round; `dropout`: chance that one of them never replies; `stragglers`:
      chance that one does only part of its work; `sampling`: "fixed" or "poisson".
    - `stages`: what happens to updates on their way (kinfed.updates).

    Example:

        >>> federation = kinfed.testing.tiny_federation()
        >>> with kinfed.simulate(federation, "mlr", "ditto", lam=0.5) as loop:
        ...     reports = list(loop.rounds(3))
        ...     scores = loop.evaluate().personal
        >>> reports[-1].round, reports[-1].active, scores.loss.shape
        (3, 6, torch.Size([6]))
    """
    models: Task = (
        Architectures({name: _task_of(federation, one) for name, one in model.items()})
        if isinstance(model, Mapping)
        else _task_of(federation, model)
    )
    if isinstance(algorithm, str):
        algorithm = make_algorithm(algorithm, training or LocalTraining(), options)
    if "needs validation" in algorithm.traits and not int(federation.val.count.sum()):
        raise ConfigError(
            f"{type(algorithm).__name__} judges models on validation examples, and the federation has none; "
            "give it some: federation.with_validation(0.2, seed)"
        )
    federation, population = prepare_data(algorithm, federation, federation.population(seed, participation))
    if isinstance(models, Architectures):
        check_architectures(algorithm, models, federation, population)
    local = partial(LocalPool, algorithm, federation=federation, seed=seed, workers=workers, stages=stages)
    schedule = Schedule(participation, dropout, stragglers, sampling)
    pool = _pool_of(models, federation, local)
    return Loop(algorithm, models.server_task, pool, population, schedule, stages)


def _pool_of(models: Task, data: Federation, local: Callable[..., LocalPool]) -> Pool:
    """Clients in this process, of one architecture or several."""
    if isinstance(models, Architectures):
        return GroupPool(models, models.of_federation(data), lambda task: local(task=task))
    return local(task=models)


def _task_of(federation: Federation, model: Task | Builder | str) -> Any:
    """A task as it is, or that of a model for the federation's examples."""
    if isinstance(model, Task):
        return model
    problem, example = federation.problem, example_batch(federation)
    features, objective = federation.features, make_objective(problem)
    build = model_for(problem, features.shape, model, packing=features.packing)
    return make_task(build, example=example, outputs=problem.output_shapes, objective=objective)
