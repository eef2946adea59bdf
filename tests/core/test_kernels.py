"""Kernels on rows against the textbook in float64, over sizes below and beyond one block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import Tensor

from kinfed.core import kernels
from kinfed.core.kernels import (
    IN_CACHE,
    LONG,
    METRICS,
    cosines,
    l1_distances,
    norm,
    pairwise_distances,
    pairwise_squared_distances,
    spread,
    squared_distances,
    squared_norm,
    weighted_mean,
    weighted_sum,
)

WIDTHS = st.sampled_from([0, 1, 63, 64, 65, 1000, LONG - 1, LONG, LONG + 3])
NAMES = {"l2": "euclidean", "l1": "cityblock", "cosine": "cosine"}


def rows(n: int, width: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(1.0, 2.0, (n, width)).astype(np.float32))


# --- means and sums


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 10**6))
def test_the_mean_is_the_weighted_mean(n: int, width: int, seed: int) -> None:
    x, weight = rows(n, width, seed), torch.from_numpy(np.random.default_rng(seed).integers(1, 5000, n))
    mean = weighted_mean(x, weight.to(torch.float32))
    assert mean.dtype == torch.float32
    np.testing.assert_allclose(mean, np.average(x.double(), axis=0, weights=weight), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("n", "width"), [(3, 100_000), (128, 2049), (300, 1100), (1, 1), (2, 0)])
def test_the_mean_of_any_size_has_all_rows_and_columns(n: int, width: int) -> None:
    x = torch.arange(n * width, dtype=torch.float32).reshape(n, width).sqrt()
    weight = 1.0 + torch.arange(n) % 5
    wanted = x.double().T @ (weight.double() / weight.double().sum())
    torch.testing.assert_close(weighted_mean(x, weight), wanted.float(), rtol=1e-7, atol=0)


def test_the_mean_of_equal_rows_is_that_row() -> None:
    row = torch.tensor([[1e8, 1e-8, 0.1, -3.0]])
    for count in (3, 7, 49):  # 1/3, 1/7 and 1/49 are not exact
        assert torch.equal(weighted_mean(row.expand(count, -1), torch.ones(count)), row[0])


def test_many_small_rows_are_not_lost_beside_a_large_one() -> None:
    x = torch.cat([torch.tensor([[1e8]]), torch.ones(1000, 1), torch.tensor([[-1e8]])])
    assert float(weighted_mean(x, torch.ones(1002))) == pytest.approx(1000 / 1002)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (3, 7), (2, IN_CACHE), (0, 5)])
@pytest.mark.parametrize("count", [1, 4])
def test_a_weighted_sum_has_weights_of_every_client(n: int, width: int, count: int) -> None:
    models = [rows(n, width, seed) for seed in range(count)]
    weight = torch.linspace(-1, 1, n * count, dtype=torch.float64).reshape(n, count)
    wanted = torch.einsum("jnp,nj->np", torch.stack(models).double(), weight)
    total = weighted_sum(models, weight)
    torch.testing.assert_close(total, wanted.float(), rtol=1e-5, atol=1e-5)
    weighted_sum([x.expand_as(x) for x in models], weight).add_(1)
    assert torch.equal(models[0], rows(n, width, 0))  # the sum is a tensor of its own


# --- norms


@given(st.integers(1, 4), WIDTHS, st.integers(0, 99))
def test_norms_are_those_of_float64(n: int, width: int, seed: int) -> None:
    x = rows(n, width, seed)
    square = np.square(x.numpy().astype(np.float64)).sum(1)
    assert squared_norm(x).dtype == torch.float64
    np.testing.assert_allclose(squared_norm(x), square, rtol=1e-6)
    np.testing.assert_allclose(norm(x), np.sqrt(square), rtol=1e-6)
    np.testing.assert_allclose(squared_norm(x.reshape(n, 1, width)), square[:, None], rtol=1e-6)


@given(st.integers(1, 5), WIDTHS, st.integers(0, 99))
def test_the_spread_is_around_the_mean(n: int, width: int, seed: int) -> None:
    x = rows(n, width, seed)
    wide = x.double()
    assert float(spread(x)) == pytest.approx(float((wide - wide.mean(0)).square().sum()), rel=1e-5, abs=1e-9)


# --- distances


@pytest.mark.parametrize(("n", "width"), [(1, 1), (5, 60), (4, IN_CACHE // 2), (0, 3)])
def test_distances_of_rows_of_the_same_client(n: int, width: int) -> None:
    base, models = rows(n, width), [rows(n, width, 1), rows(n, width), rows(n, width, 2)]
    difference = torch.stack(models, 1).double() - base.double()[:, None]
    torch.testing.assert_close(squared_distances(models, base), difference.square().sum(2), rtol=1e-5, atol=0)
    torch.testing.assert_close(l1_distances(models, base), difference.abs().sum(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("n", "width"), [(5, 3), (2, 100), (7, 30_000)])
def test_pairwise_distances_are_the_textbook_ones(metric: str, n: int, width: int) -> None:
    x, y = rows(n, width, 1), rows(3, width, 2)
    np.testing.assert_allclose(pairwise_distances(x, metric), cdist(x, x, NAMES[metric]), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pairwise_distances(x, metric, y), cdist(x, y, NAMES[metric]), rtol=1e-6, atol=1e-6)
    assert not np.diag(pairwise_distances(x, metric)).any()


def test_a_zero_row_is_at_right_angles_to_all_others() -> None:
    cosine = cosines(torch.tensor([[0.0, 0.0], [3.0, 4.0], [-6.0, -8.0]]))
    np.testing.assert_allclose(cosine, [[1, 0, 0], [0, 1, -1], [0, -1, 1]], atol=1e-15)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (6, 40), (5, 300_000)])
def test_squared_distances_of_all_pairs(n: int, width: int) -> None:
    x = rows(n, width)
    np.testing.assert_allclose(pairwise_squared_distances(x), cdist(x, x, "sqeuclidean"), rtol=1e-9, atol=1e-6)


def test_a_huge_row_does_not_touch_the_distances_of_the_others() -> None:
    x = rows(6, 40)
    x[0] *= 1e30
    others = pairwise_squared_distances(x)[1:, 1:]
    torch.testing.assert_close(others, pairwise_squared_distances(x[1:]), rtol=1e-12, atol=1e-9)


def test_sums_on_a_device_without_float64_are_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's meta device stands for Apple's GPUs: whatever would ask for float64 there shows in the type."""
    real = kernels.widest_float
    assert real(torch.device("mps")) == torch.float32
    monkeypatch.setattr(
        kernels, "widest_float", lambda device: real(torch.device("mps")) if device.type == "meta" else real(device)
    )
    rows = torch.empty(4, 70_000, device="meta")
    sums = [
        kernels.weighted_mean(rows, torch.ones(4)),
        kernels.squared_norm(rows),
        kernels.norm(rows),
        kernels.spread(rows),
        kernels.squared_distances([rows, rows], rows),
        kernels.l1_distances([rows], rows),
        kernels.pairwise_squared_distances(rows),
    ]
    assert {one.dtype for one in sums} == {torch.float32}
