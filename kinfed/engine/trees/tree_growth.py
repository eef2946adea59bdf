"""Growth of trees, level by level, from sums of histograms; and whole ensembles on the rows of single clients.

A level of M trees takes one sum of histograms. Only one child of every node is asked for, the lighter; the other is
what the parent has more (`steady`, where both sums are over the same rows). Sums are all that growth sees: of one
client's rows, or of all clients' together, the tree is that of pooled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kinfed.engine.compiled import tree_loops
from kinfed.engine.trees.tree_losses import TreeLoss

Array = np.ndarray[Any, Any]
FEWEST = 10  # rows of a client that grows trees of its own
BLOCK = 1 << 22  # numbers in the histograms of clients that grow trees of their own together


@dataclass
class TreeGrowth:
    """M trees of one depth, grown together."""

    depth: int
    lam: float  # λ of gains and leaf values
    least: Array  # float64 [M] curvature on either side of a split
    feature: Array  # int16 [M, I]
    split: Array  # uint8 [M, I]
    missing: Array  # uint8 [M, I]
    level: int = 0
    parent: Array = field(default_factory=lambda: np.zeros(0))  # [M, 2^(level - 1), p, B, 2C] sums of the level before
    weight: Array = field(default_factory=lambda: np.zeros(0))  # [M, 2^level, 2C] sums of the nodes of this level
    gain: Array = field(default_factory=lambda: np.zeros(0))  # [M, 2^(level - 1)] of the splits of the level before

    @classmethod
    def start(cls, depth: int, lam: float, least: Array) -> TreeGrowth:
        marks = np.zeros((len(least), 2**depth - 1), np.uint8)
        return cls(depth, lam, least, np.full(marks.shape, -1, np.int16), marks, marks.copy())

    @property
    def is_complete(self) -> bool:
        return self.level == self.depth

    def wanted(self, slots: int, steady: bool = True) -> Array | None:
        """int16 [M, 2^level]: the slot of the histogram of every node of this level; -1 where it is the difference of
        its parent's and its sibling's. None if the slots do not suffice for the nodes."""
        nodes = 2**self.level
        if self.level and steady and nodes // 2 <= slots:
            half = self.weight.shape[-1] // 2
            weight = self.weight[..., half:].sum(-1).reshape(len(self.least), -1, 2)
            lighter = (weight[..., 1] <= weight[..., 0]).astype(np.int64)[..., None]
            slot = np.broadcast_to(np.arange(nodes // 2, dtype=np.int16)[:, None], (*lighter.shape[:2], 1))
            wanted = np.full((*lighter.shape[:2], 2), -1, np.int16)
            np.put_along_axis(wanted, lighter, slot, -1)
            return wanted.reshape(len(self.least), nodes)
        if nodes > slots:
            return None
        return np.broadcast_to(np.arange(nodes, dtype=np.int16), (len(self.least), nodes)).copy()

    def grow(self, sums: Array, wanted: Array) -> None:
        """Take the sums [M, S, p, B, 2C] of the `wanted` slots, and split the nodes of this level."""
        nodes = sums[np.arange(len(sums))[:, None], wanted]  # where it is absent, anything
        absent = wanted < 0
        if absent.any():
            pairs = nodes.reshape(len(nodes), -1, 2, *nodes.shape[2:])
            m, i, side = absent.reshape(pairs.shape[:3]).nonzero()
            pairs[m, i, side] = self.parent[m, i] - pairs[m, i, 1 - side]
        flat = nodes.reshape(-1, *nodes.shape[2:])
        least = np.repeat(self.least, nodes.shape[1])
        feature, split, missing, gain = tree_loops.best_splits(flat, least, self.lam)
        self.gain = gain.reshape(len(nodes), -1)
        self._place(feature, split, missing)
        self.parent, self.weight = (
            nodes,
            _children(flat, feature, split, missing).reshape(len(nodes), -1, flat.shape[-1]),
        )
        self.level += 1

    def _place(self, *marks: Array) -> None:
        begin, count = 2**self.level - 1, 2**self.level
        for marks_so_far, new in zip((self.feature, self.split, self.missing), marks, strict=True):
            marks_so_far[:, begin : begin + count] = new.reshape(len(new) // count, count)

    def stop(self) -> None:
        """End the trees at this level: whatever is below goes left."""
        while not self.is_complete:
            pairs = np.stack([self.weight, np.zeros_like(self.weight)], 2)
            self.weight = pairs.reshape(len(self.weight), -1, self.weight.shape[-1])
            self.level += 1

    def values(self, rate: float) -> Array:
        """float32 [M, L, C]: −rate G / (H + λ) of every leaf."""
        half = self.weight.shape[-1] // 2
        g, h = self.weight[..., :half], np.maximum(self.weight[..., half:], 0.0)
        return (-rate * g / (h + self.lam)).astype(np.float32)


def _children(sums: Array, feature: Array, split: Array, missing: Array) -> Array:
    """[M, 2, 2C]: sums of the left and the right child of nodes with histograms [M, p, B, 2C]."""
    own = sums[np.arange(len(sums)), np.maximum(feature, 0)]  # [M, B, 2C]
    code = np.arange(own.shape[1])
    left = np.where(code == 0, missing[:, None] == 1, code <= split[:, None]) | (feature < 0)[:, None]
    both = np.stack([left, ~left], 1).astype(np.float64)
    children: Array = np.einsum("msb,mbc->msc", both, own)
    return children


@dataclass(frozen=True)
class ClientRows:
    """Training rows of some clients."""

    codes: Array  # uint8 [N, p]
    rows: Array  # int64 [R], client after client
    first: Array  # int64 [n + 1]
    y: Array  # [R]

    @property
    def owner(self) -> Array:
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    def sums(self, values: Array) -> Array:
        """float64 [n, ...] of values [R, ...] over the rows of every client."""
        total, held = np.zeros((len(self.first) - 1, *values.shape[1:])), np.diff(self.first) > 0
        if held.any():  # a client without rows would get those of the next one
            total[held] = np.add.reduceat(values.astype(np.float64), self.first[:-1][held])
        return total

    def of_clients(self, begin: int, end: int) -> ClientRows:
        place = slice(self.first[begin], self.first[end])
        return ClientRows(self.codes, self.rows[place], self.first[begin : end + 1] - self.first[begin], self.y[place])

    def walk(self, trees: Trees, depth: int | None = None) -> Array:
        """uint8 [R, E, T] leaves, or places on a higher level."""
        levels = trees.depth if depth is None else depth
        return tree_loops.walk(self.codes, self.rows, self.first, trees.feature, trees.split, trees.missing, levels)

    def add(self, trees: Trees, score: Array) -> None:
        """Add what the trees say to score [R, E, C], in place."""
        if trees.count:
            tree_loops.add_values(self.walk(trees), self.first, trees.value, score)

    def refit(self, trees: Trees, e: int, gradient: Array, penalty: Array, sweeps: int) -> tuple[Array, Array]:
        """Changes of the leaf values of ensemble e for every client (`tree_loops.refit_leaves`), for g and h [R, 2C]:
        [n, T, L, C], and what they add to the scores [R, C]."""
        node, half = self.walk(trees.ensembles(slice(e, e + 1)))[:, 0], gradient.shape[1] // 2
        g, h = np.ascontiguousarray(gradient[:, :half]), np.ascontiguousarray(gradient[:, half:])
        return tree_loops.refit_leaves(np.ascontiguousarray(node), self.first, g, h, penalty, 2**trees.depth, sweeps)

    def histograms(self, slot: Array, gradient: Array, slots: int, bins: int) -> Array:
        """float64 [n, E, S, p, B, D]"""
        return tree_loops.histograms(self.codes, self.rows, self.first, slot, gradient, slots, bins)

    def add_histograms(self, slot: Array, gradient: Array, slots: int, bins: int, unit: float, out: Array) -> None:
        """The same in units, into rows of a message [n, W] that hold zeros."""
        tree_loops.add_histograms(self.codes, self.rows, self.first, slot, gradient, slots, bins, unit, out)


@dataclass(frozen=True)
class Trees:
    """T trees of E ensembles in bins, for all clients (G = 1) or each of them (G = n)."""

    feature: Array  # int16 [G, E, T, I]
    split: Array  # uint8 [G, E, T, I]
    missing: Array  # uint8 [G, E, T, I]
    value: Array  # float32 [G, E, T, L, C]

    @property
    def count(self) -> int:
        return int(self.feature.shape[2])

    @property
    def depth(self) -> int:
        return int(self.value.shape[3]).bit_length() - 1

    def cut(self, begin: int, end: int) -> Trees:
        return Trees(*(np.ascontiguousarray(one[:, :, begin:end]) for one in self.parts))

    def ensembles(self, which: slice) -> Trees:
        return Trees(*(np.ascontiguousarray(one[:, which]) for one in self.parts))

    def deeper(self, depth: int) -> Trees:
        """The same trees with more levels, on which all rows go left."""
        grown = depth - self.depth
        if not grown:
            return self
        groups, ensembles, trees, _ = self.feature.shape
        inner = np.zeros((groups, ensembles, trees, 2**depth - 1), np.int16)
        marks: list[Array] = [inner - np.int16(1), inner.astype(np.uint8), inner.astype(np.uint8)]
        for deep, own in zip(marks, self.parts[:3], strict=True):
            deep[..., : own.shape[3]] = own
        value = np.zeros((groups, ensembles, trees, 2**depth, self.value.shape[4]), np.float32)
        value[:, :, :, :: 2**grown] = self.value
        return Trees(marks[0], marks[1], marks[2], value)

    @property
    def parts(self) -> tuple[Array, Array, Array, Array]:
        return self.feature, self.split, self.missing, self.value

    def weighted(self, weight: Array) -> Trees:
        """The trees of every client, their values times its weight [n, 1, 1, 1, 1]."""
        every = [np.broadcast_to(part, (len(weight), *part.shape[1:])) for part in self.parts[:3]]
        return Trees(every[0], every[1], every[2], (weight * self.value).astype(np.float32))

    @classmethod
    def joined(cls, parts: list[Trees], axis: int) -> Trees:
        return cls(*(np.concatenate(one, axis) for one in zip(*(part.parts for part in parts), strict=True)))


@dataclass(frozen=True)
class LocalTrees:
    """How a client grows trees on its own rows."""

    trees: int
    depth: int
    rate: float
    lam: float
    bins: int

    def grow(self, loss: TreeLoss, data: ClientRows, score: Array, weight: Array) -> Trees:
        """[n, E, T, ...] trees from scores [R, E, C], with weight [R, E] of every row in every ensemble: 0 leaves it
        out. A client with fewer than FEWEST rows grows none: its leaves are 0."""
        clients, (_, ensembles, outputs) = len(data.first) - 1, score.shape
        width = ensembles * 2 ** (self.depth - 1) * data.codes.shape[1] * self.bins * 2 * outputs
        parts, step = [], max(BLOCK // width, 1)
        for begin in range(0, clients, step):
            some, place = data.of_clients(begin, min(begin + step, clients)), slice(data.first[begin], None)
            rows = len(some.rows)
            parts.append(self._grow(loss, some, score[place][:rows].copy(), weight[place][:rows]))
        return Trees.joined(parts, 0)

    def _grow(self, loss: TreeLoss, data: ClientRows, score: Array, weight: Array) -> Trees:
        clients, (_, ensembles, outputs) = len(data.first) - 1, score.shape
        rows = data.sums((weight > 0).astype(np.float64))  # [n, E]
        least = np.where(rows < FEWEST, np.inf, loss.least_share * np.clip(rows / 10, 3, 20)).reshape(-1)
        trees = []
        for _ in range(self.trees):
            gradient = loss.gradients(score, data.y) * weight[..., None]
            growth = self._grown(data, gradient, least)
            values = growth.values(self.rate)
            values[np.isinf(least)] = 0.0
            tree = _tree(growth, clients, ensembles, outputs, values)
            data.add(tree, score)
            trees.append(tree)
        return Trees.joined(trees, 2)

    def _grown(self, data: ClientRows, gradient: Array, least: Array) -> TreeGrowth:
        """Complete trees [n E], in one compiled call if loops are compiled."""
        growth, (_, ensembles, width) = TreeGrowth.start(self.depth, self.lam, least), gradient.shape
        parts = tree_loops.grow_trees(
            data.codes, data.rows, data.first, gradient, least, self.lam, self.depth, self.bins
        )
        if parts is not None:
            return TreeGrowth(self.depth, self.lam, least, *parts[:3], self.depth, weight=parts[3])
        slots, owner, e = 2 ** (self.depth - 1), data.owner[:, None], np.arange(ensembles)[None]
        while not growth.is_complete:
            wanted = growth.wanted(slots, steady=False)
            assert wanted is not None  # there are slots for all nodes
            now = _tree(growth, len(data.first) - 1, ensembles, width // 2)
            node = data.walk(now, growth.level)[:, :, 0]
            slot = wanted.reshape(-1, ensembles, wanted.shape[1])[owner, e, node]
            slot = np.where(gradient[..., -1] != 0, slot, -1).astype(np.int16)
            sums = data.histograms(slot, gradient, slots, self.bins)
            growth.grow(sums.reshape(-1, *sums.shape[2:]), wanted)
        return growth


def _tree(growth: TreeGrowth, clients: int, ensembles: int, outputs: int, values: Array | None = None) -> Trees:
    shape = (clients, ensembles, 1)
    feature, split, missing = (one.reshape(*shape, -1) for one in (growth.feature, growth.split, growth.missing))
    if values is None:
        values = np.zeros((*shape, 2**growth.depth, outputs), np.float32)
    return Trees(feature, split, missing, values.reshape(*shape, -1, outputs))
