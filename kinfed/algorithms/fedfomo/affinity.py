"""Weights of others' models by how well they do on one's own examples, and the server's memory of who helps whom.

    w_n = (L_i(θ_i^old) − L_i(θ_n)) / ‖θ_n − θ_i^old‖                   Eq. (3)
    w*_n = max(w_n, 0) / Σ_k max(w_k, 0)                                Eq. (13)

The affinity P[i, n] sums how useful the model of client n proved to client i so far. It decides whose models a client
is sent next, and, read as a graph, which clients belong together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kinfed.core import Tree, kernels, rng
from kinfed.data import Cohort, Split

ROWS_AT_ONCE = 256  # bounds the memory of a choice for very many clients
_BITS = 32  # of a client's number in a pair


@dataclass
class Affinity(Tree):
    """P [K, K], of which only pairs that have met are kept: P begins as the identity, and a client meets few others."""

    pair: Tensor  # [E] int64, ascending: i << 32 | n
    value: Tensor  # [E] float64  P[i, n]

    @classmethod
    def identity(cls) -> Affinity:
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))

    def rows(self, ids: Tensor, others: Tensor) -> Tensor:
        """[A, O] P of the clients `ids` and `others`, both ascending or not."""
        return self._read(_pairs(ids[:, None], others))

    def added(self, ids: Tensor, others: Tensor, growth: Tensor) -> Affinity:
        """P[i, n] + growth [A, m] for each client of `ids` [A] and its own `others` [A, m], which are distinct."""
        pair = _pairs(ids[:, None], others)
        return self._written(pair, self._read(pair) + growth)

    def replaced(self, ids: Tensor, others: Tensor, value: Tensor) -> Affinity:
        """P[i, n] is value [A, O] for the clients `ids` [A] and all `others` [O]."""
        return self._written(_pairs(ids[:, None], others), value)

    def _find(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Places where pairs are or would be, and whether they are known."""
        place = torch.searchsorted(self.pair, pair)
        if not len(self.pair):
            return place, torch.zeros_like(pair, dtype=torch.bool)
        return place, self.pair[place.clamp_max(len(self.pair) - 1)] == pair

    def _read(self, pair: Tensor) -> Tensor:
        place, known = self._find(pair)
        start = ((pair >> _BITS) == (pair & ((1 << _BITS) - 1))).to(torch.float64)  # of the identity
        if not len(self.pair):
            return start
        return torch.where(known, self.value[place.clamp_max(len(self.pair) - 1)], start)

    def _written(self, pair: Tensor, value: Tensor) -> Affinity:
        pair, value = pair.reshape(-1), value.to("cpu", torch.float64).reshape(-1)
        place, known = self._find(pair)
        values = self.value.clone()
        values[place[known]] = value[known]
        pairs = torch.cat([self.pair, pair[~known]])
        order = torch.argsort(pairs)
        return Affinity(pairs[order], torch.cat([values, value[~known]])[order])


def _pairs(ids: Tensor, others: Tensor) -> Tensor:
    return (ids.cpu() << _BITS) | others.cpu()


def choose_models(
    affinity: Affinity, ids: Tensor, available: Tensor, count: int, explore: float, key: Tensor
) -> Tensor:
    """[A, count] int64: for each client of `ids` the available others that it is sent, best first.

        repeat `count` times:
            with probability `explore` take the next of a random order, else the next of the order by affinity

    Clients of equal affinity are in random order, so that "equal chance" is true also before anything is known.
    available bool [K]. Every client must have `count` others. Draws are keyed by (client, other):
    neither the company of `ids` nor who else is available moves them."""
    if not len(ids) or not count:
        return ids.new_empty(len(ids), count)
    others = available.cpu().nonzero().squeeze(1)
    parts = torch.split(ids, ROWS_AT_ONCE)
    return torch.cat([_choose(affinity.rows(part, others), part, others, count, explore, key) for part in parts])


def _choose(affinity: Tensor, ids: Tensor, others: Tensor, count: int, explore: float, key: Tensor) -> Tensor:
    keys = rng.fold(key, ids)
    shuffled = torch.argsort(rng.at(rng.fold(keys, 0)[:, None], others), stable=True)
    by_affinity = torch.argsort(affinity.gather(1, shuffled), dim=1, descending=True, stable=True)
    best_rank = _ranks(shuffled.gather(1, by_affinity))
    random_rank = _ranks(torch.argsort(rng.at(rng.fold(keys, 1)[:, None], others), stable=True))
    explores = rng.uniform(rng.fold(keys, 2), count) < explore
    taken = others == ids[:, None]
    picks = []
    for turn in range(count):
        rank = torch.where(explores[:, turn, None], random_rank, best_rank)
        pick = torch.where(taken, len(others), rank).argmin(1)
        taken = taken | (torch.arange(len(others)) == pick[:, None])
        picks.append(others[pick])
    return torch.stack(picks, 1)


def _ranks(order: Tensor) -> Tensor:
    """The rank of every column in an order: the inverse permutation of each row."""
    return torch.argsort(order, dim=1)


def groups(affinity: Tensor, count: int, seed: int) -> Tensor:
    """[K] int64: spectral clusters of the graph with edges softmax(P), made symmetric; at most `count` of them."""
    clients = len(affinity)
    if count >= clients:
        return torch.arange(clients)
    edges = torch.softmax(affinity.to("cpu", torch.float64), 1)
    graph = (edges + edges.T) / 2
    from sklearn.cluster import SpectralClustering  # slow to import, and only `subglobal` needs it

    clustering = SpectralClustering(count, affinity="precomputed", random_state=seed).fit(graph.numpy())
    _, label = np.unique(clustering.labels_, return_inverse=True)
    return torch.from_numpy(label.astype(np.int64))


Norm = Literal["l2", "l1", "l2sq", "none"]

TINY = 1e-9  # distances and sums below this count as zero


def validation_or_train(data: Cohort) -> Split:
    """Every client's validation examples; the training examples of clients that have none."""
    val, train = data.val, data.train
    lacks = val.count == 0
    if not bool(lacks.any()):
        return val
    start = torch.where(lacks, len(val.rows) + train.start, val.start)
    rows, count = torch.cat([val.rows, train.rows]), torch.where(lacks, train.count, val.count)
    return replace(val, rows=rows, start=start, count=count)


def weigh(gain: Tensor, candidates: list[Tensor], base: Tensor, norm: Norm, trainable: slice) -> tuple[Tensor, Tensor]:
    """Eq. (3): w [n, m] float64, the gain [n, m] per distance of the candidates [n, P] from the base [n, P] in the
    trainable columns; and how many gains were not finite [n]. What is not finite, or at distance 0, weighs nothing."""
    finite = torch.isfinite(gain)
    distance = _distances([rows[:, trainable] for rows in candidates], base[:, trainable], norm).cpu()
    usable = finite & (distance >= TINY)
    return torch.where(usable, gain / distance.clamp_min(TINY), 0.0), (~finite).sum(1)


def _distances(candidates: list[Tensor], base: Tensor, norm: Norm) -> Tensor:
    """[n, m] float64."""
    if norm == "none":
        return torch.ones(len(base), len(candidates), dtype=torch.float64)
    if norm == "l1":
        return kernels.l1_distances(candidates, base)
    square = kernels.squared_distances(candidates, base)
    return square if norm == "l2sq" else square.sqrt()


def mixing_weights(w: Tensor) -> Tensor:
    """Eq. (13): w* [n, m], positive weights scaled to sum to one; all zero if there is none."""
    positive = w.clamp_min(0)
    total = positive.sum(1, keepdim=True)
    return torch.where(total > 0, positive / total, 0.0)
