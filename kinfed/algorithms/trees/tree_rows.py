"""Ensembles as rows of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.base import AnyAlgorithm
from kinfed.algorithms.trees.tree_candidates import (
    ALONE,
    ALONE_TREES,
    EARLY,
    LEAVES,
    LINEAR,
    OWN,
    OWN_TREES,
    POOLED,
    SHARED,
    STRENGTHS,
    CandidateChoice,
    PersonalParts,
    SharedModel,
)
from kinfed.author import ConfigError, Task
from kinfed.engine.trees import EnsembleRows, TreeLoss, Trees, TreeShape

Array = np.ndarray[Any, Any]


def check_trees(method: AnyAlgorithm, task: Task) -> None:
    """Refuse options and tasks that trees know nothing of."""
    if method.finetune or method.knn:
        raise ConfigError("trees are not trained by steps and have no features; set finetune and knn to 0")
    if task.packing is not None:
        raise ConfigError(
            f"trees split columns of numbers, and the data have several inputs: {task.packing.in_words()}"
        )
    TreeLoss.check(task)
    if task.device.type != "cpu":
        raise ConfigError("trees are grown on the processor; run them with --device cpu")


def model_rows(trees: Trees, edges: Array, base: Array, outputs: int, linear: Array | None = None) -> Tensor:
    """[n, W] rows of trees [n or 1, 1, T, ...] in bins with these edges, base [n, C] and linear coefficients
    [n, p, C]."""
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
    inputs = len(edges) if edges.ndim > 1 else 0
    if linear is None:
        linear = np.zeros((1, inputs, scores))
    shape = TreeShape(inputs, outputs, scores, depth, feature.shape[1])
    parts = (feature, threshold, missing, value, linear, base)
    every = (torch.from_numpy(np.broadcast_to(part, (clients, *part.shape[1:])).astype(np.float32)) for part in parts)
    return EnsembleRows.of_parts(shape, every).rows()


def personal_rows(
    parts: PersonalParts, edges: Array, shares: Array, choice: CandidateChoice, pooled: SharedModel | None = None,
    linear: Sequence[Array] = (),
) -> Tensor:  # fmt: skip
    """[n, W] models Σ_a w_a z_a of clients with one ensemble, for weights [n, K]; `linear` are the
    coefficients [n, p + 1, C] of the linear candidates. A candidate without a weight at any client is not made."""
    model, clients, w = parts.model, len(parts.b), shares[:, :, None, None, None, None].swapaxes(0, 1)
    of_shared = w[SHARED] + w[LEAVES] + w[OWN]
    base = of_shared[:, 0, 0, 0] * (model.base + parts.b)[:, 0]
    shared = model.trees
    value = of_shared * shared.value
    if shares[:, LEAVES].any():
        value = value + w[LEAVES] * parts.leaves(STRENGTHS[choice.strength])[0]
    together = []
    if shares[:, EARLY].any():
        stage, count = choice.stage
        before = parts.after(stage)
        value[:, :, :stage] += w[EARLY] * before.model.trees.value
        base = base + w[EARLY][:, 0, 0, 0] * (model.base + before.b)[:, 0]
        if before is not parts:
            together.append(before.own(count).deeper(shared.depth).weighted(w[EARLY]))
    if shares[:, OWN].any():
        together.append(parts.own(OWN_TREES[choice.own]).deeper(shared.depth).weighted(w[OWN]))
    if shares[:, ALONE].any():
        start = parts.alone_start()
        alone = parts.alone(ALONE_TREES[choice.alone], start).deeper(shared.depth)
        together.append(alone.weighted(w[ALONE]))
        base = base + w[ALONE][:, 0, 0, 0] * start[:, 0]
    if pooled is not None and shares[:, POOLED].any():
        together.append(pooled.trees.weighted(w[POOLED]))
        base = base + w[POOLED][:, 0, 0, 0] * pooled.base
    slopes = np.zeros((clients, len(edges), model.loss.scores))
    for candidate, beta in enumerate(linear, LINEAR):
        if shares[:, candidate].any():
            share = shares[:, candidate, None, None]
            slopes = slopes + share * beta[:, 1:]
            base = base + share[:, 0] * beta[:, 0]
    every = [np.repeat(part, clients, 0) for part in shared.parts[:3]]
    trees = Trees.joined([Trees(every[0], every[1], every[2], value.astype(np.float32)), *together], 2)
    return model_rows(trees, edges, base, model.loss.outputs, slopes)
