"""States and messages of boosted trees, and what is read from them.

E ensembles are of F kinds, with intercepts and without, one of all rows and V of the folds each; losses [T + 1, F].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.trees.tree_candidates import GROUPS, NAMES, SHARED, CandidateChoice, SharedModel
from kinfed.algorithms.trees.tree_linear import LinearModels
from kinfed.author import Tree
from kinfed.engine.trees import TreeGrowth, TreeLoss, Trees

Array = np.ndarray[Any, Any]

COUNT, COUNT_AGAIN, LINEAR, GROW, JUDGE, WEIGH, DONE = range(7)  # phases
UNIT = 1024.0  # of sums in messages: a million rows are within the usual range of secure sums
# Columns of moments: weight and loss of the rows of an ensemble, loss and weight of the rows it does not see; then C
# sums of targets, C sizes of intercepts, and C sums of g and of h.
WEIGHT, LOSS, LEFT_LOSS, LEFT_WEIGHT, SUMS = range(5)
FIRST_TAU = 5.0
HUGE = 1e300  # of what nothing is known yet: states are finite
MIXED, POOLED = range(2)  # kinds of ensembles: with intercepts, and without


@dataclass
class GrownTrees(Tree):
    """T trees of E ensembles, as kinfed.engine.trees has them."""

    feature: Tensor  # [E, T, I] int16
    split: Tensor  # [E, T, I] uint8
    missing: Tensor  # [E, T, I] uint8
    value: Tensor  # [E, T, L, C] float32

    @classmethod
    def nothing(cls, ensembles: int, depth: int, scores: int) -> GrownTrees:
        marks = torch.zeros(ensembles, 0, 2**depth - 1, dtype=torch.uint8)
        return cls(marks.to(torch.int16), marks, marks.clone(), torch.zeros(ensembles, 0, 2**depth, scores))

    def joined(self, growth: TreeGrowth, rate: float) -> GrownTrees:
        """With one more tree, which is complete."""
        new = (growth.feature, growth.split, growth.missing, growth.values(rate))
        old = (self.feature, self.split, self.missing, self.value)
        parts = [torch.cat([one, torch.from_numpy(tree)[:, None]], 1) for one, tree in zip(old, new, strict=True)]
        return GrownTrees(*parts)

    @property
    def count(self) -> int:
        return int(self.feature.shape[-2])


@dataclass
class YoungTree(Tree):
    """The tree in growth."""

    level: Tensor  # [] int64
    feature: Tensor  # [E, I] int16
    split: Tensor  # [E, I] uint8
    missing: Tensor  # [E, I] uint8
    wanted: Tensor  # [E, nodes] int16 slots of the nodes of the level; -1: not asked for

    @classmethod
    def of_growth(cls, growth: TreeGrowth, wanted: Array) -> YoungTree:
        marks = (growth.feature, growth.split, growth.missing, wanted)
        return cls(torch.tensor(growth.level), *(torch.from_numpy(one) for one in marks))

    @classmethod
    def fresh(cls, ensembles: int, depth: int) -> YoungTree:
        growth = TreeGrowth.start(depth, 0.0, np.zeros(ensembles))
        return cls.of_growth(growth, np.zeros((ensembles, 1), np.int16))


def _wide() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@dataclass
class LinearState(Tree):
    """The linear models beside the trees; no columns until they begin."""

    beta: Tensor  # [M, p + 1, C] float64: 1 + V of every kind
    tau: Tensor  # [M, p + 1, C] float64
    phi: Tensor  # [M] float64

    @classmethod
    def nothing(cls, models: int = 0, columns: int = 0, scores: int = 1) -> LinearState:
        beta = torch.zeros(models, columns, scores, dtype=torch.float64)
        return cls(beta, FIRST_TAU * torch.ones_like(beta), torch.ones(models, dtype=torch.float64))

    @classmethod
    def of_models(cls, models: LinearModels) -> LinearState:
        return cls(*(torch.from_numpy(one) for one in (models.beta, models.tau, models.phi)))

    @property
    def models(self) -> LinearModels:
        return LinearModels(self.beta.numpy(), self.tau.numpy(), self.phi.numpy())

    def kinds(self, each: int) -> list[LinearModels]:
        """The models of every kind that there is, `each` of one."""
        return [self.models.ensembles(slice(begin, begin + each)) for begin in range(0, len(self.beta), each)]


def _only_shared() -> Tensor:
    weights = torch.zeros(len(NAMES), dtype=torch.float64)
    weights[SHARED] = 1.0
    return weights


@dataclass
class Server(Tree):
    base: Tensor  # [E, C] float32
    tau: Tensor  # [E, C] float64
    phi: Tensor  # [E] float64
    trees: GrownTrees
    young: YoungTree
    steady: Tensor  # [] bool whether the last rounds were of the same clients
    outputs: Tensor  # [] int64 of a model
    phase: Tensor = field(default_factory=lambda: torch.tensor(COUNT))
    ends: Tensor = field(default_factory=_wide)  # [p, cells - 1] of the cells to count
    edges: Tensor = field(default_factory=lambda: torch.zeros(0))  # [p, B - 2] of the bins
    parent: Tensor = field(default_factory=_wide)  # [E, nodes / 2, p, B, 2C] histograms of the level before
    weight: Tensor = field(default_factory=_wide)  # [E, nodes, 2C] sums of the nodes of the level
    gradients: Tensor = field(default_factory=_wide)  # [E, 2C] sums of g and h, of the round before
    losses: Tensor = field(default_factory=_wide)  # [T + 1, F] mean loss on left-out rows, by the number of trees
    linear: LinearState = field(default_factory=lambda: LinearState.nothing())
    round: Tensor = field(default_factory=lambda: torch.tensor(0))  # of the phase
    gains: Tensor = field(default_factory=_wide)  # [T, I] of the splits of the first ensemble
    covers: Tensor = field(default_factory=_wide)  # [T, L] sums of curvature in its leaves
    young_gain: Tensor = field(default_factory=_wide)  # [I] of the tree in growth
    choice: Tensor = field(default_factory=lambda: torch.zeros(len(GROUPS), dtype=torch.int64))  # (CandidateChoice)
    shares: Tensor = field(default_factory=lambda: _only_shared())  # weights of candidates that are asked about
    best: Tensor = field(default_factory=lambda: _only_shared())  # the weights with the least loss so far
    least: Tensor = field(default_factory=lambda: torch.tensor(HUGE, dtype=torch.float64))  # which is this

    def used(self, kind: int) -> int:
        """Trees of a kind that models are made of: those with the least loss on left-out rows; all where none are left
        out."""
        return int(self.losses[:, kind].argmin()) if len(self.base) > 1 and len(self.losses) else self.trees.count


@dataclass
class Client(Tree):
    score: Tensor  # [n, most rows of any client, E, C] what the trees say of every row
    b: Tensor  # [n, E, C] intercepts
    done: Tensor  # [n] int64 trees in the scores; -1: none, nor the base
    left: Tensor  # [n, most rows of any client, K, C] what candidates say of rows that they did not see
    judged: Tensor  # [n] bool whether that is there


@dataclass
class Down(Tree):
    """What the server says to all, a row for every client; fields as in Server."""

    phase: Tensor
    ends: Tensor
    edges: Tensor
    base: Tensor
    tau: Tensor
    phi: Tensor
    trees: GrownTrees
    young: YoungTree
    used: Tensor  # [F] trees of every kind
    linear: LinearState
    choice: Tensor
    shares: Tensor

    @classmethod
    def of_server(cls, server: Server) -> Down:
        """Without an axis of clients."""
        return cls(
            server.phase, server.ends, server.edges, server.base, server.tau, server.phi, server.trees, server.young,
            torch.tensor([server.used(kind) for kind in range(server.losses.shape[1])]), server.linear, server.choice,
            server.best if int(server.phase) == DONE else server.shares,
        )  # fmt: skip

    def one(self) -> Down:
        """What all clients of a cohort are told, without the axis of clients."""
        return self.map(lambda tensor: tensor[0])

    def grown(self) -> Trees:
        """All trees [1, E, T, ...]."""
        trees = self.trees
        return Trees(*(one.numpy()[None] for one in (trees.feature, trees.split, trees.missing, trees.value)))

    def in_growth(self) -> Trees:
        """The tree in growth [1, E, 1, ...], without values."""
        young, (ensembles, _, leaves, scores) = self.young, self.trees.value.shape
        nothing = torch.zeros(ensembles, leaves, scores)
        return Trees(*(one.numpy()[None, :, None] for one in (young.feature, young.split, young.missing, nothing)))

    def model(self, loss: TreeLoss, bins: int, kind: int = 0) -> SharedModel:
        """The trees of a kind that models are made of, of all its ensembles."""
        trees, kinds = self.grown().cut(0, int(self.used[kind])), len(self.used)
        model = SharedModel(loss, trees, self.base.numpy(), self.tau.numpy(), self.phi.numpy(), bins)
        each = len(self.base) // kinds
        return model.ensembles(slice(kind * each, (kind + 1) * each))

    def chosen(self) -> CandidateChoice:
        return CandidateChoice(*self.choice.tolist())


@dataclass
class Up(Tree):
    sums: Tensor  # [n, p cells] counts of cells [p, cells], or histograms [E, S, p, B, 2C]
    moments: Tensor  # [n, E, 4 + 4C]
    losses: Tensor  # [n, G] of candidates; or loss, gradient and curvature of their weights
