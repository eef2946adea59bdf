"""The stages on the road of an update (kinfed.updates.stages) that the settings of a run ask for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kinfed.algorithms import COUNT, DELTA, AnyAlgorithm, averaged_changes, update_template
from kinfed.config import RunConfig
from kinfed.core import Tree
from kinfed.data import Federation, Moments, Population
from kinfed.engine import Task
from kinfed.privacy import check_weights, seeded_noise
from kinfed.updates import (
    Compression,
    RobustAverage,
    Screening,
    SecureSum,
    Stage,
    Staleness,
    UserLevel,
    shortened_fields,
    trained_columns,
)


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
        stages = (
            compression, staleness, self.screening(), self.secure_sum(), self.robust(), self.user_level(rounds)
        )  # fmt: skip
        return [stage for stage in stages if stage is not None]

    def compression(self) -> Compression | None:
        """How updates are coded; changes of models get error feedback."""
        codec = self.config.codec
        if codec is None:
            return None
        changes: tuple[str, ...] = ()
        if not codec.unbiased:
            changes, _ = averaged_changes(self.algorithm, self.task, self.data, self.population)
        return Compression(codec, (DELTA, *changes))

    def staleness(self, compression: Compression | None) -> Staleness | None:
        """How late updates count. Refuses methods that need synchronous rounds."""
        rule = self.config.staleness_rule
        if rule is None:
            return None
        changes = shortened_fields(self.label, self.algorithm, self.task, self.data, self.population)
        template = self._template()
        nbytes = template.nbytes
        if compression is not None:
            nbytes = compression.at_client(template, Moments(), torch.zeros(1, dtype=torch.int64)).nbytes
        return Staleness(rule, changes, nbytes)

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
        update = self._template().named()
        clients = self.data.num_clients
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
        last = self.config.warm_start + self.config.rounds
        return UserLevel(
            privacy, self._template(), averages, seeded_noise(self.population.seed), schedule.client_sampling(clients),
            expected, range(rounds.start, last + 1), summands=clients if self.config.secure_sum else None,
        )  # fmt: skip

    def _template(self) -> Tree:
        server = self.algorithm.init_server(self.task, self.population)
        return update_template(self.algorithm, self.task, self.data, server)
