"""A pool of clients with several architectures: one pool for each, of the clients that have it.

Every client is trained and scored by the pool of its architecture, with the method's code as it is for one. What comes
back is put together in the order of the clients asked; messages have the same shapes everywhere
(kinfed.algorithms.check_architectures), and states stay apart, under the name of their architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kinfed.engine import Architectures, ModuleTask
from kinfed.errors import CheckpointError
from kinfed.pools.base import Download, Evaluation, ServerModelOf
from kinfed.pools.collect import UpdatesCollector, join_evaluations
from kinfed.pools.local_pool import LocalPool
from kinfed.updates import Updates


class GroupPool:
    """`which` [K] is the architecture of every client, `make` the pool of one architecture's task."""

    def __init__(self, task: Architectures, which: Tensor, make: Callable[[ModuleTask], LocalPool]) -> None:
        self.task, self.which = task, which
        self.pools = [make(one) for one in task.tasks]

    def _groups(self, ids: Tensor) -> list[tuple[int, Tensor]]:
        """(number of an architecture, positions among `ids` of the clients that have it), of those that any has."""
        own = self.which[ids]
        places = [(number, (own == number).nonzero().squeeze(1)) for number in range(len(self.pools))]
        return [(number, place) for number, place in places if len(place)]

    def train(
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False,
        only_mean: bool = False,
    ) -> Updates:  # fmt: skip
        together = UpdatesCollector(ids)
        for number, place in self._groups(ids):
            part = None if effort is None else effort[place]
            updates = self.pools[number].train(ids[place], download, round, part, hold=hold)
            came = place[torch.isin(ids[place], updates.ids)]
            together.add(came, updates.rows, updates.nbytes, refused=updates.refused, record=updates.record)
        return together.updates()

    def commit(self, ids: Tensor) -> None:
        for pool in self.pools:
            pool.commit(ids)

    def evaluate(
        self, ids: Tensor, download: Download, round: int, *, split: str = "test",
        server_model: ServerModelOf | None = None, keep_models: bool = False,
    ) -> Evaluation:  # fmt: skip
        groups, parts = self._groups(ids), []
        for number, place in groups:
            part = self.pools[number].evaluate(
                ids[place], download, round, split=split, server_model=server_model, keep_models=keep_models
            )
            models = None if part.models is None else self.task.side_by_side(number, part.models)
            parts.append(replace(part, models=models))
        shared = set.intersection(*(set(part.alternatives) for part in parts))
        parts = [replace(part, alternatives={name: part.alternatives[name] for name in shared}) for part in parts]
        return join_evaluations(ids, [place for _, place in groups], parts)

    def states(self) -> dict[str, Tensor]:
        named = zip(self.task.names, self.pools, strict=True)
        states = {f"{name}.{key}": tensor for name, pool in named for key, tensor in pool.states().items()}
        return states | {"ids": torch.cat([pool.states()["ids"] for pool in self.pools])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = {key: tensor for key, tensor in tensors.items() if key != "ids"}
        for name, pool in zip(self.task.names, self.pools, strict=True):
            part = {key.removeprefix(f"{name}."): own.pop(key) for key in list(own) if key.startswith(f"{name}.")}
            pool.load(part)
        if own:
            raise CheckpointError(f"client states of another architecture: {min(own)}; there are {self.task.names}")

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
