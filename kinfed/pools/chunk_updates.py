"""What comes out of a round that worker threads compute in chunks: updates for the server, states for the stores."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kinfed.core import Tree
from kinfed.data import Moments
from kinfed.pools.collect import UpdatesCollector
from kinfed.updates import Updates

Keep = Callable[[Tensor, Tree, dict[str, Moments]], None]  # ids [n], their new states, what else they keep


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

    def __init__(self, ids: Tensor, keep: Keep) -> None:
        """`keep`: what is done with new states."""
        self._ids = ids
        self._keep = keep
        self._collector = UpdatesCollector(ids)
        self._lock = threading.Lock()
        self._early: dict[int, tuple[ChunkUpdate, Tensor]] = {}
        self._next = 0

    def add(self, number: int, update: ChunkUpdate) -> None:
        """Add chunk `number`. Clients whose update or state is not finite are refused."""
        good = update.finite()
        with self._lock:
            self._early[number] = (update, good)
            while self._next in self._early:
                self._enter(*self._early.pop(self._next))
                self._next += 1

    def _enter(self, update: ChunkUpdate, good: Tensor) -> None:
        nbytes, refused = update.nbytes, {}
        if not bool(good.all()):
            refused = dict.fromkeys(self._ids[update.piece[~good]].tolist(), "")
            update = update.take(good.nonzero().squeeze(1))
        self._collector.add(update.piece, update.up, nbytes, refused=refused)
        if update.piece.numel():
            self._keep(self._ids[update.piece], update.client, update.beside)

    def updates(self) -> Updates:
        return self._collector.updates()
