"""Asynchronous rounds in simulation: clients come and go by the clock, and no step of the server waits for the slowest.

As many clients train at a time as a synchronous round would call. A client that is done hands in its update and another
one, drawn from those that are idle, gets the model of that moment. When `rule.size` updates are there, the server makes
a step, which is a `round` here: journal, evaluation and checkpoints are those of all loops.

When a client is done depends on the clock alone, never on what it computed, so the work is done when its update is
needed, together with that of others who started from the same model. The order of events at one moment: all who are
done arrive, in the order in which they started; then places are filled. With equal speeds and a buffer as large as the
number of clients at work, this is therefore the synchronous loop, bit for bit.

A client's draws (batches, dropout) are those of the round that follows the version it started from, or of its next one
where it starts twice from the same: no client sees the same batches twice for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import Algorithm, RoundInfo
from kinfed.core import Tree, rng
from kinfed.data import Population
from kinfed.engine import Task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools import Pool, Steps
from kinfed.server.loop import Loop, RoundReport, below
from kinfed.server.schedule import Schedule
from kinfed.updates import Stage, Staleness, Updates


@dataclass
class InFlight(Tree):
    """Clients at work, in the order in which they started."""

    ids: Tensor  # [M] int64
    version: Tensor  # [M] int64 rounds that the server had completed when they started
    number: Tensor  # [M] int64 the round that their draws are of
    finish: Tensor  # [M] float64 seconds of the clock

    @classmethod
    def empty(cls) -> InFlight:
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none.clone(), none.clone(), torch.zeros(0, dtype=torch.float64))


class AsyncLoop(Loop):
    """A loop whose stages include `Staleness`, and whose schedule has a clock."""

    def __init__(
        self, algorithm: Algorithm[Any, Any, Any, Any], task: Task, pool: Pool, population: Population,
        schedule: Schedule, stages: Iterable[Stage],
    ) -> None:  # fmt: skip
        super().__init__(algorithm, task, pool, population, schedule, stages)
        staleness = self.stages.find(Staleness)
        if staleness is None or schedule.clock is None:
            raise ConfigError("asynchronous rounds need a rule for stale updates and a clock; use --mode and --clock")
        if schedule.stragglers or schedule.sampling != "fixed":
            raise ConfigError(
                "asynchronous rounds have no stragglers and no Poisson sampling: the clock determines who is slow, and "
                "the number of clients at work is always the same; leave out stragglers and sampling"
            )
        self.rule, self._update_bytes = staleness.rule, staleness.update_bytes
        self._mixes_models = self.rule.mixes_models and bool(staleness.changes)
        self._flight = InFlight.empty()
        self._versions: dict[int, Tree] = {}  # the server as it was, by rounds completed, while a client trains on it
        self._starts = torch.zeros((), dtype=torch.int64)  # how often places have been filled
        self._last_number = torch.zeros(population.num_clients, dtype=torch.int64)  # [K] round of each one's last draws
        if self._mixes_models:
            models = algorithm.server_models(self.server)
            if models is None or len(models.models) != 1:
                raise ConfigError(
                    f"FedAsync mixes a client's model into the server's single model, and {type(algorithm).__name__} "
                    "has none; use --mode fedbuff"
                )

    def steps(self) -> Steps[RoundReport]:
        """A step of the server: what happens until `rule.size` updates are there."""
        began = time.perf_counter()
        assert self.clock is not None
        sent: list[int] = []
        arrived, dropped = InFlight.empty(), 0
        while len(arrived.ids) < self.rule.size:
            if not len(self._flight.ids) or float(self._flight.finish.min()) > self.now:
                self._fill(sent)
            first = int(self._flight.finish.argmin())  # of equals the one that started first
            one = self._flight.take(slice(first, first + 1))
            others = torch.arange(len(self._flight.ids)) != first
            self._flight = self._flight.take(others.nonzero().squeeze(1))
            self.now = float(one.finish)
            if bool(self.schedule.dropouts(self.population.seed, one.number, one.ids)):  # type: ignore[arg-type]
                dropped += 1
            else:
                arrived = InFlight.stack([arrived, one])
        info = self._info(self.completed + 1)
        updates, staleness = yield from self._trained(arrived, info)
        if len(updates.ids):
            self.server = self.algorithm.aggregate(self.server, updates.ids, updates.rows, info)
        self.completed += 1
        needed = set(self._flight.version.tolist())
        self._versions = {version: server for version, server in self._versions.items() if version in needed}
        return self._report(updates, began, len(arrived.ids) + dropped, sum(sent), staleness=staleness)

    def _fill(self, sent: list[int]) -> None:
        """Start clients until as many are at work as a round would call."""
        clients, seed, version = self.population.num_clients, self.population.seed, self.completed
        places = self.schedule.size(clients) - len(self._flight.ids)
        if not places:
            return
        if not len(self._flight.ids):
            ids = self.schedule.active(seed, version + 1, clients)  # whom a synchronous round would call
        else:
            everyone = torch.arange(clients)
            idle = everyone[~torch.isin(everyone, self._flight.ids)]
            ids = idle[rng.choose(rng.fold(rng.root(seed, "asynchronous start"), self._starts), len(idle), places)]
        self._starts = self._starts + 1
        self._versions.setdefault(version, self.server)
        down = self.algorithm.download(self.server, ids).nbytes
        sent.append(down)
        number = torch.maximum(self._last_number[ids] + 1, torch.full_like(ids, version + 1))
        self._last_number[ids] = number
        assert self.clock is not None
        finish = self.now + self.clock.seconds(ids, number, down / len(ids) + self._update_bytes)
        self._flight = InFlight.stack([self._flight, InFlight(ids, torch.full_like(ids, version), number, finish)])

    def _trained(self, arrived: InFlight, info: RoundInfo) -> Steps[tuple[Updates, float]]:
        """The updates of these clients, in ascending order of ids, as they count; and their mean staleness."""
        groups = sorted(set(zip(arrived.number.tolist(), arrived.version.tolist(), strict=True)))
        parts, staleness = [], []
        for number, version in groups:  # a client's own ones in their order
            server, late = self._versions[version], self.completed - version
            ids = arrived.ids[(arrived.number == number) & (arrived.version == version)].sort().values

            def download(who: Tensor, server: Tree = server) -> Tree:
                message: Tree = self.algorithm.download(server, who)
                return message

            updates = replace((yield from self._train(ids, download, number)), lag=late)
            if self._mixes_models and late:
                updates.drift = self._model(server) - self._model(self.server)
            updates = self.stages.at_server(updates, info)
            self.pool.commit(updates.ids)
            parts.append(updates)
            staleness.append(torch.full((len(ids),), late, dtype=torch.float64))
        return _joined(parts), float(torch.cat(staleness).mean())

    def _model(self, server: Tree) -> Tensor:
        models = self.algorithm.server_models(server)
        assert models is not None  # checked
        return models.models[0]

    def state(self) -> dict[str, Tensor]:
        flight = {f"async.flight.{name}": tensor.clone() for name, tensor in self._flight.named().items()}
        servers = {f"async.server.{version}": server.named() for version, server in self._versions.items()}
        versions = {f"{prefix}.{name}": tensor for prefix, one in servers.items() for name, tensor in one.items()}
        counts = {"async.starts": self._starts, "async.last_number": self._last_number.clone()}
        return super().state() | flight | versions | counts

    def load(self, completed: int, tensors: Mapping[str, Tensor]) -> None:
        own = below(tensors, "async.")
        super().load(completed, {name: tensor for name, tensor in tensors.items() if not name.startswith("async.")})
        try:
            self._flight = self._flight.like(below(own, "flight."))
            self._starts, self._last_number = own["starts"], own["last_number"].clone()
            servers = below(own, "server.")
            versions = set(self._flight.version.tolist())  # by these: a server without a state has no tensors
            self._versions = {version: self._placed(below(servers, f"{version}.")) for version in versions}
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not hold the clients at work of this run: {error}") from error


def _joined(parts: list[Updates]) -> Updates:
    """Updates in ascending order of ids; a client that is there twice keeps the order of its updates."""
    whole = [updates for updates in parts if len(updates.ids)]
    ids = torch.cat([updates.ids for updates in parts])
    order = torch.argsort(ids, stable=True)
    rows = None
    if whole:
        rows = type(whole[0].rows).stack([updates.rows for updates in whole])
        rows = rows if torch.equal(order, torch.arange(len(order))) else rows.take(order)
    refused = {client: reason for updates in parts for client, reason in updates.refused.items()}
    return Updates(ids[order], rows, sum(updates.nbytes for updates in parts), refused)
