"""A worker of a remote pool: some clients, with their data and states, in a process of their own.

It trains one method at a time, in a local pool. Whoever drives it sends messages and gets messages; beside the reply
to a round comes a copy of the states that the round has changed, which the driver may keep where it likes and give to
another worker (`restore`), should this one be lost: nothing is acknowledged whose state exists only here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm
from kinfed.core.tree import Nothing, Tree
from kinfed.engine.task import Task
from kinfed.errors import CheckpointError
from kinfed.pools.base import Evaluation, Reply
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.shard import Shard
from kinfed.privacy.dpsgd import EVALUATION, TRAINING, recorded


@dataclass
class StateSnapshot:
    """States of some clients after a round of one run."""

    run: str
    ids: Tensor
    rows: Tree


class Worker:
    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._pool: LocalPool | None = None
        self._run = ""

    def load_shard(self, shard: Shard) -> None:
        """The data of this worker's clients, for all methods until others come."""
        self.close()
        self._shard = shard

    def start_run(self, run: str, algorithm: Algorithm[Any, Any, Any, Any], task: Task, seed: int) -> None:
        """A new run: clients without a state."""
        self.close()
        assert self._shard is not None
        self._run = run
        self._pool = LocalPool(algorithm, task, self._shard, seed, workers=1)

    def train(self, ids: Tensor, down: Tree, round: int, effort: Tensor | None) -> tuple[Reply, StateSnapshot]:
        with recorded(self.pool.task, TRAINING) as record:
            reply = self.pool.train(ids, _rows(ids, down), round, effort)
        reply.record = record
        return reply, self._snapshot(reply.ids)

    def evaluate(
        self, ids: Tensor, down: Tree, round: int, split: str, server_model: Tensor | None, keep_models: bool
    ) -> Evaluation:
        with recorded(self.pool.task, EVALUATION) as record:
            evaluation = self.pool.evaluate(
                ids,
                _rows(ids, down),
                round,
                split=split,
                server_model=None if server_model is None else lambda who: _take(server_model, _positions(ids, who)),
                keep_models=keep_models,
            )
        evaluation.record = record
        return evaluation

    def states(self) -> dict[str, Tensor]:
        return self.pool.states()

    def load(self, tensors: Mapping[str, Tensor]) -> tuple[int, StateSnapshot]:
        """Take over states of a checkpoint: of how many clients, and as what another worker would need."""
        self.pool.load(tensors)
        ids = self.pool.clients.seen
        return len(ids), self._snapshot(ids)

    def restore(self, *snapshots: StateSnapshot) -> None:
        """Take over the states of a worker that was lost, the oldest first."""
        for some in snapshots:
            if some.run != self._run:
                raise CheckpointError(f"client states of run {some.run!r} do not belong to run {self._run!r}")
            if len(some.ids):
                self.pool.clients.put(some.ids, some.rows)

    def _snapshot(self, ids: Tensor) -> StateSnapshot:
        return StateSnapshot(self._run, ids, self.pool.clients.take(ids) if len(ids) else Nothing())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def pool(self) -> LocalPool:
        if self._pool is None:
            raise RuntimeError("this worker has no run; open one first")
        return self._pool


def compact(rows: Tree) -> Tree:
    """Rows for sending: what is the same for all clients goes once."""
    return rows.map(lambda tensor: tensor[:1] if tensor.stride(0) == 0 else tensor)


def _rows(ids: Tensor, down: Tree) -> Callable[[Tensor], Tree]:
    """What `download` is to a local pool, from compact rows."""
    return lambda who: down.map(lambda tensor: _take(tensor, _positions(ids, who)))


def _positions(ids: Tensor, who: Tensor) -> Tensor:
    return torch.searchsorted(ids, who)


def _take(tensor: Tensor, positions: Tensor) -> Tensor:
    if len(tensor) == 1:
        return tensor.expand(len(positions), *tensor.shape[1:])
    return tensor.index_select(0, positions)
