"""A client's training rows as boosted trees need them, and ensembles as rows of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.trees.tree_candidates import ALONE_TREES, OWN_TREES, STRENGTHS, PersonalParts
from kinfed.author import Split, rng
from kinfed.engine.trees import ClientRows, EnsembleRows, Trees, TreeShape, binned_rows

Array = np.ndarray[Any, Any]
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
    def of_split(cls, split: Split, folds: int) -> OwnRows:
        place, owner = split.places()
        position, rows = place - split.start[owner], split.rows[place]
        weight = np.ones(len(rows), np.float32) if split.weights is None else split.weights[place].numpy()
        key = rng.fold(rng.root(split.seed, "tree folds"), split.ids)
        parts = folds if folds > 1 else HELD_OUT
        fold = (rng.to_unit(rng.at(key[owner], position)) * parts).to(torch.int64).numpy()
        is_left = np.concatenate([np.zeros((len(rows), 1), np.bool_), fold[:, None] == np.arange(folds)], 1)
        first = np.concatenate([[0], np.cumsum(split.count.numpy())])
        seen, left = (np.where(one, weight[:, None], np.float32(0)) for one in (~is_left, is_left))
        return cls(rows.numpy(), owner.numpy(), position.numpy(), first, split.labels[rows].numpy(), seen, left)

    def binned(self, split: Split, edges: Array) -> tuple[ClientRows, Array]:
        """The rows in bins, and which clients [n] have nothing but numbers in them."""
        binned = binned_rows(split.features, edges)
        own = ClientRows(binned.codes, self.rows, self.first, self.y)
        return own, own.sums((~binned.finite[self.rows]).astype(np.float64)) == 0


def model_rows(trees: Trees, edges: Array, base: Array, outputs: int) -> Tensor:
    """[n, W] rows of trees [n or 1, 1, T, ...] in bins with these edges, and base [n, C]."""
    clients, scores, depth = len(base), base.shape[1], trees.depth
    feature, split, missing, value = (part[:, 0] for part in trees.parts)
    if not trees.count:  # a tree that says nothing: runtimes know no empty ensembles
        inner = np.zeros((1, 1, 2**depth - 1), np.uint8)
        feature, split, missing = inner.astype(np.int16) - np.int16(1), inner, inner
        value = np.zeros((1, 1, 2**depth, scores), np.float32)
    splits = feature >= 0
    threshold = np.zeros(feature.shape, np.float32)
    if splits.any():
        threshold[splits] = edges[feature[splits], split[splits].astype(np.int64) - 1]
    shape = TreeShape(len(edges) if edges.ndim > 1 else 0, outputs, scores, depth, feature.shape[1])
    parts = (torch.from_numpy(np.ascontiguousarray(part)) for part in (feature, threshold, missing, value))
    every = (part.expand(clients, *part.shape[1:]) for part in parts)
    return EnsembleRows(shape, *every, torch.from_numpy(np.ascontiguousarray(base))).rows()


def personal_rows(parts: PersonalParts, edges: Array, shares: Array, choice: Array) -> Tensor:
    """[n, W] models of clients with one ensemble, (1 − a) (F + b) + l δ + o own + a alone."""
    model, (_, leaves, own, alone), clients = parts.model, shares, len(parts.b)
    shared = model.trees
    value = np.repeat((1 - alone) * shared.value, clients, 0)
    base = (1 - alone) * (model.base + parts.b)[:, 0]
    if leaves:
        value = value + leaves * parts.leaves(STRENGTHS[choice[0]])[0]
    every = [np.repeat(part, clients, 0) for part in shared.parts[:3]]
    together = [Trees(*every, value.astype(np.float32))]
    if own:
        trees = parts.own(OWN_TREES[choice[1]]).deeper(shared.depth)
        together.append(Trees(*trees.parts[:3], own * trees.value))
    if alone:
        start = parts.alone_start()
        trees = parts.alone(ALONE_TREES[choice[2]], start)
        together.append(Trees(*trees.parts[:3], alone * trees.value))
        base = base + alone * start[:, 0]
    return model_rows(Trees.joined(together, 2), edges, base.astype(np.float32), model.loss.outputs)
