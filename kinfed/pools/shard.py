"""Clients divided among several processes: who goes where, and the data that each process needs.

A shard is a federation with the data of some clients only. They keep their numbers, by which all draws go, so a client
does the same in whichever process it is; to ask for the data of the others is an error.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm
from kinfed.data import SPLITS, Cohort, Features, Federation, Ragged


def expected_work(algorithm: AnyAlgorithm, federation: Federation) -> Tensor:
    """[K] examples that each client goes through in a round and an evaluation; all are as likely to take part."""
    count = federation.train.count
    per_round = algorithm.training.num_steps(count) * count.clamp_max(algorithm.training.batch)
    return per_round + federation.test.count


def balance(work: Tensor, shards: int) -> list[Tensor]:
    """Ids of each shard, ascending, with about equal sums of work: the largest first, each to who has least so far.

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
    """A federation in which only some clients have examples."""

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
        "weights": None if federation.weights is None else federation.weights[rows], "public": new_rows.get("public"),
        **{name: Ragged(ragged.offsets, new_rows[name]) for name, ragged in owned.items()},
    }  # fmt: skip
    longest = {name: split.longest for name, split in splits.items()}
    return Shard(**(whole | own), is_local=is_local, longest=longest)
