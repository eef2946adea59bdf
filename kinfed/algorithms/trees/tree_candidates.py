"""The candidates of boosted trees for a client's model, made at the client from its own rows; only sums ever leave.

    F_k(x) = Σ_a w_ka z_a(x),      w_k convex

    pooled   trees grown without intercepts, as of rows in one place
    shared   the shared trees with the client's intercept b_k
    leaves   the same, their leaf values changed by the client and held near 0 (a row of values per client)
    own      the same, then further trees on the client's rows
    early    own trees after fewer shared ones, where clients differ much
    alone    trees on the client's rows from nothing
    linear   the mixed model: one linear model and an intercept (tree_linear)
    slopes   the same with coefficients of the client's own, held near those of all

How strongly leaves are held, and how many trees there are, is the same for all clients: what has the least sum of
losses on rows that neither shared trees nor candidates saw. So are the weights that every client begins with
(tree_weights).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kinfed.engine.trees import ClientRows, LocalTrees, TreeLoss, Trees

Array = np.ndarray[Any, Any]

NAMES = ("pooled", "shared", "leaves", "own", "early", "alone", "linear", "slopes")
POOLED, SHARED, LEAVES, OWN, EARLY, ALONE, LINEAR, SLOPES = range(len(NAMES))
STRENGTHS = (0.03, 0.3, 3.0)  # prior variances of leaf changes, in units of φ; T trees share them
OWN_TREES = (5, 10, 20, 40)
STAGES = (10, 40)  # shared trees before early ones
EARLY_TREES = (20, 40)
ALONE_TREES = (10, 30, 60, 100)
GROUPS = (len(STRENGTHS), len(OWN_TREES), len(STAGES) * len(EARLY_TREES), len(ALONE_TREES))  # of what is chosen
CANDIDATES = sum(GROUPS)
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
    if loss.is_logarithmic:
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

    @property
    def _depth(self) -> int:
        return min(OWN_DEPTH, self.model.trees.depth)

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
        """The client's trees that follow the shared ones."""
        grower = LocalTrees(trees, self._depth, OWN_RATE, 1.0, self.model.bins)
        return grower.grow(self.model.loss, self.data, self.shared, self.weight)

    def after(self, trees: int) -> PersonalParts:
        """The candidates after the first shared trees alone."""
        shared = self.model.trees
        if trees >= shared.count:
            return self
        return PersonalParts(replace(self.model, trees=shared.cut(0, trees)), self.data, self.weight)

    def alone_start(self) -> Array:
        """[n, E, C] intercepts of clients without trees, held by as much as two rows."""
        base = np.broadcast_to(self.model.base, self.shared.shape).copy()
        tau = np.full_like(self.model.tau, 2 * self.model.loss.least_share)
        return self.model.base + intercepts(self.model.loss, self.data, base, self.weight, tau)

    def alone(self, trees: int, start: Array) -> Trees:
        grower = LocalTrees(trees, self._depth, OWN_RATE, 1.0, self.model.bins)
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
class CandidateChoice:
    """Strength of leaves and numbers of trees, as places in the tuples above."""

    strength: int
    own: int
    early: int
    alone: int

    @classmethod
    def best(cls, losses: Array) -> CandidateChoice:
        """From the losses of candidates [CANDIDATES]."""
        groups = np.split(losses[:CANDIDATES], np.cumsum(GROUPS)[:-1])
        return cls(*(int(group.argmin()) for group in groups))

    @property
    def stage(self) -> tuple[int, int]:
        """Numbers of shared and of own trees of the early candidate."""
        return STAGES[self.early // len(EARLY_TREES)], EARLY_TREES[self.early % len(EARLY_TREES)]


@dataclass(frozen=True)
class Judgement:
    """What candidates say of rows that they did not see."""

    parts: PersonalParts  # of the ensembles of the folds alone
    judged: Array  # [R, V] weight of rows in the ensemble that did not see them, else 0

    def losses(self) -> Array:
        """[n, CANDIDATES] of leaves by strength, own trees, early ones and trees alone by their numbers."""
        parts, data = self.parts, self.parts.data
        scores = [parts.shared + parts.leaves(strength)[1] for strength in STRENGTHS]
        scores += stages(data, parts.own(OWN_TREES[-1]), parts.shared, OWN_TREES)
        for count in STAGES:
            early = parts.after(count)
            if early is parts:  # there are no more shared trees: own trees are tried already
                scores += [parts.shared] * len(EARLY_TREES)
            else:
                scores += stages(data, early.own(EARLY_TREES[-1]), early.shared, EARLY_TREES)
        start = parts.alone_start()
        scores += stages(data, parts.alone(ALONE_TREES[-1], start), start[data.owner], ALONE_TREES)
        return np.stack([self._losses(score) for score in scores], 1)

    def _losses(self, score: Array) -> Array:
        """[n]"""
        losses = self.parts.model.loss.losses(score, self.parts.data.y) * self.judged
        return self.parts.data.sums(losses.sum(1))

    def left_out(self, choice: CandidateChoice, pooled: Array | None, linear: list[Array]) -> Array:
        """[R, K, C] scores of every candidate on a row, by the ensemble that did not see it; for scores [R, V, C] of
        the pooled trees and of the linear models. One that is missing says what the shared trees do."""
        parts, data, shared = self.parts, self.parts.data, self.parts.shared
        leaves = shared + parts.leaves(STRENGTHS[choice.strength])[1]
        count = OWN_TREES[choice.own]
        (own,) = stages(data, parts.own(count), shared, (count,))
        stage, count = choice.stage
        before = parts.after(stage)
        (early,) = stages(data, before.own(count), before.shared, (count,)) if before is not parts else (shared,)
        start, count = parts.alone_start(), ALONE_TREES[choice.alone]
        (alone,) = stages(data, parts.alone(count, start), start[data.owner], (count,))
        trees = [shared if pooled is None else pooled, shared, leaves, own, early, alone]
        every = [*trees, *linear, *[shared] * (len(NAMES) - len(trees) - len(linear))]
        place = np.argmax(self.judged > 0, 1)
        return np.stack([score[np.arange(len(place)), place] for score in every], 1)
