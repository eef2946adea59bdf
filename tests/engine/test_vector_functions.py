"""Functions of vectors and products in tiles, beside those of numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numba import njit

from kinfed.engine.compiled.products import products_of_rows
from kinfed.engine.compiled.vector_functions import EXP_ENDS, add_sum_of_rows, add_to_rows, softmax_of, tanh_of

COUNTS = [1, 7, 8, 9, 10, 16, 17, 1003]


@njit  # type: ignore[untyped-decorator]
def tanh_in_place(x: np.ndarray) -> None:
    tanh_of(x.ctypes.data, len(x))


@njit  # type: ignore[untyped-decorator]
def softmax(z: np.ndarray, weight: np.float32, p: np.ndarray) -> None:
    softmax_of(z.ctypes.data, len(z), weight, p.ctypes.data)


@njit  # type: ignore[untyped-decorator]
def to_rows(x: np.ndarray, rows: int, y: np.ndarray) -> None:
    add_to_rows(x.ctypes.data, rows, len(y), y.ctypes.data)


@njit  # type: ignore[untyped-decorator]
def sum_of_rows(x: np.ndarray, rows: int, by: np.float32, y: np.ndarray) -> None:
    add_sum_of_rows(x.ctypes.data, rows, len(y), by, y.ctypes.data)


@njit  # type: ignore[untyped-decorator]
def products(a: np.ndarray, b: np.ndarray, c: np.ndarray, c_row: int) -> None:
    m, n, k = len(a), len(b), a.shape[1]
    products_of_rows(m, n, k, a.ctypes.data, k, b.ctypes.data, k, c.ctypes.data, c_row)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def guarded(values: np.ndarray, call: Callable[[np.ndarray], None]) -> np.ndarray:
    """What a call makes of values in the middle of others, which stay as they are."""
    around = np.full(values.size + 2, 7, np.float32)
    inside = around[1:-1]
    inside[:] = values.ravel()
    call(inside)
    assert around[0] == around[-1] == 7
    return inside.reshape(values.shape)


def softmax_of_row(z: np.ndarray, weight: float = 1.0) -> np.ndarray:
    return guarded(np.empty_like(z), lambda p: softmax(z, np.float32(weight), p))


@pytest.mark.parametrize("count", [0, *COUNTS, 100_003])
def test_tanh_is_that_of_numpy_to_a_few_last_bits(count: int) -> None:
    x = np.random.default_rng(0).uniform(-12, 12, count).astype(np.float32)
    wanted, found = np.tanh(x.astype(np.float64)), guarded(x, tanh_in_place)
    assert (np.abs(found - wanted) <= 4e-7 * np.abs(wanted)).all()
    assert (np.abs(found) <= 1).all()


def test_ends_of_tanh() -> None:
    low, nan, high = guarded(np.array([-np.inf, np.nan, np.inf], np.float32), tanh_in_place)
    assert (low, high) == pytest.approx((-1, 1), rel=2e-7)
    assert np.isnan(nan)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_softmax_is_that_of_numpy(count: int, scale: float) -> None:
    z = scale * numbers(count)
    exact = np.exp(z.astype(np.float64) - z.max())
    found = softmax_of_row(z, 0.25)
    shares = 0.25 * exact / exact.sum()
    # A difference of 87 is rounded by 4e-6, which is the relative error of its exponential.
    assert np.allclose(found, shares, rtol=1e-5 if scale > 1 else 1e-6, atol=0.25 * np.exp(EXP_ENDS[0]))
    assert found.sum(dtype=np.float64) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 8, 10, 30])
def test_softmax_of_extreme_logits(count: int) -> None:
    z = np.full(count, -1e30, np.float32)
    z[-1] = 1e30
    assert softmax_of_row(z).tolist() == [0.0] * (count - 1) + [1.0]
    for level in (5e37, -5e37, 300.0, -300.0):  # far from zero, where lanes beside the row are
        assert softmax_of_row(np.full(count, level, np.float32)) == pytest.approx(1 / count)
    for bad in (np.nan, np.inf):  # a model that gives it has lost its way: nothing is made up
        for place in (0, count // 2, count - 1):
            z = numbers(count)
            z[place] = bad
            assert np.isnan(softmax_of_row(z)).all() or (count == 1 and bad == np.inf)
    assert np.isnan(softmax_of_row(np.full(count, -np.inf, np.float32))).all()
    if count > 1:
        z = np.zeros(count, np.float32)
        z[0] = -np.inf
        assert softmax_of_row(z) == pytest.approx([0.0] + [1 / (count - 1)] * (count - 1))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rows", [0, 1, 5, 20])
def test_sums_of_rows(count: int, rows: int) -> None:
    x, y = numbers(rows, count), numbers(count) + 1
    assert np.array_equal(guarded(x, lambda inside: to_rows(inside, rows, y)), x + y)
    found = guarded(y, lambda inside: sum_of_rows(x, rows, np.float32(-0.5), inside))
    assert np.allclose(found, y - 0.5 * x.sum(0, dtype=np.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("m", range(1, 22))
def test_products_of_rows_of_any_size(m: int) -> None:
    for n in range(1, 10):
        for k in (1, 7, 8, 9, 20):
            a, b = numbers(m, k), numbers(n, k)
            c = np.full((m + 1, n + 2), 7, np.float32)
            products(a, b, c, n + 2)
            assert np.allclose(c[:m, :n], a.astype(np.float64) @ b.T, rtol=0, atol=2e-6 * k)
            assert (c[m] == 7).all()
            assert (c[:, n:] == 7).all()
