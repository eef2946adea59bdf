"""Random trees: structure drawn from a seed, leaf values from sums; a round grows many, and noise leaves something.

Random splits under privacy after Maddock, Cormode, Wang, Maple and Jha, "Federated Boosted Decision Trees with
Differential Privacy", CCS 2022; many such trees averaged are the forest of Geurts, Ernst and Wehenkel, "Extremely
Randomized Trees", 2006, without a choice of splits.

A round draws R trees: at every inner node a feature and one of the bins. No rows choose them, and everyone who
knows the seed knows them. Client k answers with means over its rows i at F + b_k,

    G_krl = mean_i g_i 1[leaf_r(i) = l],   H_krl = mean_i h_i 1[leaf_r(i) = l]                                   (1)

and the server adds, of the means G, H over clients,

    F ← F + η Σ_r p_r w_r,    w_rl = −G_rl / (H_rl + λ),    p_r ∝ Σ_l G_rl² / (H_rl + λ)                          (2)

so that trees count by what they gain. The constant of F comes first: −G/(H + λ) of all rows, and what it changes is
taken out of G before trees see it. A client then takes the Newton step of its intercept,
b_k ← b_k − (Σ_i g_i + τ b_k) / (Σ_i h_i + τ), as in `trees`, with a τ that is given.

Bins are public: quantiles of the normal distribution, for features that are standardized, and ½ for those that are 0 or
1, at which half of the splits are. No round goes into counts.

Every client counts equally, whatever its rows, and a row is in one leaf of every tree. So the length of an update is
bounded, and 2R numbers of a row stand where histograms of p features have 2dp for a single tree. With user-level noise
the structure costs nothing, and one sum pays for R trees; in `trees` noise would drown the histograms.

Limits: where interactions are sharp, random splits find them late, and `trees` is far ahead. R = 1 is plain boosting
with random trees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from kinfed.algorithms.trees.tree_candidates import intercepts, newton_step
from kinfed.algorithms.trees.tree_client import OwnRows
from kinfed.algorithms.trees.tree_rows import check_trees, model_rows
from kinfed.author import (
    AveragingAlgorithm,
    Cohort,
    Population,
    RoundInfo,
    ServerModels,
    Task,
    Tree,
    option,
    rng,
)
from kinfed.engine.trees import ClientRows, TreeLoss, Trees, flat_rows

Array = np.ndarray[Any, Any]

BINS = 32
HALF = 0.5  # between 0 and 1
EDGES = np.sort(np.append(ndtri(np.linspace(0, 1, BINS)[1:-1]), HALF)).astype(np.float32)  # of every feature
_HALF = 1 + int(np.searchsorted(EDGES, HALF))  # the bin that ends there
FEWEST = 1e-3  # share of a client's curvature: leaves with less say nothing


@dataclass
class Server(Tree):
    key: Tensor  # [] int64 of all structure
    base: Tensor  # [C]
    value: Tensor  # [T, L, C] float32, of R trees a round
    columns: Tensor  # [p]: as many as there are features
    outputs: Tensor  # [] int64 of a model


Down = Server  # a row for every client


@dataclass
class Client(Tree):
    b: Tensor  # [n, C] intercepts


@dataclass
class Up(Tree):
    sums: Tensor  # [n, R L 2C] means (1)
    level: Tensor  # [n, 2C] mean g and h of all rows
    columns: Tensor  # [n, p] zeros: only the clients know how many features there are


@dataclass(frozen=True)
class RandomTrees(AveragingAlgorithm[Server, Client, Down, Up]):
    turns: int = option(40, "rounds in which trees are added", ge=1, le=1000)
    trees: int = option(20, "R: trees of a round", ge=1, le=1000)
    depth: int = option(5, "levels of a tree", ge=2, le=8)
    rate: float = option(0.7, "η: share of the mean of a round's trees that is taken", gt=0, le=1)
    lam: float = option(0.005, "λ: penalty of leaf values, as a share of a client's rows", gt=0)
    prior: float = option(5.0, "τ: rows that hold a client's intercept near 0", gt=0)

    fields = ("sums", "level", "columns")
    traits = frozenset({"no momentum", "no weight decay"})
    leaks = "sums of gradients by leaves of trees,"

    def check(self, task: Task, population: Population) -> None:
        check_trees(self, task)

    # ---- structure ----

    def structure(self, key: Tensor, first: int, count: int, features: int) -> tuple[Array, Array, Array]:
        """feature, split and missing [1, 1, count, I] of trees from number `first` on."""
        inner = 2**self.depth - 1
        at = torch.arange(first * inner, (first + count) * inner)
        where, which = (rng.to_unit(rng.at(rng.fold(key, purpose), at)).numpy() for purpose in range(2))
        feature = (where * features).astype(np.int16)
        # Half of all splits are at ½, the others at any of the edges.
        split = np.where(which < 0.5, _HALF, 1 + (2 * (which - 0.5) * len(EDGES)).astype(np.int64)).astype(np.uint8)
        shape = (1, 1, count, inner)
        return feature.reshape(shape), split.reshape(shape), np.ones(shape, np.uint8)

    def forest(self, order: Server) -> Trees:
        """All trees so far [1, 1, T, ...]."""
        count = len(order.value)
        return Trees(*self.structure(order.key, 0, count, max(len(order.columns), 1)), order.value.numpy()[None, None])

    # ---- the server ----

    def init_server(self, task: Task, population: Population) -> Server:
        loss = TreeLoss.of_task(task)
        C, leaves = loss.scores, 2**self.depth
        key, outputs = population.key("random trees").clone(), torch.tensor(loss.outputs)
        return Server(key, torch.zeros(C), torch.zeros(0, leaves, C), torch.zeros(0), outputs)

    def rounds_in(self, rounds: int) -> int:
        return 1 + self.turns  # the first is for the constant

    def step(self, server: Server, mean: Up, round: RoundInfo) -> Server:
        task = round.server_task
        assert task is not None  # the loop's
        loss, C = TreeLoss.of_task(task), len(server.base)
        lam = self.lam * loss.least_share
        level = mean.level.to(torch.float64)
        base = server.base + (-level[:C] / (level[C:].clamp_min(0) + lam)).to(torch.float32)
        if not len(server.columns):
            return replace(server, base=base, columns=torch.zeros_like(mean.columns))
        # The constant is taken out of all leaves, so that trees say what is left.
        sums = mean.sums.to(torch.float64).reshape(self.trees, -1, 2 * C)
        h = sums[..., C:].clamp_min(0)
        g = torch.where(h > FEWEST * loss.least_share, sums[..., :C], 0.0)
        g = g - h * (level[:C] / (level[C:].clamp_min(0) + lam))
        value = -g / (h + lam)
        gain = (g * g / (h + lam)).sum((1, 2))
        weight = self.rate * gain / gain.sum().clamp_min(1e-30)
        value = (weight[:, None, None] * value).to(torch.float32)
        return replace(server, base=base, value=torch.cat([server.value, value]))

    # ---- the clients ----

    def init_client(self, task: Task, data: Cohort) -> Client:
        return Client(torch.zeros(len(data), TreeLoss.of_task(task).scores))

    def client_update(self, task: Task, client: Client, down: Down, data: Cohort) -> tuple[Client, Up]:
        loss, order, n = TreeLoss.of_task(task), down.map(lambda tensor: tensor[0]), len(data)
        rows, own = self._rows(data)
        C, features = loss.scores, own.codes.shape[1]
        score = self._scores(order, own)
        b = newton_step(loss, own, score, rows.weight, client.b.numpy()[:, None], self._tau(loss))
        weight = rows.weight[:, 0] / np.maximum(own.sums(rows.weight[:, 0]), 1e-30)[own.owner].astype(np.float32)
        gradient = (loss.gradients(score + b[own.owner], rows.y)[:, 0] * weight[:, None]).astype(np.float64)
        young = self.structure(order.key, len(order.value), self.trees, features)
        nothing = np.zeros((1, 1, self.trees, 2**self.depth, C), np.float32)
        leaf = own.walk(Trees(*young, nothing))[:, 0].astype(np.int64)  # [R, trees]
        sums = np.zeros((n, self.trees, 2**self.depth, 2 * C))
        np.add.at(sums, (own.owner[:, None], np.arange(self.trees), leaf), gradient[:, None])
        level = own.sums(gradient)
        x = flat_rows(data.train.features, torch.from_numpy(rows.rows))
        strays = np.asarray(~np.isfinite(x).all(1), np.float64)
        level[own.sums(strays) > 0] = np.nan  # a client with values that are no numbers has no update
        flat = torch.from_numpy(sums.astype(np.float32).reshape(n, -1))
        up = Up(flat, torch.from_numpy(level.astype(np.float32)), torch.zeros(n, features))
        return Client(torch.from_numpy(b[:, 0])), up

    def personalize(self, task: Task, client: Client, down: Down, data: Cohort) -> Tensor:
        loss, order = TreeLoss.of_task(task), down.map(lambda tensor: tensor[0])
        rows, own = self._rows(data)
        b = intercepts(loss, own, self._scores(order, own), rows.weight, self._tau(loss))
        return self._models(order, order.base.numpy() + b[:, 0], own.codes.shape[1])

    def server_models(self, server: Server) -> ServerModels:
        return ServerModels(self._models(server, server.base.numpy()[None], len(server.columns)))

    def _tau(self, loss: TreeLoss) -> Array:
        return np.full((1, loss.scores), self.prior * loss.least_share)

    def _models(self, order: Server, base: Array, features: int) -> Tensor:
        edges = np.tile(EDGES, (len(order.columns) and features, 1))
        return model_rows(self.forest(order), edges, base, int(order.outputs))

    def _rows(self, data: Cohort) -> tuple[OwnRows, ClientRows]:
        rows = OwnRows.of_split(data.train, 0)
        features = data.train.features.gather(torch.zeros(1, dtype=torch.int64)).numel()
        return rows, rows.binned(data.train, np.tile(EDGES, (features, 1)))[0]

    def _scores(self, order: Server, own: ClientRows) -> Array:
        """[R, 1, C] without intercepts."""
        score = np.broadcast_to(order.base.numpy(), (len(own.rows), 1, len(order.base))).copy()
        own.add(self.forest(order), score)
        return score

    def figures(self, server: Server) -> dict[str, Any]:
        return {"trees": len(server.value)}
