"""The personal part of boosted trees, made at a client from its own rows; only sums of losses ever leave.

    F_k(x) = (1 − a) (F(x) + b_k) + l δ_k(x) + o own_k(x) + a alone_k(x)

F is what the shared trees say and b_k the client's intercept. The others are candidates:

    leaves   δ_k: changes of the shared trees' leaf values, held near 0 (a row of values per client)
    own      further trees, grown on the client's rows from F + b_k
    alone    trees grown on the client's rows from nothing

How strongly leaves are held, how many own trees there are, and the weights (1 − l − o − a, l, o, a) of the four are the
same for all clients: the ones with the least sum of losses on rows that neither the shared trees nor the candidate saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from kinfed.engine.trees import ClientRows, LocalTrees, TreeLoss, Trees

Array = np.ndarray[Any, Any]

STRENGTHS = (0.03, 0.3, 3.0)  # prior variances of leaf changes, in units of φ; T trees share them
OWN_TREES = (5, 10, 20, 40, 60)
ALONE_TREES = (10, 30, 60, 100)
CANDIDATES = 1 + len(STRENGTHS) + len(OWN_TREES) + len(ALONE_TREES)
QUARTERS = 4
# [35, 4] weights of shared, leaves, own and alone: all quarters that add up to 1; the shared part alone first.
WEIGHTS = (
    np.array(sorted((w for w in product(range(QUARTERS + 1), repeat=4) if sum(w) == QUARTERS), key=lambda w: -w[0]))
    / QUARTERS
)
LOSSES = max(CANDIDATES, len(WEIGHTS))
SWEEPS = 3  # over all trees, when leaves are refitted
LARGEST_STEP = 2.0  # of an intercept, in log-odds
NEWTON = 8  # steps of an intercept from 0
OWN_DEPTH = 3
OWN_RATE = 0.1


@dataclass(frozen=True)
class SharedModel:
    """The shared trees of E ensembles, and what their clients' intercepts are held by."""

    loss: TreeLoss
    trees: Trees  # [1, E, T, ...]
    base: Array  # [E, C]
    tau: Array  # [E, C]
    phi: Array  # [E]
    bins: int

    def ensembles(self, which: slice) -> SharedModel:
        trees = self.trees.ensembles(which)
        return SharedModel(self.loss, trees, self.base[which], self.tau[which], self.phi[which], self.bins)

    def scores(self, data: ClientRows) -> Array:
        """[R, E, C] without an intercept."""
        score = np.broadcast_to(self.base, (len(data.rows), *self.base.shape)).copy()
        data.add(self.trees, score)
        return score


def newton_step(loss: TreeLoss, data: ClientRows, score: Array, weight: Array, b: Array, tau: Array) -> Array:
    """b_k + (S_k − τ b_k) / (H_k + τ) [n, E, C] with S_k = −Σ g and H_k = Σ h at the scores [R, E, C] plus b_k.

    Intercepts of several classes move at once, and the diagonal h says too little of that: H_k counts twice there, as
    by Böhning's bound. A step of log-odds is at most LARGEST_STEP: at a client that lacks a class h vanishes, and a
    step without a bound would overshoot until g is all and h nothing."""
    gradient = loss.gradients(score + b[data.owner], data.y) * weight[..., None]
    sums, half = data.sums(gradient), b.shape[-1]
    step = (sums[..., :half] + tau * b) / ((2 if half > 1 else 1) * sums[..., half:] + tau)
    if loss.objective.classifies:
        step = step.clip(-LARGEST_STEP, LARGEST_STEP)
    return np.asarray(b - step, np.float32)


def intercepts(loss: TreeLoss, data: ClientRows, score: Array, weight: Array, tau: Array) -> Array:
    """[n, E, C] of clients whose rows have these scores."""
    b = np.zeros((len(data.first) - 1, *score.shape[1:]), np.float32)
    for _ in range(NEWTON):
        b = newton_step(loss, data, score, weight, b, tau)
    return b


@dataclass
class PersonalParts:
    """All candidates of some clients, fitted to the rows with a positive weight [R, E]."""

    model: SharedModel
    data: ClientRows
    weight: Array

    @cached_property
    def _scores(self) -> Array:
        return self.model.scores(self.data)

    @cached_property
    def b(self) -> Array:
        """[n, E, C] intercepts."""
        return intercepts(self.model.loss, self.data, self._scores, self.weight, self.model.tau)

    @cached_property
    def shared(self) -> Array:
        """[R, E, C] scores of the shared trees with the intercept."""
        return self._scores + self.b[self.data.owner]

    def leaves(self, strength: float) -> tuple[Array, Array]:
        """Changes [n, E, T, L, C] of leaf values and of scores [R, E, C]."""
        model = self.model
        gradient = model.loss.gradients(self.shared, self.data.y) * self.weight[..., None]
        values, scores = [], []
        for e in range(self.b.shape[1]):
            penalty = np.full(len(self.b), model.phi[e] * max(model.trees.count, 1) / strength)
            value, score = self.data.refit(model.trees, e, gradient[:, e], penalty, SWEEPS)
            values.append(value)
            scores.append(score)
        return np.stack(values, 1), np.stack(scores, 1)

    def own(self, trees: int) -> Trees:
        grower = LocalTrees(trees, min(OWN_DEPTH, self.model.trees.depth), OWN_RATE, 1.0, self.model.bins)
        return grower.grow(self.model.loss, self.data, self.shared, self.weight)

    def alone_start(self) -> Array:
        """[n, E, C] intercepts of clients without trees, held by as much as two rows."""
        base = np.broadcast_to(self.model.base, self.shared.shape).copy()
        tau = np.full_like(self.model.tau, 2 * self.model.loss.least_share)
        return self.model.base + intercepts(self.model.loss, self.data, base, self.weight, tau)

    def alone(self, trees: int, start: Array) -> Trees:
        grower = LocalTrees(trees, self.model.trees.depth, OWN_RATE, 1.0, self.model.bins)
        return grower.grow(self.model.loss, self.data, start[self.data.owner], self.weight)


def stages(data: ClientRows, trees: Trees, start: Array, counts: tuple[int, ...]) -> list[Array]:
    """Scores [R, E, C] from `start` after each of these numbers of trees, in ascending order."""
    score, scores, done = start.copy(), [], 0
    for count in counts:
        data.add(trees.cut(done, count), score)
        scores.append(score.copy())
        done = count
    return scores


@dataclass(frozen=True)
class Judgement:
    """Losses of candidates on rows that were left out, summed over a client's rows."""

    parts: PersonalParts  # of the ensembles of the folds alone
    judged: Array  # [R, V] weight of rows in the ensemble that did not see them, else 0

    def _losses(self, score: Array) -> Array:
        """[n]"""
        data = self.parts.data
        losses = self.parts.model.loss.losses(score, data.y) * self.judged
        return data.sums(losses.sum(1))

    def of_candidates(self) -> Array:
        """[n, CANDIDATES]: the shared model, leaves by strength, own trees and trees alone by their number."""
        parts, data = self.parts, self.parts.data
        scores = [parts.shared, *(parts.shared + parts.leaves(strength)[1] for strength in STRENGTHS)]
        scores += stages(data, parts.own(OWN_TREES[-1]), parts.shared, OWN_TREES)
        start = parts.alone_start()
        scores += stages(data, parts.alone(ALONE_TREES[-1], start), start[data.owner], ALONE_TREES)
        return np.stack([self._losses(score) for score in scores], 1)

    def of_weights(self, choice: Array) -> Array:
        """[n, len(WEIGHTS)], for the choice of strength and numbers of trees."""
        parts, data = self.parts, self.parts.data
        leaves = parts.shared + parts.leaves(STRENGTHS[choice[0]])[1]
        count = OWN_TREES[choice[1]]
        (own,) = stages(data, parts.own(count), parts.shared, (count,))
        start, count = parts.alone_start(), ALONE_TREES[choice[2]]
        (alone,) = stages(data, parts.alone(count, start), start[data.owner], (count,))
        four = np.stack([parts.shared, leaves, own, alone])
        return np.stack([self._losses(np.tensordot(w.astype(np.float32), four, 1)) for w in WEIGHTS], 1)


def best_choice(losses: Array) -> Array:
    """int64 [3]: the best strength, number of own trees and of trees alone, from the losses of candidates."""
    groups = np.split(losses[1:CANDIDATES], np.cumsum([len(STRENGTHS), len(OWN_TREES)]))
    return np.array([int(group.argmin()) for group in groups])
