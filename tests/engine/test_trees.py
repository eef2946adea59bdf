"""Boosted trees against brute force and scikit-learn: bins, histograms, splits, growth, and ensembles as rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from kinfed.data import Problem
from kinfed.engine.compiled import tree_loops
from kinfed.engine.compiled.fused_task import is_installed
from kinfed.engine.contract.objective import ABSOLUTE, CROSS_ENTROPY, SQUARED, Objective, make_objective
from kinfed.engine.trees import (
    ClientRows,
    EnsembleRows,
    LocalTrees,
    TreeGrowth,
    TreeLoss,
    Trees,
    TreeShape,
    bin_edges,
    count_cells,
    dependence,
    divided_cells,
    first_cells,
    importance,
)
from kinfed.engine.trees.tree_bins import codes_of

Array = np.ndarray[Any, Any]
COUNTS = make_objective(Problem("counts", mean=2.5))
SURVIVAL = make_objective(Problem("survival", shape=(2,), periods=(1.0, 2.0, 4.0), hazards=(0.2, 0.3, 0.4)))
LOSSES = (TreeLoss(SQUARED, 1), TreeLoss(CROSS_ENTROPY, 2), TreeLoss(CROSS_ENTROPY, 3), TreeLoss(ABSOLUTE, 1))


def edges_of(x: Array, bins: int, cells: int = 512) -> Array:
    """Edges from two counts of cells of one client."""
    first, weight = np.array([0, len(x)]), np.ones(len(x))
    ends = divided_cells(first_cells(cells), count_cells(x, first, weight, first_cells(cells), cells)[0])
    return bin_edges(ends, count_cells(x, first, weight, ends, cells)[0], bins)


def table(rows: int = 400, seed: int = 0) -> tuple[Array, Array]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 3)).astype(np.float32)
    x[:, 2] = draw.integers(0, 3, rows)
    y = np.sin(2 * x[:, 0]) + (x[:, 1] > 0.3) * x[:, 2] + 0.1 * draw.normal(size=rows)
    return x, y.astype(np.float32)


def local_rows(x: Array, y: Array, bins: int) -> ClientRows:
    return ClientRows(codes_of(x, edges_of(x, bins)), np.arange(len(x)), np.array([0, len(x)]), y)


# ---- bins ----


def test_bins_hold_about_as_many_rows_each() -> None:
    x = np.random.default_rng(1).lognormal(size=(5000, 1)).astype(np.float32)
    counts = np.bincount(codes_of(x, edges_of(x, 33))[:, 0], minlength=33)
    assert counts[0] == 0
    assert counts[1:].min() > 0.5 * 5000 / 32
    assert counts[1:].max() < 1.5 * 5000 / 32


def test_a_frequent_value_has_a_bin_of_its_own() -> None:
    draw = np.random.default_rng(2)
    x = np.where(draw.uniform(size=3000) < 0.9, 0.0, draw.lognormal(5, 1, 3000)).astype(np.float32)[:, None]
    codes = codes_of(x, edges_of(x, 16))[:, 0]
    assert len(np.unique(codes[x[:, 0] == 0])) == 1
    assert not np.isin(codes[x[:, 0] > 0], codes[x[:, 0] == 0]).any()
    assert len(np.unique(codes)) > 10  # the tail is not lost


def test_values_that_are_few_are_told_apart() -> None:
    x = np.tile(np.array([-3.0, 0.0, 0.25, 7.0, 1e6], np.float32), 10)[:, None]
    assert np.unique(codes_of(x, edges_of(x, 8))).tolist() == [1, 2, 3, 4, 5]


def test_missing_values_are_in_bin_0_and_in_no_cell() -> None:
    x = np.array([[1.0], [np.nan], [2.0]], np.float32)
    assert codes_of(x, edges_of(x, 4))[:, 0].tolist() == [1, 0, 2]
    assert count_cells(x, np.array([0, 3]), np.ones(3), first_cells(8), 8).sum() == 2


# ---- splits ----


def brute_force(codes: Array, g: Array, h: Array, least: float, lam: float) -> tuple[float, tuple[int, int, int]]:
    """The best gain of one node, and (feature, code, missing): every split by its rows."""

    def part(rows: Array) -> float:
        return float((g[rows].sum(0) ** 2 / (h[rows].sum(0) + lam)).sum())

    best: tuple[float, tuple[int, int, int]] = (0.0, (-1, 0, 0))
    for j, code, side in itertools.product(range(codes.shape[1]), range(1, codes.max() + 1), (0, 1)):
        left = np.where(codes[:, j] == 0, side == 1, codes[:, j] <= code)
        if min(h[left].sum(), h[~left].sum()) < least or not left.any() or left.all():
            continue
        gain = part(left) + part(~left) - part(np.ones(len(g), np.bool_))
        if gain > best[0] * (1 + 1e-6) + 1e-12:
            best = gain, (j, code, side)
    return best


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_best_split_is_that_of_brute_force(outputs: int) -> None:
    draw = np.random.default_rng(outputs)
    for _ in range(10):
        codes = draw.integers(0, 6, (60, 3)).astype(np.uint8)
        g, h = draw.normal(size=(60, outputs)), draw.uniform(0.1, 1, (60, outputs))
        gradient = np.concatenate([g, h], 1).astype(np.float32)[:, None]
        rows, first = np.arange(60), np.array([0, 60])
        sums = tree_loops.histograms(codes, rows, first, np.zeros((60, 1), np.int16), gradient, 1, 7)
        feature, split, missing, gain = tree_loops.best_splits(sums[0, 0], np.array([5.0]), 0.5)
        wanted, place = brute_force(codes, gradient[:, 0, :outputs], gradient[:, 0, outputs:], 5.0, 0.5)
        assert gain[0] == pytest.approx(wanted, rel=1e-5)
        assert (feature[0], split[0], missing[0]) == place


def test_equal_gains_go_to_the_first_feature_however_sums_are_rounded() -> None:
    codes = np.repeat(np.array([[1, 1], [2, 2]], np.uint8), 10, 0)
    gradient = np.stack([np.repeat([0.1, -0.1], 10), np.ones(20)], 1).astype(np.float32)[:, None]
    slot = np.zeros((20, 1), np.int16)
    sums = tree_loops.histograms(codes, np.arange(20), np.array([0, 20]), slot, gradient, 1, 4)[0, 0]
    sums[0, 1, 1, 0] *= 1 + 1e-12  # the second feature gains a trifle more
    assert tree_loops.best_splits(sums, np.array([1.0]), 1.0)[0].tolist() == [0]


# ---- compiled loops ----


@pytest.mark.skipif(not is_installed(), reason="needs numba")
@pytest.mark.parametrize("loss", LOSSES[:3])
def test_compiled_loops_equal_numpy_to_the_last_bit(loss: TreeLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, rows = np.random.default_rng(3), 300
    codes, first = draw.integers(0, 8, (rows, 4)).astype(np.uint8), np.array([0, 120, 121, rows])
    y = draw.integers(0, loss.outputs, rows) if loss.objective.classifies else draw.normal(size=rows)
    data = ClientRows(codes, draw.permutation(rows), first, y)
    weight = (draw.uniform(size=(rows, 2)) < 0.7).astype(np.float32)
    start = np.zeros((rows, 2, loss.scores), np.float32)

    def outcome() -> list[Array]:
        trees = LocalTrees(3, 3, 0.1, 1.0, 8).grow(loss, data, start, weight)
        score = start.copy()
        data.add(trees, score)
        gradient = loss.gradients(score, y)[:, 0]
        node, C = np.ascontiguousarray(data.walk(trees)[:, 0]), loss.scores
        g, h = np.ascontiguousarray(gradient[:, :C]), np.ascontiguousarray(gradient[:, C:])
        return [*trees.parts, score, *tree_loops.refit_leaves(node, first, g, h, np.array([1.0, 2.0, 3.0]), 8, 2)]

    monkeypatch.setattr(tree_loops, "LITTLE", 0)
    compiled = outcome()
    monkeypatch.setattr(tree_loops, "LITTLE", 10**12)
    for ours, theirs in zip(compiled, outcome(), strict=True):
        assert np.array_equal(ours, theirs)


# ---- growth ----


def grown(data: ClientRows, gradient: Array, parts: int, depth: int, bins: int) -> TreeGrowth:
    """One tree from the sum of histograms of `parts` clients that have every so-manieth row."""
    growth, order = TreeGrowth.start(depth, 1.0, np.array([5.0])), np.argsort(np.arange(len(data.rows)) % parts)
    first = np.concatenate([[0], np.cumsum(np.bincount(np.arange(len(order)) % parts))])
    clients, ordered = ClientRows(data.codes, data.rows[order], first, data.y[order]), gradient[order]
    while not growth.is_complete:
        wanted = growth.wanted(2 ** (depth - 2))
        assert wanted is not None
        marks = (one[None, :, None] for one in (growth.feature, growth.split, growth.missing))
        node = tree_loops.walk(clients.codes, clients.rows, first, *marks, growth.level)[:, :, 0]
        slot = wanted[np.zeros_like(node, np.int64), node]
        growth.grow(clients.histograms(slot, ordered, 2 ** (depth - 2), bins).sum(0), wanted)
    return growth


def test_many_clients_grow_the_tree_of_one() -> None:
    x, y = table()
    data, loss = local_rows(x, y, 16), TreeLoss(SQUARED, 1)
    gradient = loss.gradients(np.zeros((len(x), 1, 1), np.float32), y)
    one, many = (grown(data, gradient, parts, 4, 16) for parts in (1, 50))
    assert np.array_equal(one.feature, many.feature)
    assert np.array_equal(one.split, many.split)
    assert np.allclose(one.values(0.1), many.values(0.1), atol=1e-6)


def test_boosting_predicts_like_scikit_learn_in_the_same_bins() -> None:
    """Few values are bins of their own in both; scikit-learn's leaves are then split by the same gain."""
    draw = np.random.default_rng(5)
    x = draw.integers(0, 12, (600, 4)).astype(np.float32)
    y = (np.abs(x[:, 0] - 5) + (x[:, 1] > 6) * x[:, 2] + draw.normal(size=600)).astype(np.float32)
    y -= y.mean(dtype=np.float64).astype(np.float32)
    data, score = local_rows(x, y, 16), np.zeros((600, 1, 1), np.float32)
    least = 20.0  # LocalTrees' for 200 rows and more
    ours = LocalTrees(10, 3, 0.3, 1.0, 16).grow(TreeLoss(SQUARED, 1), data, score, np.ones((600, 1), np.float32))
    data.add(ours, score)
    theirs = HistGradientBoostingRegressor(
        learning_rate=0.3, max_iter=10, max_depth=3, max_leaf_nodes=None, min_samples_leaf=int(least),
        l2_regularization=1.0, early_stopping=False,
    ).fit(x, y)  # fmt: skip
    assert np.allclose(score[:, 0, 0], theirs.predict(x), atol=1e-3)


def test_a_tree_that_stops_early_sends_all_rows_left() -> None:
    growth = TreeGrowth.start(3, 1.0, np.array([1.0]))
    growth.weight, growth.level = np.array([[[2.0, 3.0], [-8.0, 7.0]]]), 1
    growth.stop()
    assert growth.values(1.0)[0, :, 0].tolist() == [-0.5, 0, 0, 0, 1, 0, 0, 0]


# ---- losses ----


@pytest.mark.parametrize("objective", [COUNTS, SURVIVAL])
def test_counts_and_survival_have_the_losses_and_derivatives_of_their_objectives(objective: Objective) -> None:
    draw, loss = np.random.default_rng(8), TreeLoss(objective, 1)
    y = draw.poisson(2.0, 40).astype(np.float32)
    if objective is SURVIVAL:
        y = np.stack([draw.choice([0.5, 1.0, 1.7, 2.0, 3.0, 4.0, 6.0], 40), draw.integers(0, 2, 40)], 1).astype("f4")
    score = draw.normal(size=(40, 2, 1)).astype(np.float32)
    for e in range(2):
        z = torch.from_numpy(score[:, e]).double().requires_grad_()
        values = objective.losses(z, torch.from_numpy(y).double())
        (slope,) = torch.autograd.grad(values.sum(), z, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), z)
        gradient = loss.gradients(score, y)[:, e]
        np.testing.assert_allclose(loss.losses(score, y)[:, e], values.detach(), atol=1e-5)
        np.testing.assert_allclose(gradient[:, 0], slope.detach()[:, 0], atol=1e-5)
        np.testing.assert_allclose(gradient[:, 1], curvature[:, 0], atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_derivatives_of_losses(loss: TreeLoss) -> None:
    draw, step = np.random.default_rng(6), 1e-2
    score = draw.normal(size=(20, 1, loss.scores)).astype(np.float32)
    y = draw.integers(0, loss.outputs, 20) if loss.objective.classifies else 3 + draw.normal(size=20)
    gradient = loss.gradients(score, y)
    for c in range(loss.scores):
        move = np.zeros_like(score)
        move[..., c] = step
        up, now, down = (loss.losses(score + sign * move, y).astype(np.float64) for sign in (1, 0, -1))
        assert np.allclose((up - down) / (2 * step), gradient[..., c], atol=2e-3)
        if loss.objective.classifies:
            assert np.allclose((up - 2 * now + down) / step**2, gradient[..., loss.scores + c], atol=2e-2)


def test_leaf_changes_are_those_of_ridge_regression() -> None:
    """One tree: δ = −G / (H + penalty) in every leaf; several: the solution of the normal equations."""
    draw = np.random.default_rng(7)
    node, g, h = draw.integers(0, 4, (50, 3)).astype(np.uint8), draw.normal(size=(50, 1)), np.ones((50, 1))
    g, h = g.astype(np.float32), h.astype(np.float32)
    first, penalty = np.array([0, 50]), np.array([2.0])
    one, _ = tree_loops.refit_leaves(node[:, :1].copy(), first, g, h, penalty, 4, 1)
    for leaf in range(4):
        own = node[:, 0] == leaf
        assert one[0, 0, leaf, 0] == pytest.approx(-g[own].sum() / (own.sum() + 2), rel=1e-5)
    design = np.concatenate([node[:, t : t + 1] == np.arange(4) for t in range(3)], 1).astype(np.float64)
    wanted = np.linalg.solve(design.T @ design + 2 * np.eye(12), -design.T @ g[:, 0])
    all_trees, score = tree_loops.refit_leaves(node, first, g, h, penalty, 4, 60)
    assert np.allclose(all_trees.reshape(-1), wanted, atol=1e-4)
    assert np.allclose(score[:, 0], design @ wanted, atol=1e-4)


# ---- rows ----


def test_dependence_follows_splits_on_the_feature_and_averages_over_others() -> None:
    """x1 ≤ 2: then x0 ≤ 1 says 1 or 2; else x0 ≤ 3 says 3 or 4, for 10, 30, 20 and 40 rows."""
    feature, split = np.array([[[[1, 0, 0]]]], np.int16), np.array([[[[2, 1, 3]]]], np.uint8)
    value = np.array([1.0, 2.0, 3.0, 4.0], np.float32).reshape(1, 1, 1, 4, 1)
    trees, cover = Trees(feature, split, np.zeros_like(split), value), np.array([[10.0, 30.0, 20.0, 40.0]])
    along_0 = dependence(trees, cover, 0, 6)[:, 0]
    assert np.allclose(along_0, [0.4 * 1 + 0.6 * 3] + 2 * [0.4 * 2 + 0.6 * 3] + 2 * [0.4 * 2 + 0.6 * 4])
    along_1 = dependence(trees, cover, 1, 6)[:, 0]
    assert np.allclose(along_1, 2 * [1.75] + 3 * [11 / 3])
    assert np.allclose(dependence(trees, cover, 2, 6)[:, 0], (10 + 60 + 60 + 160) / 100)
    assert np.allclose(importance(feature[0, 0], np.array([[6.0, 1.0, 3.0]]), 3), [0.4, 0.6, 0.0])


def small_ensemble() -> EnsembleRows:
    """x0 ≤ 1 left, missing right; left: x1 ≤ −2 left; right: no split. Two scores are class logits."""
    part: Callable[[list[float]], torch.Tensor] = lambda numbers: torch.tensor(numbers)[None, None]  # noqa: E731
    value = torch.arange(8.0).reshape(1, 1, 4, 2)
    shape = TreeShape(2, 2, 2, 2, 1)
    return EnsembleRows(
        shape,
        part([0, 1, -1]).long(),
        part([1.0, -2.0, 0.0]),
        part([0.0, 1.0, 0.0]),
        value,
        torch.zeros(1, 2, 2),
        torch.tensor([[10.0, 20.0]]),
    )


def test_a_row_holds_all_of_an_ensemble() -> None:
    ensemble = small_ensemble()
    row = ensemble.rows()
    again = EnsembleRows.of_rows(row)
    assert again.shape == ensemble.shape
    assert torch.equal(again.rows(), row)
    nan = torch.nan
    x = torch.tensor([[[0.0, -2.0], [1.0, 0.0], [2.0, 0.0], [nan, 0.0], [0.0, nan]]])
    leaf = [0, 1, 2, 2, 0]
    wanted = [[10 + 2 * one, 21 + 2 * one] for one in leaf]
    assert again.logits(x)[0].tolist() == wanted


def test_rows_of_other_models_are_no_ensembles() -> None:
    row = small_ensemble().rows()[0]
    assert TreeShape.of_row(row[1:]) is None
    assert TreeShape.of_row(torch.randn(len(row))) is None
