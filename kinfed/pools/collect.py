"""Updates of a round and evaluations, put together from parts in the order of the clients asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kinfed.core import Tree, empty_rows
from kinfed.data import Moments
from kinfed.engine import Score
from kinfed.pools.base import Evaluation
from kinfed.privacy import Record
from kinfed.updates import Updates


class UpdatesCollector:
    """Collects the updates of the clients `ids`; parts may come in any order."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._replied = torch.zeros(len(ids), dtype=torch.bool)
        self._rows: Tree | None = None  # of all updates, in the order of `ids`
        self._nbytes = 0
        self._refused: dict[int, str] = {}
        self._record: Record | None = None

    def add(
        self, positions: Tensor, up: Tree | None, nbytes: int, *, refused: Mapping[int, str] | None = None,
        record: Record | None = None,
    ) -> None:  # fmt: skip
        """Updates of the clients ids[positions], one row each; `nbytes` and `refused` of all who sent one. `up` may be
        kept as it is: it must not change any more."""
        self._nbytes += nbytes
        self._refused |= refused or {}
        self._record = join_records(self._record, record)
        if up is None or not positions.numel():
            return
        self._replied[positions] = True
        if self._rows is None and positions.numel() == self._ids.numel():  # all at once
            self._rows = up.sorted_by(positions)
            return
        if self._rows is None:
            self._rows = up.map(lambda tensor: empty_rows(tensor, len(self._ids), *tensor.shape[1:]))
        self._rows.put(positions, up)

    def updates(self) -> Updates:
        ids, rows = self._ids, self._rows
        if not bool(self._replied.all()):
            good = self._replied.nonzero().squeeze(1)
            ids, rows = ids[good], None if rows is None else rows.take(good)
        return Updates(ids, rows, self._nbytes, self._refused, record=self._record)


def join_evaluations(ids: Tensor, positions: Sequence[Tensor], parts: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of `ids` from parts, whose clients are ids[positions[i]]."""
    back = torch.argsort(torch.cat(list(positions)))

    def rows(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().to("cpu") for tensor in tensors])[back]

    def scores(some: list[Score | None]) -> Score | None:
        known = [score for score in some if score is not None]
        return Score.joined(known, back) if known else None

    models = [part.models for part in parts if part.models is not None]
    alternatives = {name: scores([part.alternatives[name] for part in parts]) for name in parts[0].alternatives}
    record = reduce(join_records, [part.record for part in parts])
    return Evaluation(
        ids, scores([part.personal for part in parts]), scores([part.server_model for part in parts]),
        {name: rows([part.figures[name] for part in parts]) for name in parts[0].figures},
        torch.cat(models)[back] if models else None,
        {name: score for name, score in alternatives.items() if score is not None}, record,
    )  # fmt: skip


def join_records(one: Record | None, other: Record | None) -> Record | None:
    """Join the records of private tasks in two places."""
    if one is None or other is None:
        return one or other
    one.join(other)
    return one


Keep = Callable[[Tensor, Tree, dict[str, Moments]], None]  # ids [n], their new states, what else they keep


@dataclass
class ChunkUpdate:
    """Result of one chunk of a round, one row per client."""

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
        self._ids, self._keep, self._collector = ids, keep, UpdatesCollector(ids)
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
