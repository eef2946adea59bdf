"""A method before its first round: its pool of clients, its schedule, and its privacy and secure sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfed.algorithms import COUNT, DELTA, AnyAlgorithm, averaged_changes, prepare_data, update_template
from kinfed.config import RunConfig
from kinfed.data import Federation, Moments, Population
from kinfed.engine import Task
from kinfed.pools import LocalPool, Pool, physical_memory
from kinfed.privacy import Ledger, check_weights, make_budget, seeded_noise
from kinfed.runs.run_inputs import RunInputs
from kinfed.server import AsyncLoop, Clock, Loop, check_asynchronous, gradients_per_round
from kinfed.updates import Compression, SecureSum, UserLevel

if TYPE_CHECKING:
    from kinfed.pools import RayCluster


@dataclass(frozen=True)
class CommonStart:
    """Where all algorithms of a seed begin."""

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
        user_level = _user_level(config, algorithm, task, data, population, rounds)
        secure = secure_sum(config, type(algorithm).__name__, algorithm, task, data, population)
        compression = _compression(config, algorithm, task, data, population)
        budget = None
        if config.privacy is not None:
            active = [schedule.active(seed, number, data.num_clients) for number in rounds]
            calls = torch.bincount(torch.cat(active), minlength=data.num_clients)
            budget = make_budget(
                config.privacy, algorithm, task, seeded_noise(seed), data.train.count, calls, start.ledger
            )
            task = budget.task
        pool: Pool
        if config.pool == "ray":
            pool = self._ray().pool(algorithm, task, data, seed, compression)
        else:
            pool = LocalPool(
                algorithm, task, data, seed, workers=config.workers, state_folder=state_folder,
                state_bytes=(physical_memory() or 0) // 4 if config.state == "auto" else 0,
                evaluated=inputs.evaluated(seed), compression=compression,
            )  # fmt: skip
        clock = _clock(config, algorithm, data, seed)
        rule = config.staleness_rule
        if rule is not None and rounds.start > config.warm_start:  # the warm start itself is synchronous
            assert clock is not None
            changes = check_asynchronous(algorithm, averaged_changes(algorithm, task, data, population), rule)
            return AsyncLoop(
                algorithm, task, pool, population, schedule, rule=rule, clock=clock, changes=changes,
                update_bytes=_update_bytes(algorithm, task, data, population, compression), first_round=rounds.start,
                largest_norm=config.largest_norm, evaluated=inputs.evaluated(seed),
            )  # fmt: skip
        return Loop(
            algorithm, task, pool, population, schedule, first_round=rounds.start, privacy=budget,
            user_level=user_level, robust=config.robust_rule, largest_norm=config.largest_norm, secure=secure,
            evaluated=inputs.evaluated(seed), clock=clock,
        )  # fmt: skip

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


def _clock(config: RunConfig, algorithm: AnyAlgorithm, data: Federation, seed: int) -> Clock | None:
    speeds = config.speeds
    return None if speeds is None else Clock(speeds, gradients_per_round(algorithm, data.train.count), seed)


def _update_bytes(
    algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population, compression: Compression | None
) -> int:
    """Of one client's update, as it is sent."""
    template = update_template(algorithm, task, data, algorithm.init_server(task, population))
    if compression is None:
        return template.nbytes
    return compression.send(template, Moments(), torch.zeros(1, dtype=torch.int64))[2]


def _compression(
    config: RunConfig, algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population
) -> Compression | None:
    """How updates are sent; changes of models get error feedback."""
    codec = config.codec
    if codec is None:
        return None
    changes = () if codec.unbiased else averaged_changes(algorithm, task, data, population)
    return Compression(codec, (DELTA,) if isinstance(changes, str) else (DELTA, *changes))


def _user_level(
    config: RunConfig, algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population, rounds: range
) -> UserLevel | None:
    privacy, schedule, clients = config.user_privacy, config.schedule, data.num_clients
    if privacy is None:
        return None
    privacy.check(type(algorithm).__name__, algorithm, task)
    assert not isinstance(algorithm.averages, str)  # checked
    template = update_template(algorithm, task, data, algorithm.init_server(task, population))
    expected = schedule.expected_replies(clients, keeps_stragglers="keeps stragglers" in algorithm.traits)
    sampling = schedule.client_sampling(clients)
    # A warm start is over before the rounds of a method begin, and has the noise that is right for both together.
    last = config.warm_start + config.rounds
    return UserLevel(
        privacy, template, algorithm.averages, seeded_noise(population.seed), sampling, expected,
        range(rounds.start, last + 1), summands=clients if config.secure_sum else None,
    )  # fmt: skip


def secure_sum(
    config: RunConfig, label: str, algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population
) -> SecureSum | None:
    """The secure sum that the configuration asks for, after the method was held against it."""
    settings = config.secure
    if settings is None:
        return None
    settings.check_method(label, algorithm)
    check_weights(data, "secure_sum hides single updates, and not")
    assert not isinstance(algorithm.averages, str)  # checked
    update = update_template(algorithm, task, data, algorithm.init_server(task, population)).named()
    settings.check_update(label, algorithm, update, config.schedule.size(data.num_clients))
    total = int(data.train.count.sum()) if COUNT in update else data.num_clients
    return SecureSum(settings, algorithm.averages, total)
