"""A worker of a pool in several processes: some clients, with their data and states, in a process of its own.

It trains one algorithm at a time, in a local pool. Its driver sends messages and gets messages. With the reply to a
round comes a copy of the states that the round changed, which the driver gives to another worker (`restore`) should
this one be lost: no reply is given whose state exists only here.

A shard is a federation with the data of some clients only. They keep their numbers, by which all draws go, so a client
does the same in whichever process it is; to ask for the data of the others is an error.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import Nothing, Tree, empty_rows, is_broadcast, kernels, threads
from kinfed.data import SPLITS, Cohort, Features, Federation, Moments, Ragged
from kinfed.engine import ModuleTask, Task
from kinfed.errors import CheckpointError
from kinfed.pools.base import Download, Evaluation
from kinfed.pools.local_pool import LocalPool
from kinfed.privacy import EVALUATION, TRAINING, recorded
from kinfed.updates import Stage, Updates


def expected_work(algorithm: AnyAlgorithm, federation: Federation) -> Tensor:
    """[K] examples that each client goes through in a round and an evaluation; all are as likely to take part."""
    count = federation.train.count
    per_round = algorithm.training.num_steps(count) * count.clamp_max(algorithm.training.batch)
    return per_round + federation.test.count


def balance(work: Tensor, shards: int) -> list[Tensor]:
    """Ids of each shard, ascending, with about equal sums of work: the largest first, each to the shard with the least
    so far.

    No shard has more than 4/3 of the least possible largest sum (Graham 1969)."""
    if not 1 <= shards <= len(work):
        raise ValueError(f"{len(work)} clients make between 1 and {len(work)} shards; got {shards}")
    load = [(0, 0, number) for number in range(shards)]  # work, clients, number: of equals the one with fewer clients
    members: list[list[int]] = [[] for _ in range(shards)]
    for client in torch.argsort(work, descending=True, stable=True).tolist():
        total, size, number = heapq.heappop(load)
        members[number].append(client)
        heapq.heappush(load, (total + int(work[client]), size + 1, number))
    return [torch.tensor(sorted(ids), dtype=torch.int64) for ids in members]


@dataclass
class Shard(Federation):
    is_local: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # [K] whose data are here
    longest: dict[str, int] = field(default_factory=dict)  # most examples of any client of the whole, by split

    def check(self) -> None:
        """The whole federation was checked; a part of it need not pass, as most of its clients have nothing here."""

    def cohort(self, ids: Tensor, seed: int, round: int, effort: Tensor | None = None) -> Cohort:
        elsewhere = ids[~self.is_local[ids]].tolist()
        if elsewhere:
            raise ValueError(f"clients {elsewhere} do not live in this shard")
        cohort = super().cohort(ids, seed, round, effort)
        parts = {name: replace(getattr(cohort, name), longest=self.longest[name]) for name in SPLITS}
        return replace(cohort, **parts)


def make_shard(federation: Federation, ids: Tensor) -> Shard:
    """The shard of these clients: a copy of the examples they own, each once, and nothing of the others."""
    is_local = torch.zeros(federation.num_clients, dtype=torch.bool)
    is_local[ids] = True
    splits = {name: federation.split(name) for name in SPLITS}
    owned = {name: split.filter(is_local[split.owner]) for name, split in splits.items()}  # other clients' are empty
    lists = {name: ragged.rows for name, ragged in owned.items()}
    if federation.public is not None:
        lists["public"] = federation.public
    rows, position = torch.unique(torch.cat(list(lists.values())), return_inverse=True)
    new_rows = dict(zip(lists, torch.split(position, [len(one) for one in lists.values()]), strict=True))
    whole = {f.name: getattr(federation, f.name) for f in fields(Federation)}
    features = federation.features
    own = {
        "features": Features(features.rows(rows), features.mean, features.std, features.device, features.vectors),
        "labels": federation.labels[rows], "tags": None if federation.tags is None else federation.tags[rows],
        "weights": None if federation.weights is None else federation.weights[rows], "persons": None, "order": None,
        "public": new_rows.get("public"),
        **{name: Ragged(ragged.offsets, new_rows[name]) for name, ragged in owned.items()},
    }  # fmt: skip
    longest = {name: split.longest for name, split in splits.items()}
    return Shard(**(whole | own), is_local=is_local, longest=longest)


@dataclass
class StateSnapshot:
    run: str
    ids: Tensor
    rows: Tree
    beside: dict[str, Moments] = field(default_factory=dict)  # what else clients keep (LocalPool.beside)


Cuts = Mapping[str, Sequence[int]]  # by averaged field: the columns at which its parts begin, and its width
NO_CUTS: Cuts = MappingProxyType({})
Part = dict[str, Tensor]  # by field, some of its columns [n, c]


class Worker:
    """First `load_shard`, then `start_run`; then rounds and evaluations of that run."""

    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._pool: LocalPool | None = None
        self._run = ""

    def load_shard(self, shard: Shard) -> None:
        """The data of this worker's clients, for all runs until another shard is loaded."""
        self.close()
        self._shard = shard

    def start_run(
        self, run: str, algorithm: AnyAlgorithm, task: Task, seed: int, stages: Sequence[Stage] = (),
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """A new run, in which no client has a state yet; `run` is its identity, `device` where this worker computes."""
        self.close()
        assert self._shard is not None
        self._run = run
        if device != "cpu":
            assert isinstance(task, ModuleTask)  # the driver sends no other to a device
            task = task.on(device)
        self._pool = LocalPool(algorithm, task, self._shard, seed, workers=1, stages=stages)

    def train(
        self, ids: Tensor, down: Tree, round: int, effort: Tensor | None, hold: bool = False, cuts: Cuts = NO_CUTS
    ) -> tuple[Updates, StateSnapshot, *tuple[Part, ...]]:
        """One round at the clients `ids` (ascending), with messages as `compact` makes them. Fields with `cuts` are
        left out of the updates (they have no columns there), and come in parts behind them."""
        with recorded(self.pool.task, TRAINING) as record:
            updates = self.pool.train(ids, _download(ids, down), round, effort, hold=hold)
        updates.record = record
        parts = _cut(updates, cuts)
        return updates, self._snapshot(updates.ids), *parts

    def mean(self, share: Tensor, positions: Sequence[Tensor], *parts: Part) -> Part:
        """Σ_m share_m rows[m] of one part of all updates, by field; `positions` of the rows of each worker."""
        means = {}
        with threads.one_thread():
            for name, like in parts[0].items():
                rows = empty_rows(like, len(share), like.shape[1])
                for index, part in zip(positions, parts, strict=True):
                    rows[index] = part[name]
                means[name] = kernels.mean_by_blocks(rows, share)
        return means

    def evaluate(
        self, ids: Tensor, down: Tree, round: int, split: str, server_model: Tensor | None, keep_models: bool
    ) -> Evaluation:
        with recorded(self.pool.task, EVALUATION) as record:
            evaluation = self.pool.evaluate(
                ids, _download(ids, down), round, split=split,
                server_model=None if server_model is None else lambda who: _rows_of(server_model, ids, who),
                keep_models=keep_models,
            )  # fmt: skip
        evaluation.record = record
        return evaluation

    def states(self) -> dict[str, Tensor]:
        return self.pool.states()

    def load(self, tensors: Mapping[str, Tensor]) -> tuple[int, StateSnapshot]:
        """Take over states of a checkpoint: of how many clients they are, and the snapshot that restores them."""
        self.pool.load(tensors)
        ids = self.pool.clients.seen
        return len(ids), self._snapshot(ids)

    def restore(self, wanted: Sequence[Tensor], *snapshots: StateSnapshot) -> None:
        """Take over the `wanted` clients' states of each snapshot, the oldest first."""
        for ids, snapshot in zip(wanted, snapshots, strict=True):
            if snapshot.run != self._run:
                raise CheckpointError(f"client states of run {snapshot.run!r} do not belong to run {self._run!r}")
            if not len(snapshot.ids):
                continue
            rows = torch.isin(snapshot.ids, ids).nonzero().squeeze(1)
            beside = {prefix: moments.take(rows) for prefix, moments in snapshot.beside.items()}
            self.pool.restore(snapshot.ids[rows], snapshot.rows.take(rows), beside)

    def _snapshot(self, ids: Tensor) -> StateSnapshot:
        if not len(ids):
            return StateSnapshot(self._run, ids, Nothing())
        return StateSnapshot(self._run, ids, *self.pool.snapshot(ids))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def pool(self) -> LocalPool:
        if self._pool is None:
            raise RuntimeError("this worker has no run; start one first")
        return self._pool


def _cut(updates: Updates, cuts: Cuts) -> list[Part]:
    """Take the columns of these fields out of the updates, in parts."""
    count = max((len(bounds) - 1 for bounds in cuts.values()), default=0)
    if updates.rows is None:
        return [{} for _ in range(count)]
    flat = {name: getattr(updates.rows, name).flatten(1) for name in cuts}
    updates.rows = replace(updates.rows, **{name: rows[:, :0] for name, rows in flat.items()})
    return [{name: rows[:, cuts[name][k] : cuts[name][k + 1]] for name, rows in flat.items()} for k in range(count)]


Rows = TypeVar("Rows", Tree, Tensor)


def compact(rows: Rows) -> Rows:
    """Rows for sending: what is the same for all clients becomes one row."""
    return _first_if_broadcast(rows) if isinstance(rows, Tensor) else rows.map(_first_if_broadcast)


def _first_if_broadcast(rows: Tensor) -> Tensor:
    return rows[:1] if is_broadcast(rows) else rows


def _download(ids: Tensor, down: Tree) -> Download:
    """The local pool's `download`, from compact rows of the clients `ids`."""
    return lambda who: down.map(lambda tensor: _rows_of(tensor, ids, who))


def _rows_of(rows: Tensor, ids: Tensor, who: Tensor) -> Tensor:
    """Rows [n, ...] of the clients `who` [n], from compact rows of the clients `ids` (ascending)."""
    if len(rows) == 1:
        return rows.expand(len(who), *rows.shape[1:])
    return rows.index_select(0, torch.searchsorted(ids, who))
