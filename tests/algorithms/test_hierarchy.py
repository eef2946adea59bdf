"""Hierarchical clustering of models against scipy's, against all possible cuts, and at its edges."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist, squareform
from torch import Tensor

from kinfed.algorithms.common.clustering import Linkage, agglomerate
from kinfed.core.kernels import cosines
from kinfed.core.kernels import pairwise_distances as distances

LINKAGES = get_args(Linkage)

NAMES = {"l2": "euclidean", "l1": "cityblock", "cosine": "cosine"}


def points(n: int, seed: int, dims: int = 3) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, dims)).astype(np.float32))


def partition(label: Tensor | np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(np.asarray(label) == c).tolist()) for c in np.unique(np.asarray(label))}


@pytest.mark.parametrize("metric", NAMES)
def test_distances_are_the_textbook_ones(metric: str) -> None:
    x, y = points(5, 1), points(2, 2)
    np.testing.assert_allclose(distances(x, metric), cdist(x, x, NAMES[metric]), atol=1e-6)
    np.testing.assert_allclose(distances(x, metric, y), cdist(x, y, NAMES[metric]), atol=1e-6)
    assert not np.diag(distances(x, metric)).any()


def test_a_zero_row_is_at_right_angles_to_all_others() -> None:
    found = cosines(torch.tensor([[0.0, 0.0], [3.0, 4.0], [-6.0, -8.0]]))
    np.testing.assert_allclose(found, [[1, 0, 0], [0, 1, -1], [0, -1, 1]], atol=1e-15)


def test_cosines_of_tiny_and_huge_rows() -> None:
    tiny = torch.tensor([[1e-30, 0.0], [1e-30, 1e-30], [1e30, 1e30]])
    np.testing.assert_allclose(cosines(tiny)[0], [1, 0.5**0.5, 0.5**0.5], rtol=1e-6)


@given(st.sampled_from(LINKAGES), st.integers(2, 8), st.floats(0.05, 3), st.integers(0, 10**6))
def test_cutting_at_a_distance_is_what_scipy_does(rule: str, n: int, threshold: float, seed: int) -> None:
    x = points(n, seed)
    tree = linkage(squareform(cdist(x.double(), x.double()), checks=False), rule)
    wanted = fcluster(tree, threshold, "distance")
    assert partition(agglomerate(x, rule, "l2", threshold=threshold)) == partition(wanted)


@given(st.integers(2, 7), st.integers(0, 10**6))
def test_single_linkage_minimizes_the_largest_cosine_between_the_parts(n: int, seed: int) -> None:
    x = points(n, seed)
    similar = cosines(x)

    def cross(second: np.ndarray) -> float:
        return float(similar[~second][:, second].max())

    cuts = [np.array(bits, dtype=bool) for bits in itertools.product([0, 1], repeat=n) if 0 < sum(bits) < n]
    best = min(cross(cut) for cut in cuts)
    assert cross(agglomerate(x, "single", "cosine", clusters=2).numpy() == 1) == pytest.approx(best, abs=1e-12)


def test_labels_are_numbered_by_their_first_points() -> None:
    x = torch.tensor([[5.0], [0.0], [5.1], [9.0], [0.1]])
    assert agglomerate(x, "complete", "l2", threshold=1.0).tolist() == [0, 1, 0, 2, 1]


def test_points_at_the_threshold_are_joined() -> None:
    x = torch.tensor([[0.0], [3.0], [7.0]])
    assert agglomerate(x, "single", "l2", threshold=3.0).tolist() == [0, 0, 1]
    assert agglomerate(x, "single", "l2", threshold=2.9).tolist() == [0, 1, 2]


@pytest.mark.parametrize("rule", LINKAGES)
def test_equal_points_are_one_cluster_at_any_threshold(rule: str) -> None:
    x = points(1, 3).expand(4, -1)
    assert agglomerate(x, rule, "l2", threshold=0.0).tolist() == [0] * 4


def test_one_point_is_one_cluster() -> None:
    assert agglomerate(points(1, 0), "ward", "l2", threshold=0.5).tolist() == [0]
    assert agglomerate(points(1, 0), "complete", "cosine", clusters=2).tolist() == [0]
