"""A method before its first round: its common start, pool of clients, schedule, privacy and stages of updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, make_algorithm, prepare_data
from kinfed.engine import Task
from kinfed.pools import LocalPool, Pool, physical_memory
from kinfed.privacy import Ledger, make_budget, seeded_noise
from kinfed.records import Checkpoints
from kinfed.runs.method_run import Interrupted
from kinfed.runs.observer import Observer
from kinfed.runs.run_inputs import RunInputs
from kinfed.runs.stage_factory import StageFactory
from kinfed.server import AsyncLoop, Clock, Loop, Schedule, gradients_per_round
from kinfed.updates import ExampleLevel, Staleness

if TYPE_CHECKING:
    from kinfed.pools import RayCluster


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
        self, algorithm: AnyAlgorithm, seed: int, rounds: range, start: CommonStart, state_folder: Path | None = None
    ) -> Loop:
        """The algorithm from `start` on. Clients' states are kept in `state_folder` where there is one, otherwise in
        memory."""
        inputs, config, schedule = self.inputs, self.inputs.config, self.inputs.config.schedule
        whole, data = inputs.training_parts(seed, algorithm)
        data, population = prepare_data(algorithm, data, data.population(seed, config.participation))
        task: Task = whole.starting_at(start.model)
        task.problem = data.problem  # the mean and scale of a number to predict are those of the seed's training rows
        stages = StageFactory(config, type(algorithm).__name__, algorithm, task, data, population).make(rounds)
        if config.privacy is not None:
            active = [schedule.active(seed, number, data.num_clients) for number in rounds]
            calls = torch.bincount(torch.cat(active), minlength=data.num_clients)
            budget = make_budget(
                config.privacy, algorithm, task, seeded_noise(seed), data.train.count, calls, start.ledger
            )
            task = budget.task
            stages.append(ExampleLevel(budget))
        pool: Pool
        if config.pool == "ray":
            pool = self._ray().pool(algorithm, task, data, seed, stages)
        else:
            pool = LocalPool(
                algorithm, task, data, seed, workers=config.workers, state_folder=state_folder,
                state_bytes=(physical_memory() or 0) // 4 if config.state == "auto" else 0,
                evaluated=inputs.evaluated(seed), stages=stages,
            )  # fmt: skip
        clock = None
        if config.speeds is not None:
            clock = Clock(config.speeds, gradients_per_round(algorithm, data.train.count), seed)
        schedule = replace(schedule, first_round=rounds.start, clock=clock, evaluates=inputs.evaluated(seed))
        is_asynchronous = any(isinstance(stage, Staleness) for stage in stages)
        loop = AsyncLoop if is_asynchronous else Loop
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
        start = CommonStart()
        if self._inputs.config.pretrain:
            start = self._pretrained(seed, checkpoints)
        if self._inputs.config.warm_start:
            start = self._warm_start(seed, start, checkpoints)
        return start

    def _pretrained(self, seed: int, checkpoints: Checkpoints | None) -> CommonStart:
        """Train some rounds on the training data of all clients in one place."""
        config, label = self._inputs.config, f"pretrained-{seed}{self._inputs.fold_mark}"
        snapshot = checkpoints.latest(label) if checkpoints is not None else None
        if snapshot is not None:
            return CommonStart(snapshot.tensors["w"].to(self._inputs.task().device))
        algorithm = make_algorithm("fedavg", config.training, {})
        task, data = self._inputs.training_parts(seed, algorithm)
        pooled = data.pooled()
        pool = LocalPool(algorithm, task, pooled, seed, workers=config.workers)
        with Loop(algorithm, task, pool, pooled.population(seed), Schedule(1.0)) as loop:
            w = self._server_model_after(config.pretrain, loop, "pre-training")
        if checkpoints is not None:
            checkpoints.save(label, config.pretrain, {"w": w}, {})
        return CommonStart(w)

    def _warm_start(self, seed: int, start: CommonStart, checkpoints: Checkpoints | None) -> CommonStart:
        """Train some rounds of FedAvg; the start has their ledger."""
        config, label = self._inputs.config, f"warm-start-{seed}{self._inputs.fold_mark}"
        rounds, privacy = config.warm_start, config.privacy
        snapshot = checkpoints.latest(label) if checkpoints is not None else None
        if snapshot is not None:
            ledger = Ledger() if privacy is None else Ledger.load(snapshot.tensors)
            return CommonStart(snapshot.tensors["w"].to(self._inputs.task().device), ledger)
        strict = privacy is not None and privacy.strict
        algorithm = make_algorithm("fedavg", config.training, {"weights": "equal"} if strict else {})
        with self._loops.make(algorithm, seed, range(1, rounds + 1), start) as loop:
            w = self._server_model_after(rounds, loop, "warm start")
            ledger = Ledger() if loop.privacy is None else loop.privacy.ledger
        if checkpoints is not None:
            checkpoints.save(label, rounds, {"w": w} | ledger.named(), {})
        return CommonStart(w, ledger)

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
