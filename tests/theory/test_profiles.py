"""Intervals by the profile likelihood against R's lme4 1.1 on exam65:

    m <- lmer(normexam ~ standLRT + schavg + sex + schgend + (1 | client), exam65);  confint(m, method = "profile")
    m <- lmer(normexam ~ standLRT + schavg + sex + schgend + (standLRT || client), exam65)

R interpolates between points of the profile by splines, which is good to about six digits.
"""

import numpy as np
import pytest
from test_mixed import EXAM, moments, read

from kinfed.theory.sums import Profile

COEFFICIENTS = [
    (0.0131562468, 0.3910246266), (0.5312726768, 0.5803639723), (0.1398357898, 0.5548206006),
    (-0.2323441181, -0.0987936297), (-0.2697127413, 0.1826034448), (-0.3975217345, 0.0076901334),
]  # fmt: skip


def test_intervals_of_an_intercept_are_those_of_confint():
    sums, _ = read(*EXAM)
    profile = Profile.of(sums, (0,))
    assert profile.deviation(0) == pytest.approx((0.2104372420, 0.3186668789), rel=2e-6)
    assert profile.noise() == pytest.approx((0.7338049537, 0.7667199013), rel=1e-6)
    for j, ends in enumerate(COEFFICIENTS):
        assert profile.coefficient(np.eye(6)[j]) == pytest.approx(ends, abs=2e-6)


def test_intervals_beside_a_slope_are_those_of_confint():
    sums, _ = read(*EXAM)
    profile = Profile.of(sums, (0, 1))
    assert profile.deviation(0) == pytest.approx((0.2058709999, 0.313618023), rel=3e-6)
    assert profile.deviation(1) == pytest.approx((0.0871026966, 0.163041328), rel=2e-5)
    assert profile.noise() == pytest.approx((0.7255817066, 0.758394814), rel=1e-6)
    assert profile.coefficient(np.eye(6)[1]) == pytest.approx((0.5077903691, 0.588348247), rel=2e-6)


def test_a_deviation_that_may_be_zero_has_an_interval_from_zero():
    draw = np.random.default_rng(0)
    site = np.repeat(np.arange(12), 20)
    x = draw.normal(size=(240, 1))
    profile = Profile.of(moments(x, x[:, 0] + draw.normal(size=240), site), (0,))
    low, high = profile.deviation(0)
    assert low == 0
    assert 0.05 < high < 0.6


def test_without_random_variation_the_interval_of_a_coefficient_is_that_of_least_squares():
    """dev(b) - dev = N log(rss(b) / rss), in closed form."""
    draw = np.random.default_rng(1)
    site, x = np.repeat(np.arange(6), 40), draw.normal(size=240)
    y = 2 * x + draw.normal(size=240)
    y -= np.array([y[site == k].mean() for k in range(6)])[site]  # sites do not differ at all
    x = x - np.array([x[site == k].mean() for k in range(6)])[site]
    profile = Profile.of(moments(x[:, None], y, site), (0,))
    slope = x @ y / (x @ x)
    rss = ((y - slope * x) ** 2).sum()
    reach = np.sqrt(rss * np.expm1(profile.reach / 240) / (x @ x))
    assert profile.coefficient(np.array([0.0, 1.0])) == pytest.approx((slope - reach, slope + reach), rel=1e-6)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Deviations between 15 sites, 30 draws: 95 % of intervals hold 0.5, give or take three standard errors."""
    held, site = 0, np.repeat(np.arange(15), 12)
    for seed in range(30):
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(180, 1))
        y = x[:, 0] + 0.5 * draw.normal(size=15)[site] + draw.normal(size=180)
        low, high = Profile.of(moments(x, y, site), (0,)).deviation(0)
        held += low <= 0.5 <= high
    assert held >= 30 * (0.95 - 3 * (0.95 * 0.05 / 30) ** 0.5)
