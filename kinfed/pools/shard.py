"""Clients dealt to several processes: who goes where, and the data that each process needs.

A shard is a federation in which only some clients are at home. They keep their numbers, by which all draws go, so a
client does the same wherever it lives; the others' data are not there, and asking for them is an error.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm
from kinfed.data.features import Features
from kinfed.data.federation import SPLITS, Cohort, Federation
from kinfed.data.ragged import Ragged


def expected_work(algorithm: Algorithm[Any, Any, Any, Any], federation: Federation) -> Tensor:
    """[K] examples that a round and an evaluation take each client through. All clients are as likely to be called."""
    count = federation.train.count
    trained = algorithm.training.num_steps(count) * count.clamp_max(algorithm.training.batch)
    return trained + federation.test.count


def balance(work: Tensor, shards: int) -> list[Tensor]:
    """Ids of each shard, ascending, with about equal sums of work: the largest first, each to who has least so far.

    No shard has more than 4/3 of the least possible largest sum (Graham 1969)."""
    if not 1 <= shards <= len(work):
        raise ValueError(f"{len(work)} clients make between 1 and {len(work)} shards; got {shards}")
    load = [(0, 0, number) for number in range(shards)]  # work, clients, number: of equals the one with fewer clients
    members: list[list[int]] = [[] for _ in range(shards)]
    for client in torch.argsort(work, descending=True, stable=True).tolist():
        sum_, size, number = heapq.heappop(load)
        members[number].append(client)
        heapq.heappush(load, (sum_ + int(work[client]), size + 1, number))
    return [torch.tensor(sorted(ids), dtype=torch.int64) for ids in members]


@dataclass
class Shard(Federation):
    slot_of: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # [K] whose data are here
    longest: dict[str, int] = field(default_factory=dict)  # most examples of any client of the whole, by split

    def check(self) -> None:
        """The whole federation was checked; a part of it need not pass, as most of its clients have nothing here."""

    def cohort(self, ids: Tensor, seed: int, round: int, effort: Tensor | None = None) -> Cohort:
        if not bool(self.slot_of[ids].all()):
            away = ids[~self.slot_of[ids]].tolist()
            raise ValueError(f"clients {away} do not live in this shard")
        cohort = super().cohort(ids, seed, round, effort)
        parts = {name: replace(getattr(cohort, name), longest=self.longest[name]) for name in SPLITS}
        return replace(cohort, **parts)


def make_shard(federation: Federation, ids: Tensor) -> Shard:
    """The shard of these clients: a copy of the examples they own, each once, and nothing of the others."""
    slot_of = torch.zeros(federation.num_clients, dtype=torch.bool)
    slot_of[ids] = True
    owned = {name: _only(federation.split(name), slot_of) for name in SPLITS}
    snapshots, slot = torch.unique(torch.cat([ragged.rows for ragged in owned.values()]), return_inverse=True)
    sizes = [len(ragged.rows) for ragged in owned.values()]
    moved = dict(zip(owned, torch.split(slot, sizes), strict=True))
    whole = {f.name: getattr(federation, f.name) for f in fields(Federation)}
    all_ = federation.features
    own = {
        "features": Features(all_.rows(snapshots), all_.mean, all_.std, all_.device, all_.vectors),
        "labels": federation.labels[snapshots],
        "tags": None if federation.tags is None else federation.tags[snapshots],
        **{name: Ragged(ragged.offsets, moved[name]) for name, ragged in owned.items()},
    }
    longest = {name: int(federation.split(name).count.max()) for name in SPLITS}
    return Shard(**(whole | own), slot_of=slot_of, longest=longest)


def _only(ragged: Ragged, slot_of: Tensor) -> Ragged:
    """The lists of those at home; the others' are empty."""
    return ragged.filter(slot_of[ragged.owner])
