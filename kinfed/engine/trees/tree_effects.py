"""What the features of shared trees do, from sums that grew them: no row is walked down a tree.

Importance is the share of all gains that splits on a feature had. Partial dependence of a feature is what trees say on
average where it has one value: a split on it is followed, at any other both sides count by their sums of curvature
(Friedman 2001, section 8.2, by the recursion of scikit-learn).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kinfed.engine.trees.tree_growth import Trees

Array = np.ndarray[Any, Any]


def importance(feature: Array, gain: Array, features: int) -> Array:
    """[p] shares of the gains [T, I] of splits on every feature [T, I]; all 0 where nothing is split."""
    splits = feature >= 0
    total = np.bincount(feature[splits].astype(np.int64), gain[splits], features)
    return np.asarray(total / max(float(total.sum()), 1e-300))


def dependence(trees: Trees, cover: Array, feature: int, bins: int) -> Array:
    """float64 [B - 1, C]: what trees [1, 1, T, ...] say on average where the feature is in bin 1, 2, ...

    `cover` [T, L] are the sums of curvature in their leaves."""
    parts, depth = [one[0, 0] for one in trees.parts], trees.depth
    where, split, _, value = parts
    code = np.arange(1, bins)[:, None]
    reach = np.ones((len(where), bins - 1, 1))  # [T, B - 1, nodes] share of rows that come to a node
    for level in range(depth):
        nodes = slice(2**level - 1, 2 ** (level + 1) - 1)
        below = cover.reshape(len(where), 2**level, 2, -1).sum(3)  # rows of every child
        share = below[..., 0] / np.maximum(below.sum(2), 1e-300)
        left = np.where((where[:, nodes] == feature)[:, None], code <= split[:, nodes][:, None], share[:, None])
        left = np.where((where[:, nodes] < 0)[:, None], 1.0, left)
        reach = np.stack([reach * left, reach * (1 - left)], 3).reshape(len(where), bins - 1, -1)
    return np.asarray(np.einsum("tbl,tlc->bc", reach, value.astype(np.float64)))
