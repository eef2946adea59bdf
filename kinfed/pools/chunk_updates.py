"""What comes out of a round that worker threads compute in chunks: updates for the server, states for the stores."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from kinfed.core import Tree
from kinfed.data import Moments
from kinfed.pools.collect import ReplyCollector
from kinfed.pools.store import ClientStore, MomentStore
from kinfed.updates import Reply


@dataclass
class ChunkUpdate:
    """What came out of one chunk of a round, one row per client."""

    piece: Tensor  # positions of its clients in the cohort
    client: Tree  # new states
    beside: dict[str, Moments]  # what else the clients keep, by the prefix of its names
    up: Tree  # as it arrives
    nbytes: int  # of it, as it was sent

    def finite(self) -> Tensor:
        """[n] whose update and new state can be used."""
        rows = self.piece.numel()
        good = self.up.finite_rows(rows)
        for tree in (self.client, *self.beside.values()):
            good &= tree.finite_rows(rows)
        return good

    def take(self, index: Tensor) -> ChunkUpdate:
        beside = {prefix: rows.take(index) for prefix, rows in self.beside.items()}
        return ChunkUpdate(self.piece[index], self.client.take(index), beside, self.up.take(index), self.nbytes)


class OrderedUpdates:
    """Updates and new client states of the chunks of a round, added by the worker threads themselves.

    Chunks enter in their own order, whichever is done first, so that the store does not depend on the number of
    workers. The calling thread leaves all copying to the workers: torch would spread it over more threads, and those
    would then take the cores from the workers while they wait for the next piece."""

    def __init__(
        self, ids: Tensor, clients: ClientStore[Tree], beside: dict[str, MomentStore], keeps: Tensor | None
    ) -> None:
        self._ids = ids
        self._clients = clients
        self._keeps = keeps
        self._beside = beside
        self._collector = ReplyCollector(ids)
        self._lock = threading.Lock()
        self._early: dict[int, tuple[ChunkUpdate, Tensor]] = {}
        self._next = 0

    def add(self, number: int, update: ChunkUpdate) -> None:
        """Of chunk `number`. Clients whose update or state is not finite are rejected."""
        good = update.finite()
        with self._lock:
            self._early[number] = (update, good)
            while self._next in self._early:
                self._enter(*self._early.pop(self._next))
                self._next += 1

    def _enter(self, update: ChunkUpdate, good: Tensor) -> None:
        nbytes, rejected = update.nbytes, []
        if not bool(good.all()):
            rejected = self._ids[update.piece[~good]].tolist()
            update = update.take(good.nonzero().squeeze(1))
        self._collector.add(update.piece, update.up, nbytes, rejected=rejected)
        if update.piece.numel():
            who = self._ids[update.piece]
            if self._keeps is None:
                self._clients.put(who, update.client)
            elif bool((kept := self._keeps[who]).any()):
                self._clients.put(who[kept], update.client.take(kept.nonzero().squeeze(1)))
            for prefix, rows in update.beside.items():
                self._beside[prefix].put(who, rows)

    def reply(self) -> Reply:
        return self._collector.reply()
