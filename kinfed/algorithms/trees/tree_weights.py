"""Weights of the candidates of boosted trees: convex, from sums of what they say of rows that they did not see.

At weights w the score of a row is Σ_a w_a z_a, and over left-out rows

    g_a = Σ_i z_ia · ∂L_i,      H_ab = Σ_i z_ia ∂²L_i z_ib                                                        (4)

are sums, as is the loss. The server takes w to the least value of this quadratic form on the simplex and asks again;
for squared losses that is exact at once. Every client then moves from the common weights s by its own sums, held by
PRIOR_ROWS / 2 · Σ_a (w_a − s_a)² / s_a, the quadratic form of a Kullback-Leibler divergence that many rows are worth:
a candidate that serves no other client is not taken up by one client alone.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from kinfed.engine.trees import TreeLoss

Array = np.ndarray[Any, Any]

PRIOR_ROWS = 30.0
STEPS_OF_CLIENT = 3
NOTHING = 0.01  # a smaller weight is none
RIDGE = 1e-6  # of curvatures, where candidates say the same
OFF = 1e30  # curvature of a weight that must stay


def weight_sums(loss: TreeLoss, scores: Array, y: Array, judged: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Losses [R], gradients [R, K] and curvatures [R, K, K] of rows with scores [R, K, C] of candidates, at weights
    [R or 1, K], for rows that count as `judged` [R] says."""
    now = np.einsum("rkc,rk->rc", scores, np.broadcast_to(weight, scores.shape[:2])).astype(np.float32)
    slope, half = loss.gradients(now, y), scores.shape[2]
    g, h = slope[:, :half], slope[:, half:]
    z = scores.astype(np.float64)
    gradient = np.einsum("rkc,rc->rk", z, g) * judged[:, None]
    curvature = np.einsum("rkc,rc,rlc->rkl", z, h, z, optimize=True)
    if half > 1 and loss.objective.classifies:  # ∂²L = diag p − p p'
        p = loss.probabilities(now)
        mean = np.einsum("rkc,rc->rk", z, p)
        curvature = np.einsum("rkc,rc,rlc->rkl", z, p, z, optimize=True) - mean[:, :, None] * mean[:, None]
    return loss.losses(now, y) * judged, gradient, curvature * judged[:, None, None]


def least_on_simplex(gradient: Array, curvature: Array, weight: Array, possible: Array) -> Array:
    """[n, K] w ≥ 0 with Σ w = 1 where g'(w − w₀) + (w − w₀)'H(w − w₀) / 2 is least, for g [n, K], H [n, K, K] and
    w₀ = `weight` [n, K]; 0 where not `possible` [K]. By trying which weights are above 0: there are few."""
    n, count = gradient.shape
    scale = np.maximum(np.trace(curvature, axis1=1, axis2=2) / count, 1e-12)
    curved = curvature + RIDGE * scale[:, None, None] * np.eye(count)
    slope = gradient - np.einsum("nkl,nl->nk", curved, weight)  # g − H w₀
    best, least = weight.copy(), np.full(n, np.inf)
    for chosen in product((False, True), repeat=int(possible.sum())):
        index = np.flatnonzero(possible)[np.array(chosen, np.bool_)]
        if not len(index):
            continue
        size = len(index)
        system, right = np.zeros((n, size + 1, size + 1)), np.zeros((n, size + 1))
        system[:, :size, :size] = curved[:, index[:, None], index] / scale[:, None, None]
        system[:, :size, size] = system[:, size, :size] = 1.0
        right[:, :size], right[:, size] = -slope[:, index] / scale[:, None], 1.0
        inside = np.linalg.solve(system, right[..., None])[:, :size, 0]
        w = np.zeros_like(weight)
        w[:, index] = inside
        value = np.einsum("nk,nk->n", slope, w) + np.einsum("nk,nkl,nl->n", w, curved, w) / 2
        better = (inside >= 0).all(1) & (value < least)
        best[better], least[better] = w[better], value[better]
    return best


def common_weights(gradient: Array, curvature: Array, weight: Array, possible: Array) -> Array:
    """[K] the next weights of all clients, from sums over all of them at `weight` [K]."""
    best: Array = least_on_simplex(gradient[None], curvature[None], weight[None], possible)[0]
    return best


def without_traces(weight: Array) -> Array:
    """Weights without those that are next to nothing."""
    large = np.where(weight < NOTHING, 0.0, weight)
    return np.asarray(large / large.sum(), np.float64)


def own_weights(
    loss: TreeLoss, scores: Array, y: Array, judged: Array, owner: Array, common: Array, unit: float, clients: int
) -> Array:
    """[n, K] the weights of every client, for scores [R, K, C] of its left-out rows; `unit` is the loss that a row of
    noise has (φ, where residuals have a variance)."""
    weight = np.tile(common, (clients, 1))
    possible = common > 0
    if int(possible.sum()) < 2:
        return weight
    prior = PRIOR_ROWS * unit / np.where(possible, common, 1.0)
    for _ in range(STEPS_OF_CLIENT):
        _, gradients, curvatures = weight_sums(loss, scores, y, judged, weight[owner])
        gradient, curvature = np.zeros((clients, len(common))), np.zeros((clients, len(common), len(common)))
        np.add.at(gradient, owner, gradients)
        np.add.at(curvature, owner, curvatures)
        gradient += prior * (weight - common)
        weight = least_on_simplex(gradient, curvature + np.diag(prior), weight, possible)
    return weight
