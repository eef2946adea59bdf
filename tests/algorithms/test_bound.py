"""The computable terms of CGPFL's bound, by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinfed.algorithms.cgpfl.bound import complexity, confidence, cost, label_discrepancy


def test_confidence_by_hand() -> None:
    assert confidence(40, 45_000) == pytest.approx(2 * math.sqrt(math.log(800) / 45_000))
    assert confidence(40, 45_000, 0.5) < confidence(40, 45_000, 0.01)
    for delta in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="probability"):
            confidence(40, 100, delta)


def test_complexity_by_hand() -> None:
    """d = 7850 parameters and m = 45,000 examples: 0.69, 1.38 and 3.10 for 1, 4 and 20 contexts."""
    found = [complexity(k, 7850, 45_000) for k in (1, 4, 20)]
    exact = [math.sqrt(k * 7850 * math.log(math.e * 45_000 / 7850) / 45_000) for k in (1, 4, 20)]
    assert found == pytest.approx(exact)
    assert found == pytest.approx([0.69, 1.38, 3.10], abs=0.01)


def test_with_fewer_examples_than_parameters_the_growth_function_is_the_bound() -> None:
    """ln(e m/d) is negative for d > e m; the number of ways to label m examples is 2^m at most."""
    root = math.sqrt(math.log(2))
    for d, m in ((1_000_000, 45_000), (101, 100)):
        assert [complexity(k, d, m) for k in (1, 9)] == pytest.approx([root, 3 * root])
    assert complexity(1, 100, 100) == 1.0  # ln(e) = 1 where they are equal


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_complexity_is_a_number_that_grows_with_k(d: int, m: int) -> None:
    found = [complexity(k, d, m) for k in range(1, 5)]
    assert all(map(math.isfinite, found))
    assert all(a < b for a, b in pairwise(found))


def test_cost_by_hand() -> None:
    """Distances² to the nearest of two contexts: 1, 4 and 0, with shares 1/2, 1/4 and 1/4."""
    theta = torch.tensor([[1.0, 0.0], [0.0, 2.0], [10.0, 0.0]])
    omega = torch.tensor([[0.0, 0.0], [10.0, 0.0]])
    assert cost(theta, omega, torch.tensor([20, 10, 10])) == pytest.approx(0.5 * 1 + 0.25 * 4)
    assert cost(theta, omega[:1], torch.tensor([20, 10, 10])) == pytest.approx(0.5 + 1 + 25)
    assert cost(theta, theta, torch.tensor([20, 10, 10])) == 0.0


def test_label_discrepancy_by_hand() -> None:
    found = label_discrepancy([[3, 1], [5, 0], [2, 2], [1, 0]], [[6, 2], [0, 7], [1, 3], [0, 0]])
    assert found[:3].tolist() == pytest.approx([0.0, 1.0, 0.25])
    assert math.isnan(found[3])


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=2, max_size=2),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_label_discrepancy_bounds_the_difference_of_losses(counts: list[list[int]], loss: list[float]) -> None:
    """Any loss in [0, 1] that depends on the class only: |Σ (p − q) loss| is at most the total variation."""
    p, q = (np.array(row) / sum(row) for row in counts)
    gap = abs(float((p - q) @ np.array(loss)))
    assert gap <= float(label_discrepancy(counts[:1], counts[1:])[0]) + 1e-12
