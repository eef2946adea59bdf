"""The passes over models that Self-FL needs: exact for any width, also where they go block by block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.algorithms.selffl.uncertainty import Rules, Running, start_of
from kinfed.core.kernels import squared_norm

ODD_WIDTHS = st.sampled_from([1, 63, 64, 65, 130, 1_000, 16_385, 65_537])  # the last two go by dot products


def models(n: int, width: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(1.0, 2.0, (n, width)).astype(np.float32))


@given(n=st.integers(1, 4), width=ODD_WIDTHS, seed=st.integers(0, 99))
def test_squared_norms_of_any_width(n: int, width: int, seed: int):
    x = models(n, width, seed)
    np.testing.assert_allclose(squared_norm(x), np.square(x.numpy().astype(np.float64)).sum(1), rtol=1e-6)


@settings(deadline=None)
@given(n=st.sampled_from([2, 3, 700]), width=st.sampled_from([1, 64, 193, 1_000]), seed=st.integers(0, 9))
def test_the_spread_of_clients_does_not_depend_on_the_blocks_it_is_added_up_in(n: int, width: int, seed: int):
    x = models(n, width, seed)
    exact = n * x.numpy().astype(np.float64).var(0).sum()
    spread = Rules().variance_between(x, torch.tensor(0.0, dtype=torch.float64))
    assert spread.dtype == torch.float64
    assert float(spread) == pytest.approx(exact, rel=1e-5)
    everyone = torch.ones(n, dtype=torch.bool)
    assert float(Rules().variance_between(x, torch.zeros((), dtype=torch.float64), everyone)) == pytest.approx(
        exact, rel=1e-5
    )


def test_one_model_says_nothing_about_the_spread_and_wide_models_take_several_blocks():
    before = torch.tensor(7.0, dtype=torch.float64)
    assert float(Rules().variance_between(models(1, 65, 0), before)) == 7.0
    wide = models(2, 200_001, 0)  # 131,072 numbers are a block
    gap = (wide[0] - wide[1]).to(torch.float64)
    assert float(Rules().variance_between(wide, before)) == pytest.approx(float(gap @ gap) / 2, rel=1e-5)


def test_the_first_model_is_its_own_mean_to_the_bit_and_what_was_given_stays():
    x, nothing = models(3, 130, 1), torch.zeros(3, 130)
    first = Running(torch.zeros(3, dtype=torch.int64), nothing, torch.zeros(3, dtype=torch.float64)).add(x)
    assert torch.equal(first.mean, x)
    assert first.m2.tolist() == [0.0] * 3
    kept = first.mean.clone()
    second = first.add(models(3, 130, 2))
    assert torch.equal(first.mean, kept)
    assert torch.equal(nothing, torch.zeros(3, 130))
    torch.testing.assert_close(second.mean, (x + models(3, 130, 2)) / 2)


@given(width=ODD_WIDTHS, seed=st.integers(0, 99))
def test_the_start_is_as_printed_and_theta_itself_where_the_ratio_is_zero(width: int, seed: int):
    theta, own = models(1, width, seed).expand(3, -1), models(3, width, seed + 1)
    ratio = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    start = start_of(theta, own, ratio)
    assert torch.equal(start[0], theta[0])
    torch.testing.assert_close(start, theta - ratio[:, None].float() * (own - theta), rtol=1e-5, atol=1e-5)
