"""Pools of many runs that train as one: clients x runs are the rows of one cohort.

Runs of one method with the same settings and data, such as those of all coalitions of a few clients, differ in who
takes part and in what the server sends. Their requests of a round join (kinfed.pools.steps), and one call of the
method's `client_update` trains the clients of all of them: a client's batches and draws depend on the client and the
round, not on the rows beside it.

    together = object()
    loops = [Loop(algorithm, task, JoinedPool(together, algorithm, task, data, seed), ...) for _ in coalitions]
    reports = in_step([loop.steps() for loop in loops])
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kinfed.core import Tree
from kinfed.pools.base import Download
from kinfed.pools.collect import ChunkUpdate, OrderedUpdates
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.steps import Steps
from kinfed.updates import Updates

JOINED_BYTES = 64 << 20  # of the parameters of rows that are put together
Trained = tuple[Tree, Tree]  # new states and updates


class JoinedPool(LocalPool):
    """The pool of one of these runs; those with the same `together` have one method, task, federation and seed. Clients
    keep no more than the method's own state, and no stage changes updates."""

    def __init__(self, together: Hashable, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.together = together
        if self._beside or self._stages:
            raise ValueError("runs that train together have no stages, and no moments of optimizers that are kept")

    def train(  # type: ignore[override]  # in steps
        self, ids: Tensor, download: Download, round: int, effort: Tensor | None = None, *, hold: bool = False,
        only_mean: bool = False,
    ) -> Steps[Updates]:  # fmt: skip
        client, up = yield TrainRequest(self, ids, round, self._training_state(ids), download(ids))
        self._held = []
        updates = OrderedUpdates(ids, (lambda *results: self._held.append(results)) if hold else self._put)
        updates.add(0, ChunkUpdate(torch.arange(len(ids)), client, {}, up, up.nbytes))
        return updates.updates()

    def trained(self, requests: Sequence[TrainRequest]) -> list[Trained]:
        """Results of several requests, trained as one cohort."""
        ids = torch.cat([one.ids for one in requests])
        state = type(requests[0].state).stack([one.state for one in requests])
        down = type(requests[0].down).stack([one.down for one in requests])
        pieces = self._pieces(self.federation.train, ids)

        def train(piece: Tensor) -> Trained:
            before, sent = (tree.take(piece).to(self.task.device) for tree in (state, down))
            cohort = self._cohort(ids[piece], requests[0].round)
            client, up = self.algorithm.client_update(self.task, before, sent, cohort)
            return client, up.apart_from(before, sent)

        clients, ups = zip(*self._map(train, pieces), strict=True)
        back = torch.argsort(torch.cat(pieces))
        client, up = type(clients[0]).stack(clients).take(back), type(ups[0]).stack(ups).take(back)
        ends = torch.tensor([0, *(len(one.ids) for one in requests)]).cumsum(0).tolist()
        rows = [slice(first, last) for first, last in pairwise(ends)]
        return [(client.take(own), up.take(own)) for own in rows]


@dataclass(frozen=True)
class TrainRequest:
    """A round of training in one run."""

    pool: JoinedPool
    ids: Tensor
    round: int
    state: Tree
    down: Tree

    @property
    def together(self) -> Hashable:
        """Messages of some methods are as long as a round has clients: those of one shape join."""
        return self.pool.together, self.round, tuple((name, t.shape[1:]) for name, t in self.down.named().items())

    def answers(self, requests: Sequence[TrainRequest]) -> list[Trained]:
        most = max(JOINED_BYTES // (4 * self.pool.task.num_params), 1)
        results: list[Trained] = []
        block: list[TrainRequest] = []
        for request in requests:
            if block and sum(len(one.ids) for one in block) + len(request.ids) > most:
                results += self.pool.trained(block)
                block = []
            block.append(request)
        return results + self.pool.trained(block)
