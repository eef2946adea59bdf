"""tanh and exp of vectors, beside those of numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numba import njit

from kinfed.engine.vector_functions import EXP_ENDS, exp_of, tanh_of


@njit  # type: ignore[untyped-decorator]
def exp_in_place(x: np.ndarray) -> None:
    exp_of(x.ctypes.data, len(x))


@njit  # type: ignore[untyped-decorator]
def tanh_in_place(x: np.ndarray) -> None:
    tanh_of(x.ctypes.data, len(x))


def applied(function: Callable[[np.ndarray], None], x: np.ndarray) -> np.ndarray:
    """In the middle of other numbers, which stay as they are."""
    around = np.full(len(x) + 2, 7, np.float32)
    inside = around[1:-1]
    inside[:] = x
    function(inside)
    assert around[0] == around[-1] == 7
    return inside


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100_003])
def test_values_are_those_of_numpy_to_a_few_last_bits(count: int) -> None:
    for function, exact, (least, most) in (
        (exp_in_place, np.exp, EXP_ENDS),
        (tanh_in_place, np.tanh, (-12.0, 12.0)),
    ):
        x = np.random.default_rng(0).uniform(least, most, count).astype(np.float32)
        wanted = exact(x.astype(np.float64))
        assert (np.abs(applied(function, x) - wanted) <= 4e-7 * np.abs(wanted)).all()


def test_small_arguments_of_softmax_are_exact_enough() -> None:
    x = np.array([0.0, -0.0, -1e-8, -1e-30, -0.34657, -0.34658, -0.6931472, -1.0], np.float32)
    assert np.allclose(applied(exp_in_place, x), np.exp(x.astype(np.float64)), rtol=1.2e-7, atol=0)
    assert applied(exp_in_place, x)[0] == 1.0


def test_ends_and_nan() -> None:
    x = np.array([-np.inf, -88.0, np.nan, 89.0, np.inf, -87.0], np.float32)
    small, below, nan, large, largest, at_end = applied(exp_in_place, x)
    assert small == below == 0
    assert np.isnan(nan)
    assert large == largest == pytest.approx(np.exp(88.0), rel=1e-6)
    assert at_end == pytest.approx(np.exp(-87.0), rel=1e-6)
    low, nan, high = applied(tanh_in_place, np.array([-np.inf, np.nan, np.inf], np.float32))
    assert (low, high) == pytest.approx((-1, 1), rel=2e-7)
    assert np.isnan(nan)
