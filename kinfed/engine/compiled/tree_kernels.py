"""The text of the compiled loops of boosted trees; what they do is said in kinfed.engine.compiled.tree_loops, which
calls them."""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_type_hints

import numpy as np

from kinfed.engine.compiled.fused_kernels import compile_function, numba_type
from kinfed.engine.compiled.fused_steps import compiled
from kinfed.engine.compiled.kernel_arguments import Bytes, DoubleRows, Doubles, Ints
from kinfed.engine.compiled.machine_code import MachineCode

ShortRows: TypeAlias = Annotated[np.ndarray, "int16", 2]
Trios: TypeAlias = Annotated[np.ndarray, "float64", 3]
Shorts: TypeAlias = Annotated[np.ndarray, "int16", 1]
Codes: TypeAlias = Annotated[np.ndarray, "uint8", 2]
Nodes: TypeAlias = Annotated[np.ndarray, "uint8", 3]
Slots: TypeAlias = Annotated[np.ndarray, "int16", 2]
Numbers: TypeAlias = Annotated[np.ndarray, "float32", 2]
Cubes: TypeAlias = Annotated[np.ndarray, "float32", 3]
Histograms: TypeAlias = Annotated[np.ndarray, "float64", 4]
Features: TypeAlias = Annotated[np.ndarray, "int16", 4]
Marks: TypeAlias = Annotated[np.ndarray, "uint8", 4]
Values: TypeAlias = Annotated[np.ndarray, "float32", 5]


def histogram(codes: Codes, rows: Ints, first: Ints, slot: Slots, gradient: Cubes, out: Histograms, slots: int) -> None:
    """`histograms` into out [n E S, p, B, D], which holds zeros."""
    ensembles, width, p = slot.shape[1], gradient.shape[2], codes.shape[1]
    for k in range(len(first) - 1):
        for i in range(first[k], first[k + 1]):
            row = rows[i]
            for e in range(ensembles):
                s = slot[i, e]
                if s < 0:
                    continue
                place = (k * ensembles + e) * slots + s
                if width == 2:
                    g, h = gradient[i, e, 0], gradient[i, e, 1]
                    for j in range(p):
                        b = codes[row, j]
                        out[place, j, b, 0] += g
                        out[place, j, b, 1] += h
                else:
                    for j in range(p):
                        b = codes[row, j]
                        for c in range(width):
                            out[place, j, b, c] += gradient[i, e, c]


def histogram_part(
    codes: Codes, rows: Ints, first: Ints, slot: Slots, gradient: Cubes, work: Doubles, out: Numbers, bins: int,
    slots: int, share: Doubles,
) -> None:  # fmt: skip
    """`add_histograms` into out [n, ...], which holds zeros, as does work [E S p B D]."""
    ensembles, width, p = slot.shape[1], gradient.shape[2], codes.shape[1]
    for k in range(len(first) - 1):
        for i in range(first[k], first[k + 1]):
            for e in range(ensembles):
                if slot[i, e] < 0:
                    continue
                begin = (e * slots + slot[i, e]) * p
                for j in range(p):
                    place = ((begin + j) * bins + codes[rows[i], j]) * width
                    for c in range(width):
                        work[place + c] += gradient[i, e, c]
        for i in range(first[k], first[k + 1]):  # cells that any row is in: for few rows, few of all
            for e in range(ensembles):
                if slot[i, e] < 0:
                    continue
                begin = (e * slots + slot[i, e]) * p
                for j in range(p):
                    place = ((begin + j) * bins + codes[rows[i], j]) * width
                    for c in range(place, place + width):
                        if work[c] != 0.0:
                            out[k, c] = work[c] * share[0]
                            work[c] = 0.0


@compiled
def split_of_node(sums, m, least, settings, work, feature, split, missing, gain, place):
    """The best split of the histograms sums[m] into place [q] of feature, split, missing and gain."""
    width, bins, lam, tie = sums.shape[3], sums.shape[2], settings[0], settings[1]
    half = width // 2
    best = 0.0
    for j in range(sums.shape[1]):
        for c in range(width):
            known = 0.0
            for b in range(1, bins):
                known += sums[m, j, b, c]
            work[c] = known + sums[m, j, 0, c]  # all rows of the node
        before, gaps = 0.0, False
        for c in range(half):
            before += work[c] * work[c] / (max(work[half + c], 0.0) + lam)
            gaps |= sums[m, j, 0, half + c] != 0
        for side in range(2 if gaps else 1):
            for c in range(width):
                work[width + c] = 0.0
            for b in range(1, bins - 1):
                heavy, light, left_score, right_score = 0.0, 0.0, 0.0, 0.0
                for c in range(width):
                    work[width + c] += sums[m, j, b, c]
                for c in range(half):
                    g, h = work[width + c], work[width + half + c]
                    if side == 1:
                        g, h = g + sums[m, j, 0, c], h + sums[m, j, 0, half + c]
                    other_g, other_h = work[c] - g, work[half + c] - h
                    heavy, light = heavy + h, light + other_h
                    left_score += g * g / (max(h, 0.0) + lam)
                    right_score += other_g * other_g / (max(other_h, 0.0) + lam)
                if heavy < least or light < least:
                    continue
                one = left_score + right_score - before
                if one > best + tie * abs(best):
                    best, feature[place], split[place], gain[place] = one, j, b, one
                    missing[place] = side if gaps else heavy > light


def best_split(
    sums: Histograms, least: Doubles, settings: Doubles, work: Doubles, feature: Shorts, split: Bytes, missing: Bytes,
    gain: Doubles,
) -> None:  # fmt: skip
    """`best_splits` of every node, into feature [M], split, missing and gain."""
    for m in range(len(sums)):
        split_of_node(sums, m, least[m], settings, work, feature, split, missing, gain, m)


def descend(
    codes: Codes, rows: Ints, first: Ints, feature: Features, split: Marks, missing: Marks, depth: int, node: Nodes
) -> None:
    """`walk`, into node."""
    for k in range(len(first) - 1):
        q = k if len(feature) > 1 else 0
        for i in range(first[k], first[k + 1]):
            row = rows[i]
            for e in range(feature.shape[1]):
                for t in range(feature.shape[2]):
                    place, inner = 0, 0
                    for _ in range(depth):
                        j = feature[q, e, t, inner]
                        left = True
                        if j >= 0:
                            code = codes[row, j]
                            left = missing[q, e, t, inner] == 1 if code == 0 else code <= split[q, e, t, inner]
                        place = 2 * place if left else 2 * place + 1
                        inner = 2 * inner + 1 if left else 2 * inner + 2
                    node[i, e, t] = place


def add_leaves(node: Nodes, first: Ints, value: Values, score: Cubes) -> None:
    """`add_values`."""
    for k in range(len(first) - 1):
        q = k if len(value) > 1 else 0
        for i in range(first[k], first[k + 1]):
            for e in range(value.shape[1]):
                for t in range(value.shape[2]):
                    for c in range(value.shape[4]):
                        score[i, e, c] += value[q, e, t, node[i, e, t], c]


def refit_each(
    node: Codes, first: Ints, slope: Numbers, curvature: Numbers, penalty: Doubles, work: Doubles,
    delta: Histograms, score: Numbers, sweeps: int,
) -> None:  # fmt: skip
    """`refit_leaves`, into delta and score; slope ends as the gradient at the new scores."""
    leaves, outputs = delta.shape[2], delta.shape[3]
    for k in range(len(first) - 1):
        for _ in range(sweeps):
            for t in range(node.shape[1]):
                for place in range(len(work)):
                    work[place] = 0.0
                for i in range(first[k], first[k + 1]):
                    for c in range(outputs):
                        place = 2 * (node[i, t] * outputs + c)
                        work[place] += slope[i, c]
                        work[place + 1] += curvature[i, c]
                for leaf in range(leaves):
                    for c in range(outputs):
                        place, now = 2 * (leaf * outputs + c), delta[k, t, leaf, c]
                        change = -(work[place] + penalty[k] * now) / (work[place + 1] + penalty[k])
                        delta[k, t, leaf, c] = now + change
                        work[place] = change
                for i in range(first[k], first[k + 1]):
                    for c in range(outputs):
                        step = np.float32(work[2 * (node[i, t] * outputs + c)])
                        slope[i, c] += curvature[i, c] * step
                        score[i, c] += step


def grow_each(
    codes: Codes, rows: Ints, first: Ints, gradient: Cubes, least: Doubles, settings: Doubles, sums: Histograms,
    total: DoubleRows, work: Doubles, node: Bytes, gain: Doubles, feature: ShortRows, split: Codes, missing: Codes,
    leaf: Trios,
) -> None:  # fmt: skip
    """`grow_trees`: the tree of client k and ensemble e into row k E + e of feature, split, missing [n E, I] and leaf
    [n E, L, D]; sums [L / 2, p, B, D], total [L, D], node [R] and the others are memory."""
    ensembles, width, p, bins = gradient.shape[1], gradient.shape[2], codes.shape[1], sums.shape[2]
    half, leaves = width // 2, leaf.shape[1]
    for k in range(len(first) - 1):
        for e in range(ensembles):
            place, nodes, inner = k * ensembles + e, 1, 0
            for i in range(first[k], first[k + 1]):
                node[i] = 0
            while True:
                for m in range(nodes):
                    for c in range(width):
                        total[m, c] = 0.0
                for i in range(first[k], first[k + 1]):
                    for c in range(width):
                        total[node[i], c] += gradient[i, e, c]
                if nodes == leaves:
                    break
                for m in range(nodes):
                    weight = 0.0
                    for c in range(half, width):
                        weight += total[m, c]
                    total[m, 0] = 1.0 if weight >= 2 * least[place] else 0.0  # whether a split is possible
                    if total[m, 0] > 0:
                        for j in range(p):
                            for b in range(bins):
                                for c in range(width):
                                    sums[m, j, b, c] = 0.0
                for i in range(first[k], first[k + 1]):
                    m = node[i]
                    if total[m, 0] > 0 and gradient[i, e, width - 1] != 0:
                        for j in range(p):
                            b = codes[rows[i], j]
                            for c in range(width):
                                sums[m, j, b, c] += gradient[i, e, c]
                for m in range(nodes):
                    if total[m, 0] > 0:
                        split_of_node(
                            sums, m, least[place], settings, work, feature[place], split[place], missing[place], gain,
                            inner + m,
                        )  # fmt: skip
                for i in range(first[k], first[k + 1]):
                    q = inner + node[i]
                    j, left = feature[place, q], True
                    if j >= 0:
                        code = codes[rows[i], j]
                        left = missing[place, q] == 1 if code == 0 else code <= split[place, q]
                    node[i] = 2 * node[i] if left else 2 * node[i] + 1
                inner, nodes = inner + nodes, 2 * nodes
            for m in range(leaves):
                for c in range(width):
                    leaf[place, m, c] = total[m, c]


_LOOPS: dict[str, Callable[..., Any]] = {
    "histogram": histogram, "histogram_part": histogram_part, "best_split": best_split, "descend": descend,
    "add_leaves": add_leaves, "refit_each": refit_each, "grow_each": grow_each,
}  # fmt: skip


def compile_loop(name: str) -> MachineCode:
    function = _LOOPS[name]
    forms = get_type_hints(function, include_extras=True)
    del forms["return"]
    return compile_function(function, tuple(numba_type(form, {}) for form in forms.values()))
