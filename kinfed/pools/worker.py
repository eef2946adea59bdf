"""A worker of a pool in several processes: some clients, with their data and states, in a process of its own.

It trains one algorithm at a time, in a local pool. Its driver sends messages and gets messages. With the reply to a
round comes a copy of the states that the round changed, which the driver gives to another worker (`restore`) should
this one be lost: no reply is given whose state exists only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.core import Nothing, Tree, is_broadcast
from kinfed.data import Moments
from kinfed.engine import ModuleTask, Task
from kinfed.errors import CheckpointError
from kinfed.pools.base import Download, Evaluation
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.shard import Shard
from kinfed.privacy import EVALUATION, TRAINING, recorded
from kinfed.updates import Stage, Updates


@dataclass
class StateSnapshot:
    """States of some clients after a round of one run."""

    run: str
    ids: Tensor
    rows: Tree
    beside: dict[str, Moments] = field(default_factory=dict)  # what else clients keep (LocalPool.beside)


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
        self, ids: Tensor, down: Tree, round: int, effort: Tensor | None, hold: bool = False
    ) -> tuple[Updates, StateSnapshot]:
        """One round at the clients `ids` (ascending), with messages as `compact` makes them."""
        with recorded(self.pool.task, TRAINING) as record:
            updates = self.pool.train(ids, _download(ids, down), round, effort, hold=hold)
        updates.record = record
        return updates, self._snapshot(updates.ids)

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
        """Take over states of the `wanted` clients of each snapshot, the oldest first: of a worker that was lost, or of
        a round that was held."""
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
