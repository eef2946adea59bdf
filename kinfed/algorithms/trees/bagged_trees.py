"""Bagged trees: in every round each client grows one tree of its own, and the server adds their average.

FedXgbBagging of Flower (adap/flower, xgboost-comprehensive): boosting whose every step is a forest of local trees, with
the step shared out among the clients of the round (its `scaled-lr`).

    F_{m+1}(x) = F_m(x) + (1/n) Σ_k t_mk(x),      t_mk grown on client k's rows from their gradients at F_m

A split is a client's alone: it sees no other rows, so that small clients grow small trees, or none. `trees` asks for
sums of histograms instead and grows the trees of pooled rows; this one takes one round and a few hundred numbers a
tree, and shows what that costs.

Deviations. Bins are common to all clients, from two rounds of counts, as those of `trees`; Flower's clients have their
own. Clients count equally, as there. The model is the same for all clients; there is no personal part.

Limits: one client is plain boosting on its rows. What a client sends is grown on its rows alone and reaches all others,
so that neither secure sums nor averages of updates apply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.trees.tree_client import OwnRows, cell_counts
from kinfed.algorithms.trees.tree_messages import COUNT, COUNT_AGAIN, GROW, SUMS, UNIT, WEIGHT
from kinfed.algorithms.trees.tree_rows import check_trees, model_rows
from kinfed.author import (
    Algorithm,
    Cohort,
    Nothing,
    Population,
    RoundInfo,
    ServerModels,
    Task,
    Tree,
    option,
)
from kinfed.engine.trees import LocalTrees, TreeLoss, Trees, bin_edges, divided_cells, first_cells

Array = np.ndarray[Any, Any]
CELLS = 512


@dataclass
class Forest(Tree):
    """M trees of all clients."""

    feature: Tensor  # [M, I] int16
    split: Tensor  # [M, I] uint8
    missing: Tensor  # [M, I] uint8
    value: Tensor  # [M, L, C] float32

    @property
    def trees(self) -> Trees:
        """[1, 1, M, ...]"""
        parts = (one.numpy()[None, None] for one in (self.feature, self.split, self.missing, self.value))
        return Trees(*parts)


@dataclass
class Server(Tree):
    phase: Tensor  # [] int64
    ends: Tensor  # [p, CELLS - 1] of the cells to count
    edges: Tensor  # [p, B - 2] of the bins
    base: Tensor  # [C]
    outputs: Tensor  # [] int64 of a model
    forest: Forest


Down = Server  # a row for every client


@dataclass
class Up(Tree):
    counts: Tensor  # [n, p CELLS] of rows in cells; 0 in later rounds
    moments: Tensor  # [n, 1 + C] weight of the rows, and sums of targets
    feature: Tensor  # [n, I] int16 of the client's tree
    split: Tensor  # [n, I] uint8
    missing: Tensor  # [n, I] uint8
    value: Tensor  # [n, L, C]


@dataclass(frozen=True)
class BaggedTrees(Algorithm[Server, Nothing, Down, Up]):
    trees: int = option(40, "rounds of growth: trees of every client", ge=1, le=1000)
    depth: int = option(4, "levels of a tree", ge=2, le=8)
    rate: float = option(0.3, "η: share of a leaf's best value that is taken", gt=0, le=1)
    bins: int = option(64, "bins of a feature, with that of missing values", ge=4, le=256)
    lam: float = option(1.0, "λ: penalty of leaf values", gt=0)

    traits = frozenset({"no momentum", "no weight decay", "hands models on"})
    leaks = "trees grown on its rows alone, without noise,"

    def check(self, task: Task, population: Population) -> None:
        check_trees(self, task)

    @property
    def single_updates(self) -> str:
        return "joins single trees of its clients"

    def init_server(self, task: Task, population: Population) -> Server:
        loss = TreeLoss.of_task(task)
        inner = torch.zeros(0, 2**self.depth - 1, dtype=torch.uint8)
        forest = Forest(inner.to(torch.int16), inner, inner.clone(), torch.zeros(0, 2**self.depth, loss.scores))
        wide = torch.zeros(0, dtype=torch.float64)
        return Server(
            torch.tensor(COUNT), wide, torch.zeros(0), torch.zeros(loss.scores), torch.tensor(loss.outputs), forest
        )

    def rounds_in(self, rounds: int) -> int:
        return 2 + self.trees

    def client_update(self, task: Task, client: Nothing, down: Down, data: Cohort) -> tuple[Nothing, Up]:
        loss, order, n = TreeLoss.of_task(task), down.map(lambda tensor: tensor[0]), len(data)
        rows, C, inner = OwnRows.of_split(data.train, 0), loss.scores, 2**self.depth - 1
        moments, features = np.zeros((n, 1 + C), np.float32), 0
        if int(order.phase) == GROW:
            own, finite = rows.binned(data.train, order.edges.numpy())
            score = np.broadcast_to(order.base.numpy(), (len(rows.rows), 1, C)).copy()
            own.add(order.forest.trees, score)
            grower = LocalTrees(1, self.depth, self.rate, self.lam, self.bins)
            grown = [torch.from_numpy(one[:, 0, 0].copy()) for one in grower.grow(loss, own, score, rows.weight).parts]
            features = own.codes.shape[1]
            counts = np.zeros((n, features * CELLS), np.float32)
        else:
            ends = first_cells(CELLS) if int(order.phase) == COUNT else order.ends.numpy()
            counts, parts, finite = cell_counts(loss, rows, data.train, ends)
            moments = (parts[:, 0, [WEIGHT, *range(SUMS, SUMS + C)]] / UNIT).astype(np.float32)
            blank = torch.zeros(n, inner, dtype=torch.uint8)
            grown = [blank.to(torch.int16) - 1, blank, blank.clone(), torch.zeros(n, inner + 1, C)]
        moments[~finite] = np.nan  # a client with values that are no numbers has no update
        return client, Up(torch.from_numpy(counts), torch.from_numpy(moments), *grown)

    def aggregate(self, server: Server, ids: Tensor, up: Up, round: RoundInfo) -> Server:
        phase = int(server.phase)
        if phase == GROW:
            old, new = server.forest, (up.feature, up.split, up.missing, up.value / len(ids))
            parts = (torch.cat(pair) for pair in zip(old.named().values(), new, strict=True))
            return replace(server, forest=Forest(*parts))
        counts = UNIT * up.counts.to(torch.float64).sum(0).numpy()
        if phase == COUNT_AGAIN:
            edges = bin_edges(server.ends.numpy(), counts.reshape(len(server.ends), -1), self.bins)
            return replace(server, phase=torch.tensor(GROW), edges=torch.from_numpy(edges))
        task = round.server_task
        assert task is not None  # the loop's
        total = up.moments.to(torch.float64).sum(0).numpy()
        base = TreeLoss.of_task(task).start(total[1:] / max(float(total[0]), 1e-30))
        ends = divided_cells(first_cells(CELLS), counts.reshape(-1, CELLS))
        return replace(
            server, phase=torch.tensor(COUNT_AGAIN), ends=torch.from_numpy(ends), base=torch.from_numpy(base)
        )

    def personalize(self, task: Task, client: Nothing, down: Down, data: Cohort) -> Tensor:
        return self._rows(down.map(lambda tensor: tensor[0])).expand(len(data), -1)

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(self._rows(server))

    def _rows(self, server: Server) -> Tensor:
        return model_rows(server.forest.trees, server.edges.numpy(), server.base.numpy()[None], int(server.outputs))

    def figures(self, server: Server) -> dict[str, Any]:
        return {"trees": len(server.forest.value)}
