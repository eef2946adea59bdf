"""The client's side of boosted trees: its rows and folds, counts of cells, histograms of the nodes in growth, and what
candidates say of rows that they did not see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kinfed.algorithms.trees.tree_candidates import CandidateChoice, Judgement, PersonalParts, newton_step
from kinfed.algorithms.trees.tree_linear import design, effects_of, linear_sums
from kinfed.algorithms.trees.tree_messages import (
    LEFT_LOSS,
    LEFT_WEIGHT,
    LOSS,
    POOLED,
    SUMS,
    UNIT,
    WEIGHT,
    Client,
    Down,
)
from kinfed.algorithms.trees.tree_weights import own_weights, weight_sums
from kinfed.author import Split, rng
from kinfed.engine.trees import ClientRows, TreeLoss, binned_rows, count_cells, flat_rows

Array = np.ndarray[Any, Any]
FIRST_STEPS = 3  # of an intercept before the first tree
HELD_OUT = 5  # parts, of which one is held out, with one fold


@dataclass(frozen=True)
class OwnRows:
    """Training rows of some clients, client after client, and which ensembles see them: the first all, the others all
    but those of one fold."""

    rows: Array  # int64 [R] in the data set
    owner: Array  # int64 [R]
    position: Array  # int64 [R] among the client's
    first: Array  # int64 [n + 1]
    y: Array  # [R]
    weight: Array  # float32 [R, E] in training; 0 where the ensemble does not see the row
    left: Array  # float32 [R, E] of rows that an ensemble does not see

    @classmethod
    def of_split(cls, split: Split, folds: int, kinds: int = 1) -> OwnRows:
        place, owner = split.places()
        position, rows = place - split.start[owner], split.rows[place]
        weight = np.ones(len(rows), np.float32) if split.weights is None else split.weights[place].numpy()
        key = rng.fold(rng.root(split.seed, "tree folds"), split.ids)
        parts = folds if folds > 1 else HELD_OUT
        fold = (rng.to_unit(rng.at(key[owner], position)) * parts).to(torch.int64).numpy()
        is_left = np.concatenate([np.zeros((len(rows), 1), np.bool_), fold[:, None] == np.arange(folds)], 1)
        is_left = np.tile(is_left, kinds)
        first = np.concatenate([[0], np.cumsum(split.count.numpy())])
        seen, left = (np.where(one, weight[:, None], np.float32(0)) for one in (~is_left, is_left))
        return cls(rows.numpy(), owner.numpy(), position.numpy(), first, split.labels[rows].numpy(), seen, left)

    def binned(self, split: Split, edges: Array) -> tuple[ClientRows, Array]:
        """The rows in bins, and which clients [n] have nothing but numbers in them."""
        binned = binned_rows(split.features, edges)
        own = ClientRows(binned.codes, self.rows, self.first, self.y)
        return own, own.sums((~binned.finite[self.rows]).astype(np.float64)) == 0


def cell_counts(loss: TreeLoss, rows: OwnRows, split: Split, ends: Array) -> tuple[Array, Array, Array]:
    """Counts [n, p cells] in units, moments [n, E, ...] with weights and sums of targets, and which clients [n] have
    nothing but numbers."""
    x, C = flat_rows(split.features, torch.from_numpy(rows.rows)), loss.scores
    own = ClientRows(np.zeros((0, x.shape[1]), np.uint8), rows.rows, rows.first, rows.y)
    counts = count_cells(x, rows.first, rows.weight[:, 0], ends, ends.shape[-1] + 1)
    moments = np.zeros((len(counts), rows.weight.shape[1], SUMS + 4 * C))
    moments[..., WEIGHT] = own.sums(rows.weight)
    moments[..., SUMS : SUMS + C] = own.sums(loss.targets(rows.y)[:, None] * rows.weight[..., None])
    finite = own.sums(np.asarray(~np.isfinite(x).all(1), np.float64)) == 0
    return (counts / UNIT).astype(np.float32).reshape(len(counts), -1), moments, finite


def histograms(
    loss: TreeLoss, client: Client, order: Down, own: ClientRows, rows: OwnRows, slots: int, bins: int, out: Array
) -> tuple[Client, Array]:
    """The client with all trees in its scores, and moments; histograms (1) of the wanted nodes, [n, E S p B 2C] in
    units, go into out."""
    C, level, (n, E, _) = loss.scores, int(order.young.level), client.b.shape
    tau, phi = order.tau.numpy(), order.phi.numpy()
    score, b, client = _caught_up(loss, client, order, own, rows)
    now = score + b[rows.owner]
    gradient = loss.gradients(now, rows.y) * rows.weight[..., None]
    node = own.walk(order.in_growth(), level)[:, :, 0]
    slot = np.where(rows.weight > 0, order.young.wanted.numpy()[np.arange(E), node], -1).astype(np.int16)
    own.add_histograms(slot, gradient, slots, bins, UNIT, out)
    total, moments = own.sums(gradient), np.zeros((n, E, SUMS + 4 * C))
    moments[..., SUMS + 2 * C :] = total
    if level == 0:
        losses = loss.losses(now, rows.y)
        moments[..., WEIGHT], moments[..., LEFT_WEIGHT] = own.sums(rows.weight), own.sums(rows.left)
        moments[..., LOSS], moments[..., LEFT_LOSS] = own.sums(losses * rows.weight), own.sums(losses * rows.left)
        moments[..., SUMS + C : SUMS + 2 * C] = b.astype(np.float64) ** 2 + phi[:, None] / (total[..., C:] + tau)
    return client, moments


def linear_step(loss: TreeLoss, order: Down, own: ClientRows, rows: OwnRows, split: Split, each: int) -> Array:
    """Sums (5) and (6) of the linear models [n, ...]."""
    models = order.linear.models
    weight = np.tile(rows.weight[:, :each], len(models.beta) // each)
    return linear_sums(loss, own, design(split, rows.rows), weight, models)


@dataclass(frozen=True)
class LeftOut:
    """Questions to rows that a fold leaves out: losses of candidates, then of their weights."""

    loss: TreeLoss
    order: Down
    own: ClientRows
    rows: OwnRows
    split: Split
    folds: int
    bins: int

    @property
    def judgement(self) -> Judgement:
        folds = slice(1, 1 + self.folds)
        model = self.order.model(self.loss, self.bins).ensembles(folds)
        return Judgement(PersonalParts(model, self.own, self.rows.weight[:, folds]), self.rows.left[:, folds])

    def scores(self, choice: CandidateChoice) -> Array:
        """[R, K, C] of every candidate."""
        folds, order = slice(1, 1 + self.folds), self.order
        pooled, linear = None, []
        if len(order.used) > POOLED:
            pooled = order.model(self.loss, self.bins, POOLED).ensembles(folds).scores(self.own)
        for models in order.linear.kinds(1 + self.folds):
            x, one = design(self.split, self.rows.rows), models.ensembles(folds)
            effects = effects_of(self.loss, self.own, x, self.rows.weight[:, folds], one)
            linear.append(one.scores(x, effects[self.rows.owner]))
        return self.judgement.left_out(choice, pooled, linear)

    def weigh(self, client: Client) -> tuple[Client, Array]:
        """The client with its candidates' scores, and loss, gradient and curvature (4) [n, 1 + K + K K] at the weights
        that are asked about."""
        rows, place = self.rows, (self.rows.owner, self.rows.position)
        left = client.left.clone(memory_format=torch.contiguous_format)
        if not bool(client.judged.all()):
            fresh = ~client.judged.numpy()[rows.owner]
            left.numpy()[place[0][fresh], place[1][fresh]] = self.scores(self.order.chosen())[fresh]
        judged = rows.left[:, 1 : 1 + self.folds].sum(1)
        sums = weight_sums(self.loss, left.numpy()[place], rows.y, judged, self.order.shares.numpy()[None])
        parts = [self.own.sums(one).reshape(len(left), -1) for one in sums]
        return replace(client, left=left, judged=torch.ones_like(client.judged)), np.concatenate(parts, 1)


def weights_of_clients(loss: TreeLoss, client: Client, order: Down, split: Split, folds: int) -> Array:
    """[n, K] weights of the candidates: own ones where the client's left-out rows were judged."""
    common, clients = order.shares.numpy(), len(client.done)
    if not bool(client.judged.any()):
        return np.tile(common, (clients, 1))
    rows = OwnRows.of_split(split, folds)
    judged = rows.left[:, 1:].sum(1) * client.judged.numpy()[rows.owner]
    unit = float(order.phi[0]) if loss.has_variance else 1.0
    scores = client.left.numpy()[rows.owner, rows.position]
    return own_weights(loss, scores, rows.y, judged, rows.owner, common, unit, clients)


def _caught_up(
    loss: TreeLoss, client: Client, order: Down, own: ClientRows, rows: OwnRows
) -> tuple[Array, Array, Client]:
    """Scores and intercepts with all trees, a Newton step (2) after each, and the client that remembers them."""
    score = client.score.numpy()[rows.owner, rows.position]
    done, b, trees, tau = client.done.numpy().copy(), client.b.numpy().copy(), order.grown(), order.tau.numpy()
    if bool((done == trees.count).all()):
        return score, b, client
    fresh = done < 0
    score[fresh[rows.owner]] = order.base.numpy()
    for _ in range(FIRST_STEPS if fresh.any() else 0):
        b[fresh] = newton_step(loss, own, score, rows.weight, b, tau)[fresh]
    done[fresh] = 0
    for t in range(int(done.min()), trees.count):
        late, added = done <= t, np.zeros_like(score)
        own.add(trees.cut(t, t + 1), added)
        score += added * late[rows.owner][:, None, None]
        b[late] = newton_step(loss, own, score, rows.weight, b, tau)[late]
    done[:] = trees.count
    scores = client.score.clone(memory_format=torch.contiguous_format)
    scores.numpy()[rows.owner, rows.position] = score
    return score, b, replace(client, score=scores, b=torch.from_numpy(b), done=torch.from_numpy(done))
