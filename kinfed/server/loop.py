"""The server loop: one method, one seed, any pool. Everything that crosses it is a counted message."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kinfed.algorithms import Algorithm, RoundInfo, check_algorithm_settings
from kinfed.core import Tree, threads
from kinfed.data import Population
from kinfed.engine import Task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools import Evaluation, Pool
from kinfed.privacy import PrivacyBudget, PrivateTask
from kinfed.server.clock import Clock
from kinfed.server.schedule import Schedule
from kinfed.updates import (
    NO_ROBUST_RULE,
    Reply,
    Rule,
    SecureSettings,
    SecureSum,
    UserLevel,
    averaged_fields,
    check_robust,
    robust_rows,
    screen,
    trained_columns,
    without,
)


@dataclass
class RoundReport:
    round: int
    seconds: float
    active: int
    dropped: int  # active clients whose update did not count: lost, too slow, or rejected
    bytes_down: int
    bytes_up: int
    rejected: list[int] = field(default_factory=list)  # clients whose updates could not be used
    reasons: dict[int, str] = field(default_factory=dict)  # of rejections, other than that an update is not finite
    note: str = ""  # what a reader must know about this round
    clock: float | None = None  # simulated seconds since the start, where there is a clock
    staleness: float | None = None  # of asynchronous updates: steps of the server since they started, on average


class Loop:
    """Call `round()` again and again; `evaluate()` whenever you like. A loop has threads or processes until `close`:

    with Loop(...) as loop:
        loop.round()
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any, Any, Any],
        task: Task,
        pool: Pool,
        population: Population,
        schedule: Schedule | None = None,
        *,
        first_round: int = 1,
        privacy: PrivacyBudget | None = None,
        user_level: UserLevel | None = None,
        robust: Rule | None = None,
        largest_norm: float = 0.0,
        secure: SecureSum | None = None,
        evaluated: Tensor | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.task = task
        self.pool = pool
        self.schedule = schedule or Schedule(population.participation)
        # The schedule decides participation; the algorithm is told what happens.
        self.population = replace(population, participation=self.schedule.participation)
        self.completed = first_round - 1
        self.first_round = first_round
        self.privacy = privacy  # of a private `task`: who may still be asked, and what has been
        self.user_level = user_level  # hides whole clients in the server's models
        self.robust = robust  # takes the place of the mean over clients
        self.largest_norm = largest_norm  # of an update that is used; 0: no bound
        self.secure = secure  # the server sees the sum of a round's updates only
        self.evaluated = evaluated  # [n] the clients that `evaluate` asks, ascending; None: all
        self.clock = clock  # of a simulation: how long clients take
        self.now = 0.0  # simulated seconds since the start
        self.took_part = torch.zeros(population.num_clients, dtype=torch.bool)  # [K] whose update came back in a round
        check_algorithm_settings(algorithm, task, self.population)
        if robust is not None and user_level is not None:
            raise ConfigError(NO_ROBUST_RULE)
        if robust is not None:
            check_robust(robust, algorithm, self.schedule.size(population.num_clients))
        if secure is not None:
            SecureSettings.check_server(robust, largest_norm)
        self._trained = trained_columns(algorithm, task)
        with threads.one_thread():
            self.server: Tree = algorithm.init_server(task, self.population)

    @threads.one_thread()
    def round(self) -> RoundReport:
        """One round. If no update arrives that can be used, the server stays as it was before the round; under
        user-level privacy it gets the noise all the same, or one would see that nobody came."""
        began = time.perf_counter()
        number, seed = self.completed + 1, self.population.seed
        info = self._info(number)
        sampled = self.schedule.active(seed, number, self.population.num_clients)
        server, active = self.algorithm.plan(self.server, sampled, info)
        if self.user_level is not None and not torch.equal(active, sampled):
            raise ConfigError(
                f"{type(self.algorithm).__name__} chooses the clients of a round itself, which user-level privacy does "
                "not account for; leave out the method or the user_ settings"
            )
        if self.privacy is not None:
            allowed = self.privacy.within_budget(active)
            if 0 < len(allowed) < len(active):  # what the plan sums or chooses is over those who take part
                server, _ = self.algorithm.plan(self.server, allowed, info)
            active = allowed
        if not len(active) and self.user_level is None:
            self.completed = number
            seconds = time.perf_counter() - began
            return RoundReport(number, seconds, active=0, dropped=0, bytes_down=0, bytes_up=0, clock=self._time())
        ids, effort = active, None
        if self.schedule.dropout:
            ids = ids[~self.schedule.dropouts(seed, number, ids)]
        if self.schedule.stragglers:
            effort = self.schedule.completed_share(seed, number, ids)
            if "keeps stragglers" not in self.algorithm.traits:
                ids, effort = ids[effort >= 1], None
        sent: list[int] = []  # bytes of every message; appending is safe from the pool's threads

        def download(who: Tensor) -> Tree:
            message: Tree = self.algorithm.download(server, who)
            sent.append(message.nbytes)
            return message

        if ids is not active:
            for one in active[~torch.isin(active, ids)]:
                download(one[None])  # a client that will not reply was sent its message all the same
        with nullcontext() if self.privacy is None else self.privacy.recording(ids) as record:
            reply = self.pool.train(ids, download, number, effort) if len(ids) else Reply(ids, None, 0)
            if record is not None and reply.record is not None:
                record.join(reply.record)
        self.took_part[reply.ids] = True
        self._advance(reply, ids, effort, sum(sent) / max(len(active), 1), number)
        reply, note = self._screened(reply) if self.secure is None else self._summed(reply)
        if self.user_level is not None:
            up = self.user_level.mean(reply.up if len(reply.ids) else None, number)
            self.server = self.algorithm.aggregate(server, _STAND_IN, up, info)
        elif len(reply.ids):
            self.server = self.algorithm.aggregate(server, reply.ids, reply.up, info)
        self.completed = number
        before_down, before_up = self.population.exchanged if number == self.first_round else (0, 0)
        return RoundReport(
            round=number,
            seconds=time.perf_counter() - began,
            active=len(active),
            dropped=len(active) - len(reply.ids),
            bytes_down=before_down + sum(sent) + reply.nbytes_down,
            bytes_up=before_up + reply.nbytes,
            rejected=reply.rejected,
            reasons=reply.reasons,
            note=note,
            clock=self._time(),
        )

    def _time(self) -> float | None:
        return None if self.clock is None else self.now

    def _advance(self, reply: Reply, ids: Tensor, effort: Tensor | None, bytes_down: float, number: int) -> None:
        """The round took as long as the slowest client whose update came. Messages are as long for all."""
        if self.clock is None or not len(reply.ids):
            return
        nbytes = bytes_down + reply.nbytes / (len(reply.ids) + len(reply.rejected))
        share = None if effort is None else effort[torch.isin(ids, reply.ids)]
        self.now += float(self.clock.seconds(reply.ids, number, nbytes, share).max())

    def _screened(self, reply: Reply) -> tuple[Reply, str]:
        """What the server makes use of, and a note where that is nothing although clients replied."""
        if self.robust is None and not self.largest_norm:
            return reply, ""  # the pool has left out what is not finite
        reply = screen(reply, self.largest_norm, self._trained)
        if self.robust is None or not len(reply.ids):
            return reply, ""
        if len(reply.ids) < self.robust.least:
            updates, needed = len(reply.ids), self.robust.least
            note = f"{updates} updates are too few for {type(self.robust).__name__}, which needs {needed}; not used"
            return replace(reply, ids=reply.ids[:0], up=None), note
        rows = robust_rows(self.robust, averaged_fields(self.algorithm), reply.up, self._trained)
        return replace(reply, up=rows), ""

    def _summed(self, reply: Reply) -> tuple[Reply, str]:
        """What the server sees of the updates, and a note where that is nothing although clients replied."""
        secure = self.secure
        assert secure is not None
        if not secure.averages or not len(reply.ids):
            return reply, ""
        reply = without(reply, secure.out_of_range(reply.up))
        if (clients := len(reply.ids)) < secure.least:
            note = f"{clients} update(s) are too few to be added up, which takes {secure.least}; not used"
            return replace(reply, ids=reply.ids[:0], up=None, nbytes=0), note
        size = secure.size(reply.up, clients)
        # Under user-level privacy clients shorten their updates first: the sum is taken there.
        up = reply.up if self.user_level is not None else secure.mean(reply.up)
        return replace(reply, up=up, nbytes=size.up, nbytes_down=size.down), ""

    def _info(self, number: int) -> RoundInfo:
        plain = self.task.inner if isinstance(self.task, PrivateTask) else self.task
        return RoundInfo(number - self.first_round + 1, self.population, self.task.trainable, plain)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """`count` more rounds, one at a time."""
        for _ in range(count):
            yield self.round()

    @threads.one_thread()
    def evaluate(self, split: str = "test", *, keep_models: bool = False) -> Evaluation:
        """Clients' personal models and the server's models, on one split: of all clients, or of those that the loop
        was told to evaluate. Training state is untouched."""
        ids = torch.arange(self.population.num_clients) if self.evaluated is None else self.evaluated
        server, _ = self.algorithm.plan(self.server, ids, self._info(self.completed + 1))
        models = self.algorithm.server_models(self.server)
        with nullcontext() if self.privacy is None else self.privacy.evaluating() as record:
            evaluation = self.pool.evaluate(
                ids,
                lambda who: self.algorithm.download(server, who),
                self.completed,
                split=split,
                server_model=None if models is None else models.rows,
                keep_models=keep_models,
            )
            if record is not None and evaluation.record is not None:
                record.join(evaluation.record)
        return replace(evaluation, took_part=self.took_part[evaluation.ids])

    def close(self) -> None:
        """End the pool's threads, processes and connections. May be called twice."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold."""
        server = {f"server.{name}": tensor for name, tensor in self.server.named().items()}
        clients = {f"clients.{name}": tensor for name, tensor in self.pool.states().items()}
        asked = {} if self.privacy is None else self.privacy.named()
        privacy = {f"privacy.{name}": tensor for name, tensor in asked.items()}
        user = {} if self.user_level is None else self.user_level.named()
        user_level = {f"user_level.{name}": tensor for name, tensor in user.items()}
        now = {} if self.clock is None else {_NOW: torch.tensor(self.now, dtype=torch.float64)}
        return server | clients | privacy | user_level | now | {_TOOK_PART: self.took_part.clone()}

    def load(self, completed: int, tensors: Mapping[str, Tensor]) -> None:
        if strange := [name for name in tensors if name not in (_TOOK_PART, _NOW) and not name.startswith(_PARTS)]:
            raise CheckpointError(f"a checkpoint of a method holds no {sorted(strange)[0]}; was it written by kinfed?")
        server = _below(tensors, "server.")
        if server.keys() != self.server.named().keys():
            raise CheckpointError(
                f"server state has fields {sorted(server)}; the method keeps {sorted(self.server.named())}"
            )
        self.server = self.server.like(server).to(self.task.device)
        self.pool.load(_below(tensors, "clients."))
        if self.privacy is not None:
            self.privacy.load(_below(tensors, "privacy."))
        if self.user_level is not None:
            self.user_level.load(_below(tensors, "user_level."))
        took_part = tensors.get(_TOOK_PART)
        if took_part is None or took_part.shape != self.took_part.shape or took_part.dtype != torch.bool:
            raise CheckpointError("the checkpoint does not say which clients of this run have taken part")
        if (self.clock is None) != (_NOW not in tensors):
            raise CheckpointError(
                "only one of the checkpoint and this run has a simulated clock; resume with the same clock and mode"
            )
        self.now = float(tensors.get(_NOW, torch.zeros(())))
        self.took_part = took_part.clone()
        self.completed = completed


_STAND_IN = torch.tensor([0])  # whose update the noisy mean is said to be: the same whoever took part
_TOOK_PART, _NOW = "took_part", "now"
_PARTS = ("server.", "clients.", "privacy.", "user_level.")  # of what a checkpoint holds


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
