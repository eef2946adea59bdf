"""The server loop: one method, one seed, any pool. Everything that crosses it is a counted message."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kinfed.algorithms import Algorithm, AveragingAlgorithm, RoundInfo, check_algorithm_settings
from kinfed.core import Tree, threads
from kinfed.data import Population
from kinfed.engine import Task
from kinfed.errors import CheckpointError, ConfigError
from kinfed.pools import Download, Evaluation, Pool, ServerModelOf, Steps, in_step, stepwise
from kinfed.privacy import PrivacyBudget, PrivateTask, Record
from kinfed.server.schedule import Schedule
from kinfed.updates import ExampleLevel, Road, Stage, Updates, UserLevel


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
    clock: float | None = None  # simulated seconds since the start, with a clock
    staleness: float | None = None  # of asynchronous updates: steps of the server since they started, on average


class Loop:
    """Call `round()` again and again; `evaluate()` whenever you like. A loop has threads or processes until `close`:

    with Loop(...) as loop:
        loop.round()

    `stages` is what happens to updates on their way (kinfed.updates.stages), in any order; the pool must have been
    given the same.
    """

    def __init__(
        self, algorithm: Algorithm[Any, Any, Any, Any], task: Task, pool: Pool, population: Population,
        schedule: Schedule | None = None, stages: Iterable[Stage] = (),
    ) -> None:  # fmt: skip
        self.algorithm, self.task, self.pool = algorithm, task, pool
        self.schedule = schedule or Schedule(population.participation)
        # The schedule decides participation; the algorithm is told what happens.
        self.population = replace(population, participation=self.schedule.participation)
        self.stages = Road(stages)
        self.first_round, self.clock = self.schedule.first_round, self.schedule.clock
        self.completed = self.first_round - 1
        self.now = 0.0  # simulated seconds since the start
        self.took_part = torch.zeros(population.num_clients, dtype=torch.bool)  # [K] whose update came back in a round
        check_algorithm_settings(algorithm, task, self.population)
        for stage in self.stages:
            stage.check(algorithm, self.schedule.size(population.num_clients))
        self._holds = any(stage.refuses for stage in self.stages)
        self._hides_absence = any(stage.hides_absence for stage in self.stages)
        self._only_mean = _is_plain_mean(algorithm) and not self.stages.reads_updates
        with threads.one_thread():
            self.server: Tree = algorithm.init_server(task, self.population)

    @property
    def privacy(self) -> PrivacyBudget | None:
        """Budget of private training: what it has asked of clients' examples, and may still ask."""
        stage = self.stages.find(ExampleLevel)
        return None if stage is None else stage.budget

    @property
    def user_level(self) -> UserLevel | None:
        """The stage that hides whole clients in the server's models."""
        return self.stages.find(UserLevel)

    @threads.one_thread()
    def round(self) -> RoundReport:
        """One round. If no update arrives that can be used, the server stays as it was before the round; under
        user-level privacy it gets the noise even so, or one would see that no client came."""
        return in_step([self.steps()])[0]

    def steps(self) -> Steps[RoundReport]:
        """One round in steps, beside those of other runs (kinfed.pools.steps)."""
        began = time.perf_counter()
        number = self.completed + 1
        info = self._info(number)
        server, active = self._called(info, number)
        if not len(active) and not self._hides_absence:
            self.completed = number
            seconds = time.perf_counter() - began
            return RoundReport(number, seconds, active=0, dropped=0, bytes_down=0, bytes_up=0, clock=self._time())
        ids, effort = self._replying(active, number)
        sent: list[int] = []  # bytes of every message; appending is safe from the pool's threads

        def download(who: Tensor) -> Tree:
            message: Tree = self.algorithm.download(server, who)
            sent.append(message.nbytes)
            return message

        if ids is not active:
            for one in active[~torch.isin(active, ids)]:
                download(one[None])  # a client that will not reply was sent its message all the same
        updates = yield from self._train(ids, download, number, effort)
        self._advance(updates, ids, effort, sum(sent) / max(len(active), 1), number)
        self.server, updates = self._taken(server, updates, info)
        self.completed = number
        return self._report(updates, began, len(active), sum(sent))

    def _called(self, info: RoundInfo, number: int) -> tuple[Tree, Tensor]:
        """The server as the round needs it, and who takes part."""
        sampled = self.schedule.active(self.population.seed, number, self.population.num_clients)
        server, active = self.algorithm.plan(self.server, sampled, info)
        if self._hides_absence and not torch.equal(active, sampled):
            raise ConfigError(
                f"{type(self.algorithm).__name__} chooses the clients of a round itself, which user-level privacy does "
                "not account for; leave out the method or the user_ settings"
            )
        admitted = self.schedule.present(active)  # a method may choose the clients of a round itself
        for stage in self.stages:
            admitted = stage.admitted(admitted)
        if 0 < len(admitted) < len(active):  # what the plan sums or chooses is over the clients that take part
            server, _ = self.algorithm.plan(self.server, admitted, info)
        return server, admitted

    def _replying(self, active: Tensor, number: int) -> tuple[Tensor, Tensor | None]:
        """Active clients who do not drop out, and the share of their work that they do; None: all of it."""
        ids, effort = active, None
        if self.schedule.dropout:
            ids = ids[~self.schedule.dropouts(self.population.seed, number, ids)]
        if self.schedule.stragglers:
            effort = self.schedule.completed_share(self.population.seed, number, ids)
            if "keeps stragglers" not in self.algorithm.traits:
                ids, effort = ids[effort >= 1], None
        return ids, effort

    def _train(
        self, ids: Tensor, download: Download, number: int, effort: Tensor | None = None
    ) -> Steps[Updates]:  # fmt: skip
        with ExitStack() as around:
            records = [around.enter_context(stage.training(ids)) for stage in self.stages]
            if not len(ids):
                return Updates(ids, None, 0)
            updates = yield from stepwise(
                self.pool.train(ids, download, number, effort, hold=self._holds, only_mean=self._only_mean)
            )
            _join(records, updates.record)
        self.took_part[updates.ids] = True
        return updates

    def _taken(self, server: Tree, updates: Updates, info: RoundInfo) -> tuple[Tree, Updates]:
        """The server after these updates, and what it took of them; states of other clients stay as they were."""
        updates = self.stages.at_server(updates, info)
        self.pool.commit(updates.ids)
        if updates.mean is not None:
            assert isinstance(self.algorithm, AveragingAlgorithm)  # what stages with a mean ask for
            return self.algorithm.step(server, updates.mean, replace(info, weight=updates.weight)), updates
        if len(updates.ids):
            return self.algorithm.aggregate(server, updates.ids, updates.rows, info), updates
        return self.server, updates

    def _report(self, updates: Updates, began: float, active: int, bytes_down: int, **more: Any) -> RoundReport:
        before_down, before_up = self.population.exchanged if self.completed == self.first_round else (0, 0)
        return RoundReport(
            round=self.completed, seconds=time.perf_counter() - began, active=active, dropped=active - len(updates.ids),
            bytes_down=before_down + bytes_down + updates.nbytes_down, bytes_up=before_up + updates.nbytes,
            rejected=sorted(updates.refused),
            reasons={client: reason for client, reason in updates.refused.items() if reason}, note=updates.note,
            clock=self._time(), **more,
        )  # fmt: skip

    def _time(self) -> float | None:
        return None if self.clock is None else self.now

    def _advance(self, updates: Updates, ids: Tensor, effort: Tensor | None, bytes_down: float, number: int) -> None:
        """The round took as long as the slowest client whose update came. Messages are as long for all."""
        if self.clock is None or not len(updates.ids):
            return
        nbytes = bytes_down + updates.nbytes / (len(updates.ids) + len(updates.refused))
        share = None if effort is None else effort[torch.isin(ids, updates.ids)]
        self.now += float(self.clock.seconds(updates.ids, number, nbytes, share).max())

    def _info(self, number: int) -> RoundInfo:
        plain = self.task.inner if isinstance(self.task, PrivateTask) else self.task
        return RoundInfo(number - self.first_round + 1, self.population, self.task.trainable, plain)

    def rounds(self, count: int) -> Iterator[RoundReport]:
        for _ in range(count):
            yield self.round()

    @threads.one_thread()
    def evaluate(self, split: str = "test", *, keep_models: bool = False) -> Evaluation:
        """Personal models and the server's on one split, of all clients or those to evaluate. Changes no state."""
        return in_step([self.evaluation_steps(split, keep_models=keep_models)])[0]

    def to_evaluate(self) -> tuple[Tensor, Download, ServerModelOf | None]:
        """The clients of an evaluation, and what each of them is sent."""
        ids = self.schedule.evaluates
        ids = torch.arange(self.population.num_clients) if ids is None else ids
        server, _ = self.algorithm.plan(self.server, ids, self._info(self.completed + 1))
        models = self.algorithm.server_models(self.server)
        return ids, lambda who: self.algorithm.download(server, who), None if models is None else models.rows

    def evaluation_steps(self, split: str = "test", *, keep_models: bool = False) -> Steps[Evaluation]:
        """An evaluation in steps, beside those of other runs."""
        ids, download, server_model = self.to_evaluate()
        with ExitStack() as around:
            records = [around.enter_context(stage.evaluating()) for stage in self.stages]
            evaluation = yield from stepwise(self.pool.evaluate(
                ids, download, self.completed, split=split, server_model=server_model, keep_models=keep_models,
            ))  # fmt: skip
            _join(records, evaluation.record)
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
        stages = {f"{stage.name}.{name}": t for stage in self.stages for name, t in stage.named().items()}
        now = {} if self.clock is None else {_NOW: torch.tensor(self.now, dtype=torch.float64)}
        return server | clients | stages | now | {_TOOK_PART: self.took_part.clone()}

    def load(self, completed: int, tensors: Mapping[str, Tensor]) -> None:
        known = ("server.", "clients.", *(f"{stage.name}." for stage in self.stages))
        if unknown := [name for name in tensors if name not in (_TOOK_PART, _NOW) and not name.startswith(known)]:
            raise CheckpointError(f"a checkpoint of a method holds no {sorted(unknown)[0]}; was it written by kinfed?")
        server, state = below(tensors, "server."), self.server.named()
        if server.keys() != state.keys():
            raise CheckpointError(f"server state has fields {sorted(server)}; the method keeps {sorted(state)}")
        self.server = self._placed(server)
        self.pool.load(below(tensors, "clients."))
        for stage in self.stages:
            stage.load(below(tensors, f"{stage.name}."))
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

    def _placed(self, server: Mapping[str, Tensor]) -> Tree:
        """A server with these tensors, each where the method keeps it: on the device or at the host."""
        places = {name: tensor.device for name, tensor in self.server.named().items()}
        return self.server.like({name: tensor.to(places.get(name, "cpu")) for name, tensor in server.items()})


_TOOK_PART, _NOW = "took_part", "now"


def _is_plain_mean(algorithm: Algorithm[Any, Any, Any, Any]) -> bool:
    """Say whether the server would do nothing with updates but average them by the weights that clients state."""
    parts = (AveragingAlgorithm.aggregate, AveragingAlgorithm.averaged, AveragingAlgorithm.weight)
    methods = (getattr(getattr(algorithm, part.__name__, None), "__func__", None) for part in parts)
    return not algorithm.single_updates and all(one is part for one, part in zip(methods, parts, strict=True))


def _join(records: Iterable[Record | None], other: Record | None) -> None:
    """Add what tasks in other processes were asked to the records of stages that keep one."""
    for record in records:
        if record is not None and other is not None:
            record.join(other)


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, by the rest of their names."""
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
