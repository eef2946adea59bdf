"""Bins of features from sums of counts: no value of a single row is needed, only how many rows lie in which cell.

Cells are intervals (a, b] of every feature. The first ones are equally wide in t = x / (1 + |x|), which takes any x to
(-1, 1), and know nothing of the data; counts divide those that hold many rows, and of the last counts come the bins:
a value that more than one bin's share of rows have gets a bin of its own (of zeros in a column of amounts, say), the
other bins share the other rows equally. Bin 0 is for missing values.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kinfed.data import Features

Array = np.ndarray[Any, Any]
FAR = np.finfo(np.float32).max  # an end or edge that is not used: no value lies beyond
_BLOCK = 1 << 14  # rows that are read at once


def first_cells(cells: int) -> Array:
    """[cells - 1] upper ends of all cells but the last, in x."""
    return _unspread(np.linspace(-1, 1, cells + 1)[1:-1])


def count_cells(x: Array, first: Array, weight: Array, ends: Array, cells: int) -> Array:
    """float64 [n, p, cells]: weight of the rows x [R, p] of every client in every cell, for ends [cells - 1] of all
    features or [p, cells - 1]. Missing values are in none."""
    clients, p = len(first) - 1, x.shape[1]
    owner = np.repeat(np.arange(clients), np.diff(first))
    counts = np.zeros((clients, p, cells))
    for j in range(p):
        known = ~np.isnan(x[:, j])
        place = np.searchsorted(ends if ends.ndim == 1 else ends[j], x[known, j])
        total = np.bincount(owner[known] * cells + place, weight[known], clients * cells)
        counts[:, j] = total.reshape(clients, cells)
    return counts


def divided_cells(ends: Array, counts: Array) -> Array:
    """[p, cells - 1] ends of new cells, from counts [p, cells] in those with `ends`: neighbours without rows are
    joined, the others divided in proportion to their rows. Unused ends are FAR."""
    p, cells = counts.shape
    new = np.full((p, cells - 1), float(FAR))
    for j in range(p):
        low, high, rows = _occupied(ends if ends.ndim == 1 else ends[j], counts[j])
        needed = np.setdiff1d(np.concatenate([low, high]), [-1.0, 1.0])
        free = cells - 1 - len(needed)
        parts = np.floor(free * rows / rows.sum()).astype(np.int64) if len(rows) else np.zeros(0, np.int64)
        inner = [np.linspace(a, b, n + 2)[1:-1] for a, b, n in zip(low, high, parts, strict=True) if n]
        all_ends = np.unique(np.concatenate([needed, *inner]))
        new[j, : len(all_ends)] = _unspread(all_ends)
    return new


def bin_edges(ends: Array, counts: Array, bins: int) -> Array:
    """float32 [p, bins - 2]: a value x is in bin 1 + the number of edges below x. Unused edges are FAR."""
    edges = np.full((len(counts), bins - 2), FAR, np.float32)
    for j in range(len(counts)):
        low, high, rows = _occupied(ends[j], counts[j])
        last = _last_of_bins(rows, bins - 1)[:-1]  # the last cell of every bin but the last
        middle = (high[last] + low[last + 1]) / 2
        between = np.unique(_unspread(middle).astype(np.float32))
        edges[j, : len(between)] = between
    return edges


def _occupied(ends: Array, counts: Array) -> tuple[Array, Array, Array]:
    """Lower and upper ends (in t) and rows of the cells that have any."""
    bounds = np.concatenate([[-1.0], _spread(ends), [1.0]])
    held = np.flatnonzero(counts > 0)
    return bounds[held], bounds[held + 1], counts[held]


def _last_of_bins(rows: Array, bins: int) -> Array:
    """Numbers of the cells that end a bin, for cells with these rows."""
    if len(rows) <= bins:
        return np.arange(len(rows))
    share = rows.sum() / bins
    frequent = rows > share
    left = max(bins - int(frequent.sum()), 1)  # bins for all other cells
    share = rows[~frequent].sum() / left
    last, held, others = [], 0.0, rows[~frequent].sum()
    for cell, count in enumerate(rows):
        if frequent[cell]:
            if held:  # close the bin before, unless bins have run out: then its rows go with this value
                left -= 1
                last.append(cell - 1)
                held = 0.0
            last.append(cell)
        else:
            held, others = held + count, others - count
            if held >= share and left > 1:
                last.append(cell)
                left, held = left - 1, 0.0
                share = others / left
        if len(last) >= bins - 1:
            break
    return np.unique([*last, len(rows) - 1])


def _spread(x: Array) -> Array:
    t: Array = x / (1 + np.abs(x))
    return t


def _unspread(t: Array) -> Array:
    x: Array = t / (1 - np.abs(t))
    return x


def codes_of(x: Array, edges: Array) -> Array:
    """uint8 [R, p]: the bin of every value of x [R, p]; 0 where it is missing (NaN)."""
    codes = np.empty(x.shape, np.uint8)
    for j in range(x.shape[1]):
        codes[:, j] = 1 + np.searchsorted(edges[j], x[:, j])
    codes[np.isnan(x)] = 0
    return codes


@dataclass(frozen=True)
class BinnedRows:
    """All rows of a data set as codes."""

    codes: Array  # uint8 [N, p]
    finite: Array  # bool [N]


_binned: dict[int, tuple[weakref.ref[Features], str, BinnedRows]] = {}  # by the identity of features
_lock = threading.Lock()
_MOST_KEPT = 4


def binned_rows(features: Features, edges: Array) -> BinnedRows:
    """The rows of `features` under these edges; computed once, and kept as long as the features live."""
    digest = hashlib.sha256(np.ascontiguousarray(edges).tobytes()).hexdigest()
    with _lock:
        known = _binned.get(id(features))
        if known is not None and known[0]() is features and known[1] == digest:
            return known[2]
        codes, finite = np.empty((len(features), len(edges)), np.uint8), np.empty(len(features), np.bool_)
        for index in torch.split(torch.arange(len(features)), _BLOCK):
            x = flat_rows(features, index)
            codes[index.numpy()], finite[index.numpy()] = codes_of(x, edges), np.isfinite(x).all(1)
        binned = BinnedRows(codes, finite)
        for place in [place for place, (owner, *_) in _binned.items() if owner() is None]:
            del _binned[place]
        while len(_binned) >= _MOST_KEPT:
            del _binned[next(iter(_binned))]
        _binned[id(features)] = weakref.ref(features), digest, binned
        return binned


def flat_rows(features: Features, index: torch.Tensor) -> Array:
    """float32 [R, p] examples as models see them, each as one row of numbers."""
    return features.gather(index).reshape(len(index), -1).cpu().numpy()
