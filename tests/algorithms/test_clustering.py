"""k-means on models: exact distances, equal points, numbering, absent members; scikit-learn as witness."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

from kinfed.algorithms.common.clustering import RESOLUTION, Array, k_means, k_means_path, lloyd, num_distinct
from kinfed.core.kernels import coordinates, pairwise_distances


def models(n: int, width: int, spread: float, seed: int = 0) -> Tensor:
    """Float32 models around a common start, as after a round of training."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy((draw.normal(size=width) + spread * draw.normal(size=(n, width))).astype(np.float32))


def groups(sizes: tuple[int, ...], width: int = 50, apart: float = 5.0, seed: int = 0) -> tuple[Tensor, Array]:
    """Well separated groups of models, and which one each belongs to."""
    draw = np.random.default_rng(seed)
    member = np.repeat(np.arange(len(sizes)), sizes)
    points = apart * draw.normal(size=(len(sizes), width))[member] + draw.normal(size=(len(member), width))
    return torch.from_numpy(points.astype(np.float32)), member


def exact_distances(points: Tensor) -> Array:
    x = points.to(torch.float64).numpy()
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))


def between(x: Array) -> Array:
    return np.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))


def brute_force(x: Array, k: int, weight: Array) -> float:
    """The least cost over all ways to give the points one of k labels."""
    share, best = weight / weight.sum(), np.inf
    for labels in itertools.product(range(k), repeat=len(x)):
        cost = 0.0
        for j in set(labels):
            mine = np.array(labels) == j
            centre = np.average(x[mine], axis=0, weights=share[mine])
            cost += (share[mine] * ((x[mine] - centre) ** 2).sum(1)).sum()
        best = min(best, cost)
    return best


def same_partition(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return bool(((a[:, None] == a[None]) == (b[:, None] == b[None])).all())


# Coordinates.


@given(st.integers(1, 9), st.integers(1, 60), st.sampled_from([1e-6, 1e-3, 1.0, 1e4]), st.integers(0, 10**6))
def test_coordinates_have_the_distances_of_the_models(n: int, width: int, spread: float, seed: int) -> None:
    points = models(n, width, spread, seed)
    x, wanted = coordinates(points), exact_distances(points)
    assert x.shape[0] == n
    assert x.shape[1] <= n
    np.testing.assert_allclose(between(x), wanted, atol=max(RESOLUTION, 1e-12) * wanted.max())


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-5])
def test_models_of_a_first_round_are_told_apart_as_well_as_late_ones(spread: float) -> None:
    """All close to one start: what counts is their distance from each other, not from zero."""
    points = models(12, 20_000, spread)
    wanted = exact_distances(points)
    np.testing.assert_allclose(between(coordinates(points)), wanted, rtol=1e-12, atol=1e-12 * wanted.max())


def test_two_close_models_beside_distant_ones() -> None:
    """Down to about a ten-millionth of the largest distance; below, two models count as one."""
    points = models(5, 1000, 1.0).to(torch.float64)
    step = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for gap, within in ((1e-3, 1e-8), (1e-5, 1e-4)):
        points[1] = points[0] + gap * step
        assert between(coordinates(points))[0, 1] == pytest.approx(gap * float(step.norm()), rel=within)
    points[1] = points[0] + 1e-9 * step
    assert num_distinct(coordinates(points)) == 4


def test_several_arguments_are_rows_below_each_other() -> None:
    points = models(7, 40, 1.0)
    np.testing.assert_allclose(between(coordinates(points[:4], points[4:])), exact_distances(points), atol=1e-9)


def test_wide_models_are_taken_block_by_block() -> None:
    points = models(3, 200_003, 1e-2)
    np.testing.assert_allclose(between(coordinates(points)), exact_distances(points), rtol=1e-9, atol=1e-12)


def test_equal_models_have_equal_coordinates() -> None:
    assert not coordinates(models(1, 50, 1.0).expand(6, -1)).any()
    twice = models(5, 500, 1e-3).repeat(2, 1)
    assert num_distinct(coordinates(twice)) == 5


def test_distances_between_models() -> None:
    points = models(30, 300, 1e-3)
    np.testing.assert_allclose(pairwise_distances(points), exact_distances(points), rtol=1e-6, atol=1e-12)
    assert pairwise_distances(points[:1]).tolist() == [[0.0]]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 10**6))
def test_distinct_points_are_counted_once(which: list[int], seed: int) -> None:
    points = models(5, 30, 1e-3, seed)[which]
    assert num_distinct(coordinates(points)) == len(set(which))


# k-means afresh.


def test_small_problems_are_nearly_always_solved_to_the_optimum() -> None:
    """Lloyd's iterations may end beside it, but hardly ever all of a dozen do."""
    solved = 0
    for seed in range(40):
        draw = np.random.default_rng(seed)
        n, k = int(draw.integers(1, 8)), int(draw.integers(1, 4))
        x, weight = draw.normal(size=(n, 2)), draw.integers(1, 50, n).astype(float)
        found, least = k_means(x, k, seed, weight).cost, brute_force(x, k, weight)
        assert least * (1 - 1e-9) - 1e-12 <= found <= 1.25 * least + 1e-12
        solved += found <= least * (1 + 1e-9) + 1e-12
    assert solved >= 38


def test_clusters_are_those_of_scikit_learn_on_the_raw_models() -> None:
    """Four groups in 400 dimensions, a thousandth apart where the models themselves are of size one."""
    for seed in range(4):
        points, member = groups((7, 3, 12, 5), width=400, apart=0.5, seed=seed)
        points = points * 1e-3 + models(1, 400, 0.0)
        found = k_means(coordinates(points), 4, seed)
        assert same_partition(found.label, member)
        raw = points.double().numpy()
        centres = np.stack([raw[found.label.numpy() == j].mean(0) for j in range(4)])
        with threadpool_limits(1):
            witness = KMeans(4, init=centres, n_init=1, tol=0).fit(raw)
            random = KMeans(4, n_init=10, tol=0, random_state=seed).fit(raw)
        assert witness.labels_.tolist() == found.label.tolist()  # nothing is left to improve
        assert found.cost == pytest.approx(witness.inertia_ / len(points), rel=1e-9)
        assert found.cost <= random.inertia_ / len(points) * (1 + 1e-9)


def test_hardly_separated_models_are_found_where_random_starts_fail() -> None:
    """Groups in 400 dimensions whose centres are nearer to each other than members are to their own."""
    right = 0
    for seed in range(5):
        points, member = groups((7, 3, 12, 5, 6, 7), width=400, apart=0.5, seed=seed)
        right += same_partition(k_means(coordinates(points), 6, seed).label, member)
    assert right == 5


def test_renumbered_points_get_the_same_clusters_under_the_same_numbers() -> None:
    points, _ = groups((4, 4, 4, 4), apart=0.3)  # hardly separated: a different draw gives different clusters
    usual = k_means(coordinates(points), 4, 1)
    for seed in range(5):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(16))
        found = k_means(coordinates(points[order]), 4, 1)
        assert torch.equal(found.label, usual.label[order])
        assert found.cost == pytest.approx(usual.cost, rel=1e-12)


def test_equal_points_are_never_split() -> None:
    points = models(3, 100, 1.0)[[0, 1, 0, 2, 2, 1, 0]]
    for k in (3, 4, 7):
        assert same_partition(k_means(coordinates(points), k, 0).label, [0, 1, 0, 2, 2, 1, 0])
    assert k_means(coordinates(models(1, 10, 1.0).expand(4, -1)), 3, 0).label.tolist() == [0, 0, 0, 0]


def test_equal_points_count_as_often_as_they_occur() -> None:
    x = np.array([[0.0], [0.0], [0.0], [1.0]])
    assert k_means(x, 1, 0).cost == pytest.approx(3 / 16)  # centre 1/4: (3 · 1/16 + 9/16) / 4
    assert k_means(x, 1, 0, weight=np.array([1.0, 1.0, 1.0, 3.0])).cost == pytest.approx(1 / 4)


def test_threads_do_not_matter() -> None:
    points, _ = groups((4, 4, 4), apart=0.3)
    x = coordinates(points)
    with threadpool_limits(2):
        two = k_means(x, 3, 5)
    assert torch.equal(two.label, k_means(x, 3, 5).label)


# A path over k.


@given(st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=25)
def test_the_cost_never_rises_with_k(n: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 3))[draw.integers(0, n, n)]  # some of them equal
    path = k_means_path(x, list(range(n)), draw.integers(1, 9, n).astype(float))
    costs = [clusters.cost for clusters in path]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(costs))
    assert costs[-1] == pytest.approx(0.0, abs=1e-12)
    for k, clusters in enumerate(path, 1):
        assert len(clusters.label.unique()) == min(k, num_distinct(x))


# k-means from given centres.


def test_centres_keep_their_numbers() -> None:
    points, member = groups((5, 5, 5))
    x = coordinates(points)
    means = np.stack([x[member == j].mean(0) for j in range(3)])
    for order in itertools.permutations(range(3)):
        found = lloyd(x, means[list(order)])
        assert found.label.tolist() == [order.index(j) for j in member]


def test_centres_move_until_nothing_changes() -> None:
    """On a line: from centres 0 and 1, the points 0, 1, 2, 9, 10 take three moves to fall into {0,1,2} and {9,10}."""
    x = np.array([[0.0], [1.0], [2.0], [9.0], [10.0]])
    found = lloyd(x, np.array([[0.0], [1.0]]))
    assert found.label.tolist() == [0, 0, 0, 1, 1]
    assert found.cost == pytest.approx((2 + 0.5) / 5)


def test_an_empty_centre_takes_the_worst_fitting_point() -> None:
    x = np.array([[0.0], [1.0], [5.0]])
    found = lloyd(x, np.array([[0.0], [100.0]]))
    assert found.label.tolist() == [0, 0, 1]


def test_a_held_centre_stays_empty() -> None:
    x = np.array([[0.0], [1.0], [5.0]])
    held = np.array([False, True])
    assert lloyd(x, np.array([[0.0], [100.0]]), held=held).label.tolist() == [0, 0, 0]
    assert lloyd(x, np.array([[0.0], [6.0]]), held=held).label.tolist() == [0, 0, 1]  # held, but not in vain


def test_equal_points_do_not_fill_empty_centres() -> None:
    x = np.array([[1.0], [1.0], [1.0]])
    assert lloyd(x, np.array([[0.0], [3.0], [9.0]])).label.tolist() == [0, 0, 0]


@given(st.integers(1, 10), st.integers(1, 10), st.integers(0, 10**6))
def test_no_centre_is_empty_as_long_as_points_differ(n: int, k: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 2))[draw.integers(0, n, n)]
    found = lloyd(x, 10 * draw.normal(size=(k, 2)))
    assert len(found.label.unique()) == min(k, num_distinct(x))
