"""Ensembles as rows of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.trees.tree_candidates import ALONE_TREES, OWN_TREES, STRENGTHS, PersonalParts
from kinfed.engine.trees import EnsembleRows, Trees, TreeShape

Array = np.ndarray[Any, Any]


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
    every = [part.expand(clients, *part.shape[1:]) for part in parts]
    ensembles = EnsembleRows(shape, every[0], every[1], every[2], every[3], torch.from_numpy(base.copy()))
    return ensembles.rows()


def personal_rows(parts: PersonalParts, edges: Array, shares: Array, choice: Array) -> Tensor:
    """[n, W] models of clients with one ensemble, (1 − a) (F + b) + l δ + o own + a alone."""
    model, (_, leaves, own, alone), clients = parts.model, shares, len(parts.b)
    shared = model.trees
    value = np.repeat((1 - alone) * shared.value, clients, 0)
    base = (1 - alone) * (model.base + parts.b)[:, 0]
    if leaves:
        value = value + leaves * parts.leaves(STRENGTHS[choice[0]])[0]
    every = [np.repeat(part, clients, 0) for part in shared.parts[:3]]
    together = [Trees(every[0], every[1], every[2], value.astype(np.float32))]
    if own:
        trees = parts.own(OWN_TREES[choice[1]]).deeper(shared.depth)
        together.append(trees.scaled(own))
    if alone:
        start = parts.alone_start()
        trees = parts.alone(ALONE_TREES[choice[2]], start)
        together.append(trees.scaled(alone))
        base = base + alone * start[:, 0]
    return model_rows(Trees.joined(together, 2), edges, base.astype(np.float32), model.loss.outputs)
