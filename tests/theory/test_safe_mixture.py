"""Safe mixtures: the guarantee for any rows, limits, and the expectation over exchangeable rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinfed.theory.safe_mixture import likely_shares, most_it_costs, prior_weights, safe_shares


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 40),
    experts=st.integers(1, 5),
    alone=st.floats(0.05, 0.95),
    scale=st.floats(0.01, 8),
)
def test_predicting_any_rows_in_turn_costs_at_most_the_logarithm_of_the_prior(seed, rows, experts, alone, scale):
    log_p = -scale * np.random.default_rng(seed).exponential(size=(experts, rows))
    prior = prior_weights(experts, alone)
    result = safe_shares(log_p, prior)
    assert result.shares.sum() == pytest.approx(1)
    assert (result.shares > 0).all()
    # Averaging the orders' predictions can only help, by Jensen's inequality.
    best = (-result.log_p.sum(1) - np.log(prior)).min()
    assert result.predictive_loss.sum() <= best + 1e-9


def test_one_expert_has_everything_and_no_rows_leave_the_prior():
    assert safe_shares(np.full((1, 7), -2.0), prior_weights(1)).shares == pytest.approx([1])
    assert safe_shares(np.zeros((3, 0)), prior_weights(3)).shares == pytest.approx([0.5, 0.25, 0.25])
    assert most_it_costs(0) == pytest.approx(np.log(2))


def test_equal_experts_keep_their_prior_and_a_row_of_weight_two_counts_as_two():
    log_p = np.log(np.random.default_rng(0).uniform(0.1, 0.9, 9))
    assert safe_shares(np.stack([log_p] * 3), prior_weights(3)).shares == pytest.approx([0.5, 0.25, 0.25])
    one_row = np.log([[0.5], [0.9]])
    # By hand: W_0 = (1/2, 1/2), W_1 ∝ (1/2 · 0.5, 1/2 · 0.9), and with weight 2 ∝ (0.5², 0.9²).
    assert safe_shares(one_row, prior_weights(2)).shares[0] == pytest.approx((0.5 + 0.5 / 1.4) / 2)
    twice = safe_shares(one_row, prior_weights(2), np.array([2.0]))
    assert twice.shares[0] == pytest.approx((0.5 + 0.25 / (0.25 + 0.81)) / 2)


def test_the_deployed_mixture_keeps_its_promise_on_fresh_rows():
    """Experts of 60 % and 75 % on coin flips: over many draws of 20 rows, the mean excess stays below the bound."""
    draws, generator = 400, np.random.default_rng(1)
    p = np.array([0.6, 0.75])
    for truth in (0.5, 0.6, 0.9):
        excess = []
        for _ in range(draws):
            hit = generator.random(20) < truth
            shares = safe_shares(np.log(np.where(hit, p[:, None], 1 - p[:, None])), prior_weights(2)).shares
            mixed = shares @ p
            loss = -truth * np.log([mixed, p[0]]) - (1 - truth) * np.log([1 - mixed, 1 - p[0]])
            excess.append(loss[0] - loss[1])
        error = np.std(excess) / draws**0.5
        assert np.mean(excess) <= most_it_costs(20) + 3 * error


def test_likely_shares_find_the_mixture_that_made_the_rows():
    generator = np.random.default_rng(2)
    first = generator.random(4000) < 0.55
    log_p = np.log(np.where(first, [[0.8], [0.3]], [[0.2], [0.7]]))
    pi = likely_shares(log_p, np.array([0.5, 0.5]), strength=1e-6)
    gradient = (np.exp(log_p) / (pi @ np.exp(log_p))).mean(1)
    inside = pi > 1e-3
    assert gradient[inside] == pytest.approx(np.ones(inside.sum()), abs=5e-3)  # the first-order condition


def test_without_rows_likely_shares_are_the_prior():
    assert likely_shares(np.zeros((2, 0)), np.array([0.2, 0.8])) == pytest.approx([0.2, 0.8])
