"""Asynchronous rounds in simulation: clients come and go by the clock, and no step of the server waits for the slowest.

As many clients train at a time as a synchronous round would call. Whoever is done hands in its update and another one,
drawn from those who do not train, gets the model of that moment. When `rule.size` updates are there, the server makes a
step, which is a `round` here: journal, evaluation and checkpoints are those of all loops.

When a client is done depends on the clock alone, never on what it computed, so the work is done when its update is
needed, together with that of others who started from the same model. The order of events at one moment: all who are
done arrive, in the order in which they started; then places are filled. With equal speeds and a buffer as large as the
number of clients at work, this is therefore the synchronous loop, bit for bit.

A client's draws (batches, dropout) are those of the round that follows the version it started from, or of its next one
where it starts twice from the same: no client sees the same batches twice for that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import Algorithm, AnyAlgorithm
from kinfed.core import Tree, rng, threads
from kinfed.data import Population
from kinfed.engine import Task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools import Pool
from kinfed.server.clock import Clock
from kinfed.server.loop import Loop, RoundReport
from kinfed.server.schedule import Schedule
from kinfed.server.staleness import FedAsync, StalenessRule
from kinfed.updates import Reply


@dataclass
class InFlight(Tree):
    """Clients at work, in the order in which they started."""

    ids: Tensor  # [M] int64
    version: Tensor  # [M] int64 rounds that the server had completed when they started
    number: Tensor  # [M] int64 the round that their draws are of
    finish: Tensor  # [M] float64 seconds of the clock

    @classmethod
    def nobody(cls) -> InFlight:
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, none.clone(), none.clone(), torch.zeros(0, dtype=torch.float64))


def check_asynchronous(algorithm: AnyAlgorithm, changes: tuple[str, ...] | str, rule: StalenessRule) -> tuple[str, ...]:
    """The fields of updates that staleness shortens. Refuses methods that need synchronous rounds, with the reason.
    `changes`: what the method averages (kinfed.algorithms.common.message_shape.averaged_changes)."""
    label = type(algorithm).__name__
    if type(algorithm).plan is not Algorithm.plan:
        raise ConfigError(
            f"{label} plans each round for the clients that take part in it, and asynchronous clients come one by one; "
            "leave out the method or --mode"
        )
    if isinstance(changes, str):
        raise ConfigError(
            f"{label} {changes}, so a stale update cannot be given less weight; leave out the method or --mode"
        )
    if isinstance(rule, FedAsync) and changes and changes != ("delta",):
        raise ConfigError(
            f"{label}'s updates hold {', '.join(changes)}, and FedAsync mixes whole models; use --mode fedbuff"
        )
    return changes


class AsyncLoop(Loop):
    def __init__(
        self,
        algorithm: Algorithm[Any, Any, Any, Any],
        task: Task,
        pool: Pool,
        population: Population,
        schedule: Schedule,
        *,
        rule: StalenessRule,
        clock: Clock,
        changes: tuple[str, ...],
        update_bytes: int,
        first_round: int = 1,
        largest_norm: float = 0.0,
        evaluated: Tensor | None = None,
    ) -> None:
        """`changes`: the fields of updates that staleness shortens; `update_bytes`: of an update, for the clock."""
        super().__init__(
            algorithm, task, pool, population, schedule, first_round=first_round, largest_norm=largest_norm,
            evaluated=evaluated, clock=clock,
        )  # fmt: skip
        if schedule.stragglers or schedule.sampling != "fixed":
            raise ConfigError(
                "asynchronous rounds have no stragglers and no Poisson sampling: the clock determines who is slow, and "
                "the number of clients at work is always the same; leave out stragglers and sampling"
            )
        self.rule = rule
        self._changes = changes
        self._update_bytes = update_bytes
        self._flight = InFlight.nobody()
        self._versions: dict[int, Tree] = {}  # the server as it was, by rounds completed, while somebody trains on it
        self._starts = torch.zeros((), dtype=torch.int64)  # how often places have been filled
        self._last_number = torch.zeros(population.num_clients, dtype=torch.int64)  # [K] round of each one's last draws
        if isinstance(rule, FedAsync) and changes:
            models = algorithm.server_models(self.server)
            if models is None or len(models.models) != 1:
                raise ConfigError(
                    f"FedAsync mixes a client's model into the server's single model, and {type(algorithm).__name__} "
                    "has none; use --mode fedbuff"
                )

    @threads.one_thread()
    def round(self) -> RoundReport:
        """A step of the server: what happens until `rule.size` updates are there."""
        began = time.perf_counter()
        assert self.clock is not None
        sent: list[int] = []
        arrived, dropped = InFlight.nobody(), 0
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
        reply, staleness = self._train(arrived)
        self.took_part[reply.ids] = True
        reply, note = self._screened(reply)
        number = self.completed + 1
        if len(reply.ids):
            self.server = self.algorithm.aggregate(self.server, reply.ids, reply.up, self._info(number))
        self.completed = number
        self._forget_versions()
        before_down, before_up = self.population.exchanged if number == self.first_round else (0, 0)
        return RoundReport(
            round=number, seconds=time.perf_counter() - began, active=len(arrived.ids) + dropped,
            dropped=len(arrived.ids) + dropped - len(reply.ids), bytes_down=before_down + sum(sent),
            bytes_up=before_up + reply.nbytes, rejected=reply.rejected, reasons=reply.reasons, note=note,
            clock=self.now, staleness=staleness,
        )  # fmt: skip

    def _fill(self, sent: list[int]) -> None:
        """Start clients until as many are at work as a round would call."""
        clients, seed, version = self.population.num_clients, self.population.seed, self.completed
        places = self.schedule.size(clients) - len(self._flight.ids)
        if not places:
            return
        if not len(self._flight.ids):
            ids = self.schedule.active(seed, version + 1, clients)  # whom a synchronous round would call
        else:
            free = torch.ones(clients, dtype=torch.bool)
            free[self._flight.ids] = False
            idle = free.nonzero().squeeze(1)
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

    def _train(self, arrived: InFlight) -> tuple[Reply, float]:
        """The updates of these clients, in ascending order of ids, as they count; and their mean staleness."""
        groups = sorted(set(zip(arrived.number.tolist(), arrived.version.tolist(), strict=True)))
        replies, staleness = [], []
        for number, version in groups:  # a client's own ones in their order
            server = self._versions[version]
            ids = arrived.ids[(arrived.number == number) & (arrived.version == version)].sort().values

            def download(who: Tensor, server: Tree = server) -> Tree:
                message: Tree = self.algorithm.download(server, who)
                return message

            reply = self.pool.train(ids, download, number)
            if len(reply.ids):
                reply = replace(reply, up=self._weighted(reply.up, version))
            replies.append(reply)
            staleness.append(torch.full((len(ids),), self.completed - version, dtype=torch.float64))
        return _joined(replies), float(torch.cat(staleness).mean())

    def _weighted(self, up: Tree, version: int) -> Tree:
        """Updates of clients that started from a version, as they count."""
        late = self.completed - version
        weight = float(self.rule.weight(torch.tensor([late])))
        fields = {name: getattr(up, name) for name in self._changes}
        if isinstance(self.rule, FedAsync) and late and fields:
            # θ − w = Δ + (the model that the client started from) − w
            gap = self._model(self._versions[version]) - self._model(self.server)
            fields = {name: rows + gap for name, rows in fields.items()}
        if isinstance(self.rule, FedAsync):
            weight *= self.rule.mixing
        if weight == 1:
            return replace(up, **fields)
        return replace(up, **{name: weight * rows for name, rows in fields.items()})

    def _model(self, server: Tree) -> Tensor:
        models = self.algorithm.server_models(server)
        assert models is not None  # checked
        return models.models[0]

    def _forget_versions(self) -> None:
        needed = set(self._flight.version.tolist())
        self._versions = {version: server for version, server in self._versions.items() if version in needed}

    def state(self) -> dict[str, Tensor]:
        flight = {f"async.flight.{name}": tensor.clone() for name, tensor in self._flight.named().items()}
        versions = {
            f"async.server.{version}.{name}": tensor
            for version, server in self._versions.items()
            for name, tensor in server.named().items()
        }
        counts = {"async.starts": self._starts, "async.last_number": self._last_number.clone()}
        return super().state() | flight | versions | counts

    def load(self, completed: int, tensors: Mapping[str, Tensor]) -> None:
        own = {name.removeprefix("async."): tensor for name, tensor in tensors.items() if name.startswith("async.")}
        super().load(completed, {name: tensor for name, tensor in tensors.items() if not name.startswith("async.")})
        try:
            self._flight = self._flight.like(_below(own, "flight."))
            self._starts, self._last_number = own["starts"], own["last_number"].clone()
            servers = _below(own, "server.")
            versions = set(self._flight.version.tolist())  # by these: a server without a state has no tensors
            self._versions = {
                version: self.server.like(_below(servers, f"{version}.")).to(self.task.device) for version in versions
            }
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"the checkpoint does not hold the clients at work of this run: {error}") from error


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _joined(replies: list[Reply]) -> Reply:
    """One reply, in ascending order of ids; a client that is there twice keeps the order of its updates."""
    whole = [reply for reply in replies if len(reply.ids)]
    ids = torch.cat([reply.ids for reply in replies])
    order = torch.argsort(ids, stable=True)
    up = None
    if whole:
        up = type(whole[0].up).stack([reply.up for reply in whole])
        up = up if torch.equal(order, torch.arange(len(order))) else up.take(order)
    return Reply(
        ids[order],
        up,
        sum(reply.nbytes for reply in replies),
        sorted(client for reply in replies for client in reply.rejected),
        {client: reason for reply in replies for client, reason in reply.reasons.items()},
    )
