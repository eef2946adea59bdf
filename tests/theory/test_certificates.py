"""Certificates: closed forms, misses under the null by simulation, and coverage."""

import numpy as np
import pytest

from kinfed.theory.certificates import (
    covered_share,
    e_process,
    gain_bound,
    mean_over_sites,
    new_site_threshold,
    set_threshold,
)  # fmt: skip


def test_two_pseudo_rows_pull_the_centre_and_never_leave_an_empty_interval():
    d = np.array([1.0, 1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    bound = gain_bound(d, "zero_one")
    assert bound.value == d.mean()
    assert (bound.low + bound.high) / 2 == pytest.approx(d.sum() / (len(d) + 2))
    equal = gain_bound(np.zeros(12), "zero_one")
    assert equal.low < 0 < equal.high
    assert not equal.is_shown


def test_plain_bounds_are_students_intervals():
    d = np.array([0.3, 0.1, -0.2, 0.4, 0.2])
    bound = gain_bound(d, "any")
    error = d.std(ddof=1) / 5**0.5
    assert (bound.low, bound.high) == pytest.approx((d.mean() - 2.7764451052 * error, d.mean() + 2.7764451052 * error))
    assert bound.at_least == pytest.approx(d.mean() - 2.1318467863 * error)


@pytest.mark.parametrize("rows", [0, 1])
def test_nothing_is_bounded_by_fewer_than_two_rows(rows):
    assert gain_bound(np.ones(rows), "zero_one") is None
    assert mean_over_sites([0.1] * rows) is None


@pytest.mark.parametrize(
    ("rows", "discordant", "gain"), [(15, 0.15, 0.10), (30, 0.05, 0.03), (30, 0.3, 0.0), (100, 0.1, 0.05)]
)
def test_bounds_of_zero_one_losses_miss_as_seldom_as_they_say(rows, discordant, gain):
    draws, generator = 3000, np.random.default_rng(rows)
    up = (discordant + gain) / 2
    d = generator.choice([1.0, -1.0, 0.0], p=[up, discordant - up, 1 - discordant], size=(draws, rows))
    bounds = [gain_bound(one, "zero_one") for one in d]
    chance = 3 * (0.05 * 0.95 / draws) ** 0.5
    assert np.mean([not one.low <= gain <= one.high for one in bounds]) <= 0.05 + chance
    assert np.mean([one.at_least > gain for one in bounds]) <= 0.05 + chance


def test_the_mean_over_sites_is_not_taken_over_by_sites_where_models_agree():
    gains = [0.0] * 30 + [0.1, 0.2, 0.15]
    assert mean_over_sites(gains).value == pytest.approx(0.45 / 33)


def test_own_rows_alone_are_split_conformal_and_borrowed_ones_make_small_sites_finite():
    scores = np.arange(1.0, 20.0)  # 19 rows: ceil(20 · 0.9) = the 18th
    assert set_threshold(scores, [], 0.9, borrowed=0) == 18.0
    assert set_threshold(scores[:8], [], 0.9, borrowed=0) == np.inf
    assert np.isfinite(set_threshold(scores[:8], [np.arange(1.0, 50.0)], 0.9))


@pytest.mark.parametrize("ties", [False, True])
def test_a_row_that_is_left_out_is_judged_by_the_threshold_of_the_others(ties):
    generator = np.random.default_rng(6)
    own, other = (generator.exponential(size=n) for n in (30, 40))
    if ties:
        own, other = own.round(0), other.round(0)
    by_hand = [one <= set_threshold(np.delete(own, i), [other], 0.8) for i, one in enumerate(own)]
    assert covered_share(own, [other], 0.8) == pytest.approx(np.mean(by_hand))


def test_sets_cover_fresh_rows_and_rows_that_are_left_out():
    generator = np.random.default_rng(3)
    covered, left_out = [], []
    for _ in range(300):
        own, fresh = generator.exponential(size=(2, 25))
        others = [generator.exponential(size=40) for _ in range(5)]
        covered.append((fresh <= set_threshold(own, others, 0.9)).mean())
        left_out.append(covered_share(own, others, 0.9))
    assert np.mean(covered) == pytest.approx(0.9, abs=0.03)
    assert np.mean(left_out) == pytest.approx(np.mean(covered), abs=0.02)


def test_new_sites_are_covered_on_average_and_not_at_all_below_nine_sites():
    generator = np.random.default_rng(4)
    covered = []
    for _ in range(300):
        scale = generator.lognormal(0, 0.5, 31)
        sites = [s * generator.exponential(size=20) for s in scale]
        covered.append((sites[-1] <= new_site_threshold(sites[:-1], 0.9)).mean())
    assert np.mean(covered) >= 0.88
    assert new_site_threshold([np.ones(100)] * 8, 0.9) == np.inf


def test_the_watch_seldom_cries_wolf_and_finds_harm():
    generator = np.random.default_rng(5)
    level = [e_process(generator.choice([1.0, -1.0, 0.0], p=[0.1, 0.1, 0.8], size=1000)).max() for _ in range(300)]
    assert np.mean(np.array(level) > 20) <= 0.05
    harmed = [e_process(generator.choice([1.0, -1.0, 0.0], p=[0.2, 0.05, 0.75], size=1000)).max() for _ in range(50)]
    assert np.mean(np.array(harmed) > 20) > 0.95
