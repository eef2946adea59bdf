"""Compiled loops of boosted trees: histograms, splits, walks down trees and refits of leaves, and the same in numpy.

Each call takes the rows of many clients, client k those from first[k] to first[k + 1], and grows E ensembles at once
(one of all rows, and one for every fold). Where numba is not installed, or the work is too little to load compiled code
for, numpy does the same: additions are in the order of rows either way, and results are equal to the last bit.

    codes    uint8 [N, p]            the bin of every value; 0 is a missing one
    rows     int64 [R]               which rows of codes, client after client
    feature  int16 [G, E, T, I]      of every inner node of a complete tree of depth d, I = 2^d - 1, level after level
    split    uint8                   codes up to this one go left; where feature is -1 all rows do
    missing  uint8                   1: missing values go left
    value    float32 [G, E, T, L, C] of the L = 2^d leaves; G is 1 where all clients have the same trees, else n
"""

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from kinfed.engine.compiled.fused_task import is_installed
from kinfed.engine.compiled.machine_code import Kernel, MachineCode, loaded_kernel

Array: TypeAlias = np.ndarray[Any, Any]

LITTLE = 1_000  # cells or steps of a call, below which numpy is as fast
TIE = 1e-7  # a later split must gain this share more: equal ones are told apart by their place, not by rounding


def histograms(codes: Array, rows: Array, first: Array, slot: Array, gradient: Array, slots: int, bins: int) -> Array:
    """float64 [n, E, S, p, B, D]: sums of gradient [R, E, D] over the rows of every client, by slot [R, E] of the row
    (-1: in none), feature and code."""
    n, p, (count, ensembles, width) = len(first) - 1, codes.shape[1], gradient.shape
    out = np.zeros((n, ensembles, slots, p, bins, width))
    if _compiles(count * ensembles * p * width):
        flat = out.reshape(n * ensembles * slots, p, bins, width)
        kernel("histogram")(codes, rows, first, slot, gradient, flat, slots)
        return out
    owner = np.repeat(np.arange(n), np.diff(first))
    for e in range(ensembles):
        used = np.flatnonzero(slot[:, e] >= 0)
        place = (owner[used] * ensembles + e) * slots + slot[used, e]
        for j in range(p):
            cell = (place * p + j) * bins + codes[rows[used], j]
            for c in range(width):
                out.reshape(-1, width)[:, c] += np.bincount(cell, gradient[used, e, c], out.size // width)
    return out


def add_histograms(
    codes: Array, rows: Array, first: Array, slot: Array, gradient: Array, slots: int, bins: int, unit: float,
    out: Array,
) -> None:  # fmt: skip
    """`histograms` of every client, in units, into the first numbers of its row of out float32 [n, W], which holds
    zeros. Many cells stay empty; memory is touched where rows are."""
    (count, ensembles, width), p = gradient.shape, codes.shape[1]
    if _compiles(count * ensembles * p * width):
        work = np.zeros(ensembles * slots * p * bins * width)
        kernel("histogram_part")(codes, rows, first, slot, gradient, work, out, bins, slots, np.array([1 / unit]))
        return
    sums = histograms(codes, rows, first, slot, gradient, slots, bins).reshape(len(out), -1)
    np.divide(sums, unit, out=out[:, : sums.shape[1]], casting="same_kind")


def best_splits(sums: Array, least: Array, lam: float) -> tuple[Array, Array, Array, Array]:
    """feature int16, split uint8, missing uint8 and gain float64, [M] each, of nodes with histograms sums [M, p, B, 2C]
    (gradients g of C outputs, then curvatures h): the largest

        Σ_c [G_L² / (H_L + λ) + G_R² / (H_R + λ) − G² / (H + λ)],      Σ_c H at least `least` [M] on both sides.

    feature is -1 where no split gains anything. A feature without missing values in a node sends them to the heavier
    side. Of splits that gain alike the first is taken."""
    nodes = len(sums)
    feature, split = np.full(nodes, -1, np.int16), np.zeros(nodes, np.uint8)
    missing, gain = np.zeros(nodes, np.uint8), np.zeros(nodes)
    if _compiles(sums.size):
        work = np.zeros(2 * sums.shape[3])
        kernel("best_split")(sums, least, np.array([lam, TIE]), work, feature, split, missing, gain)
        return feature, split, missing, gain
    half = sums.shape[3] // 2
    known = np.cumsum(sums[:, :, 1:], 2)  # [M, p, B - 1, 2C] up to every code
    gap, total = sums[:, :, 0], known[:, :, -1] + sums[:, :, 0]
    before = _score(total, half, lam)[..., None]
    gains = np.full((nodes, sums.shape[1], 2, known.shape[2] - 1), -np.inf)
    for side in (0, 1):
        left = known[:, :, :-1] + (gap[:, :, None] if side else 0.0)
        right = total[:, :, None] - left
        enough = np.minimum(_weight(left, half), _weight(right, half)) >= least[:, None, None]
        if side:
            enough &= ((gap[..., half:] != 0).any(-1))[..., None]
        one = _score(left, half, lam) + _score(right, half, lam) - before
        gains[:, :, side] = np.where(enough, one, -np.inf)
    for m in range(nodes):
        best = 0.0
        flat = gains[m].reshape(-1)
        while True:  # the first that beats the best so far, and so on: seldom more than a dozen
            better = np.flatnonzero(flat > best + TIE * abs(best))
            if not len(better):
                break
            place, best = int(better[0]), float(flat[better[0]])
            flat = flat.copy()
            flat[: place + 1] = -np.inf
            j, side, b = (int(one) for one in np.unravel_index(place, gains.shape[1:]))
            feature[m], split[m], gain[m] = j, b + 1, best
            heavier = _weight(known[m, j, b], half) > _weight(total[m, j] - known[m, j, b], half)
            missing[m] = side if (gap[m, j, half:] != 0).any() else heavier
    return feature, split, missing, gain


def _score(sums: Array, half: int, lam: float) -> Array:
    score = np.zeros(sums.shape[:-1])
    for c in range(half):  # one after the other, as compiled code adds
        g, h = sums[..., c], sums[..., half + c]
        score += g * g / (np.maximum(h, 0.0) + lam)
    return score


def _weight(sums: Array, half: int) -> Array:
    weight = np.zeros(sums.shape[:-1])
    for c in range(half):
        weight += sums[..., half + c]
    return weight


def grow_trees(
    codes: Array, rows: Array, first: Array, gradient: Array, least: Array, lam: float, depth: int, bins: int
) -> tuple[Array, Array, Array, Array] | None:
    """feature, split and missing [n E, I] of one tree per client and ensemble, grown on the client's rows, and the sums
    of gradient [R, E, D] in its leaves [n E, L, D]. None if numba is not there: level by level, from `histograms`
    and `best_splits`, the trees are the same."""
    ensembles, width = gradient.shape[1:]
    trees, leaves = (len(first) - 1) * ensembles, 2**depth
    if not _compiles(gradient.size * codes.shape[1]):
        return None
    feature, marks = np.full((trees, leaves - 1), -1, np.int16), np.zeros((2, trees, leaves - 1), np.uint8)
    leaf, half = np.zeros((trees, leaves, width)), leaves // 2
    kernel("grow_each")(
        codes, rows, first, gradient, least, np.array([lam, TIE]), np.zeros((half, codes.shape[1], bins, width)),
        np.zeros((leaves, width)), np.zeros(2 * width), np.zeros(len(rows), np.uint8), np.zeros(leaves), feature,
        marks[0], marks[1], leaf,
    )  # fmt: skip
    return feature, marks[0], marks[1], leaf


def walk(codes: Array, rows: Array, first: Array, feature: Array, split: Array, missing: Array, depth: int) -> Array:
    """uint8 [R, E, T]: the place on level `depth` that every row reaches in every tree."""
    _, ensembles, trees, _ = feature.shape
    node = np.zeros((len(rows), ensembles, trees), np.uint8)
    if _compiles(node.size * depth):
        kernel("descend")(codes, rows, first, feature, split, missing, depth, node)
        return node
    group = np.repeat(np.arange(len(first) - 1), np.diff(first)) if len(feature) > 1 else np.zeros(len(rows), np.int64)
    e, t = np.arange(ensembles)[None, :, None], np.arange(trees)[None, None, :]
    for level in range(depth):
        inner = node + (2**level - 1)
        at = group[:, None, None], e, t, inner
        j = feature[at]
        code = codes[rows[:, None, None], np.maximum(j, 0)]
        left = np.where(code == 0, missing[at] == 1, code <= split[at]) | (j < 0)
        node = (2 * node + ~left).astype(np.uint8)
    return node


def add_values(node: Array, first: Array, value: Array, score: Array) -> None:
    """Add the values [G, E, T, L, C] of the leaves node [R, E, T] to score [R, E, C], tree after tree, in place."""
    if _compiles(node.size * value.shape[-1]):
        kernel("add_leaves")(node, first, value, score)
        return
    group = np.repeat(np.arange(len(first) - 1), np.diff(first)) if len(value) > 1 else np.zeros(len(node), np.int64)
    e = np.arange(value.shape[1])[None]
    for t in range(value.shape[2]):
        score += value[group[:, None], e, t, node[:, :, t]]


def refit_leaves(
    node: Array, first: Array, gradient: Array, curvature: Array, penalty: Array, leaves: int, sweeps: int
) -> tuple[Array, Array]:
    """Changes δ [n, T, L, C] (float64) of every client's leaf values, and what they add to every row's score [R, C]:

        min_δ  Σ_i [g_i s_i + h_i s_i² / 2] + (penalty / 2) |δ|²,      s_i = Σ_t δ[t, leaf_t(i)]

    by `sweeps` rounds of exact steps, tree after tree, for node [R, T], g and h [R, C] (0 for rows that do not count)
    and penalty [n] > 0."""
    (count, trees), outputs = node.shape, gradient.shape[1]
    delta, score = np.zeros((len(first) - 1, trees, leaves, outputs)), np.zeros((count, outputs), np.float32)
    slope = gradient.astype(np.float32)
    if _compiles(node.size * outputs * sweeps):
        work = np.zeros(2 * leaves * outputs)
        kernel("refit_each")(node, first, slope, curvature, penalty, work, delta, score, sweeps)
        return delta, score
    owner = np.repeat(np.arange(len(first) - 1), np.diff(first))
    for _ in range(sweeps):
        for t in range(trees):
            cell = owner * leaves + node[:, t]
            for c in range(outputs):
                g, h = (np.bincount(cell, one[:, c], len(delta) * leaves) for one in (slope, curvature))
                now, cost = delta[:, t, :, c], penalty[:, None]
                change = -(g.reshape(now.shape) + cost * now) / (h.reshape(now.shape) + cost)
                now += change
                step = change.reshape(-1)[cell].astype(np.float32)
                slope[:, c] += curvature[:, c] * step
                score[:, c] += step
    return delta, score


def kernel(name: str) -> Kernel:
    """The compiled loop of that name, loaded or compiled at the first call."""

    def compile_it() -> MachineCode:
        from kinfed.engine.compiled.tree_kernels import compile_loop  # numba: only needed while no code is stored

        return compile_loop(name)

    return loaded_kernel(f"trees-{name}", compile_it)


_has_compiler = cache(is_installed)


def _compiles(work: int) -> bool:
    return work >= LITTLE and _has_compiler()
