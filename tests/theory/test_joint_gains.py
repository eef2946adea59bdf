"""Gains of several models estimated together: limits, hand calculations, and what simulation says of them."""

import numpy as np
import pytest

from kinfed.theory.joint_gains import Drift, drift_of, joint_gains, row_variances, with_test_rows

NAN = np.nan


def alone_with(seen, errors):
    """One model: gains [K] and standard errors [K]."""
    one = joint_gains(np.array(seen)[:, None], np.square(errors)[:, None, None])
    return one.expected[:, 0], one


def test_sites_that_differ_by_chance_alone_share_one_estimate():
    expected, one = alone_with([0.01, 0.02, 0.03], [0.1, 0.1, 0.2])
    mean = (0.01 / 0.01 + 0.02 / 0.01 + 0.03 / 0.04) / (1 / 0.01 + 1 / 0.01 + 1 / 0.04)
    assert one.spread.tolist() == [0.0]
    assert expected.tolist() == pytest.approx([mean] * 3)
    assert one.covariance[:, 0, 0].tolist() == pytest.approx([1 / (1 / 0.01 + 1 / 0.01 + 1 / 0.04)] * 3)


def test_two_sites_by_hand():
    # Q(τ²) = (a − b)² / (2 (τ² + s²)) for equal errors, and M − 1 = 1: τ² = (a − b)² / 2 − s².
    a, b, s = 0.3, -0.1, 0.1
    expected, one = alone_with([a, b], [s, s])
    tau2 = (a - b) ** 2 / 2 - s**2
    assert one.spread[0] == pytest.approx(tau2**0.5)
    B = s**2 / (s**2 + tau2)
    assert expected.tolist() == pytest.approx([B * 0.1 + (1 - B) * a, B * 0.1 + (1 - B) * b])


def test_precise_sites_keep_their_own_and_vague_ones_take_the_others():
    expected, one = alone_with([0.5, -0.5, 0.9], [1e-6, 1e-6, 1e6])
    assert expected[:2].tolist() == pytest.approx([0.5, -0.5], abs=1e-6)
    assert expected[2] == pytest.approx(one.mean[0], abs=1e-6)


def test_a_site_where_nothing_is_known_takes_the_mean_and_is_less_sure():
    expected, one = alone_with([0.1, NAN, 0.2], [0.1, NAN, 0.1])
    assert expected[1] == pytest.approx(one.mean[0])
    assert one.covariance[1, 0, 0] >= one.covariance[0, 0, 0]
    assert alone_with([NAN, NAN], [NAN, NAN])[0].tolist() == [0.0, 0.0]
    assert joint_gains(np.zeros((3, 0)), np.zeros((3, 0, 0))).expected.shape == (3, 0)
    assert alone_with([0.2], [0.1])[0].tolist() == pytest.approx([0.2])  # one site has nobody to be pooled with


def planted(seed, sites, spread, mean):
    """True gains [K, M] and what sites of 20 to 2,000 rows saw of them, all against one model that errs itself."""
    draw, models = np.random.default_rng(seed), len(spread)
    rows = np.exp(draw.uniform(np.log(20), np.log(2000), sites))
    alike = 0.5 + 0.5 * np.eye(models)
    truth = mean + draw.multivariate_normal(np.zeros(models), np.outer(spread, spread) * alike, sites)
    covariance = 0.09 * (0.6 + 0.4 * np.eye(models)) / rows[:, None, None]
    noise = np.stack([draw.multivariate_normal(np.zeros(models), one) for one in covariance])
    return truth, truth + noise, covariance


def chosen(truth, expected):
    """Expected and true gain of what every site takes; 0 where it stays alone."""
    place, rows = expected.argmax(1), np.arange(len(truth))
    moves = expected[rows, place] > 0
    return np.where(moves, expected[rows, place], 0), np.where(moves, truth[rows, place], 0)


def one_by_one(seen, covariance):
    parts = [joint_gains(seen[:, [m]], covariance[:, [m]][:, :, [m]]).expected for m in range(seen.shape[1])]
    return np.concatenate(parts, 1)


@pytest.mark.parametrize(("spread", "mean"), [([0.0] * 5, 0.0), ([0.3, *[0.03] * 4], -0.01)])
def test_together_errs_less_than_model_by_model_and_promises_less_too_much(spread, mean):
    errors, excess = np.zeros(2), np.zeros(2)
    for seed in range(4):
        truth, seen, covariance = planted(seed, 20, np.array(spread), mean)
        for place, expected in enumerate((joint_gains(seen, covariance).expected, one_by_one(seen, covariance))):
            promised, kept = chosen(truth, expected)
            errors[place] += np.square(expected - truth).sum()
            excess[place] += (promised - kept).mean()
    assert errors[0] < errors[1]
    assert abs(excess[0]) < abs(excess[1])


def test_the_posterior_is_as_sure_as_it_should_be():
    misses = []
    for seed in range(6):
        truth, seen, covariance = planted(100 + seed, 40, np.full(5, 0.03), 0.01)
        one = joint_gains(seen, covariance)
        deviation = np.sqrt(np.diagonal(one.covariance, axis1=1, axis2=2))
        misses.append((np.abs(truth - one.expected) > 1.96 * deviation).mean())
    assert np.mean(misses) == pytest.approx(0.05, abs=0.03)


def test_drift_lowers_and_never_raises_and_test_rows_count_by_their_precision():
    test, noise = np.array([0.0, 0.1, NAN]), np.array([0.01, 0.01, NAN])
    expected, variance = np.array([0.1, 0.2, 0.3]), np.full(3, 0.01)
    drift = drift_of(test, noise, expected, variance)
    assert (drift.value, drift.variance) == pytest.approx((-0.1, 0.01))
    mean, spread = with_test_rows(test, noise, expected, variance, drift)
    # Prior mean α̂ + b with variance 0.02, test rows with 0.01: a third of the one and two thirds of the other.
    assert mean.tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert spread.tolist() == pytest.approx([0.02 / 3, 0.02 / 3, 0.02])
    assert drift_of(test + 1, noise, expected, variance).value == 0
    assert drift_of(np.full(2, NAN), np.full(2, NAN), expected[:2], variance[:2]) == Drift(0.0, 0.0)


def test_what_all_sites_lack_in_test_rows_is_taken_back():
    """Validation promises 0.02 too much everywhere; expectations after the drift do not."""
    left = []
    for seed in range(8):
        draw = np.random.default_rng(seed)
        truth, seen, covariance = planted(seed, 40, np.full(3, 0.02), 0.02)
        one = joint_gains(seen + 0.02, covariance)
        own, noise = truth[:, 0], np.full(40, 0.05**2)
        test = own + 0.05 * draw.normal(size=40)
        variance = one.covariance[:, 0, 0]
        drift = drift_of(test, noise, one.expected[:, 0], variance)
        mean, _ = with_test_rows(test, noise, one.expected[:, 0], variance, drift)
        left.append([(one.expected[:, 0] - own).mean(), (mean - own).mean()])
    before, after = np.mean(left, 0)
    assert before == pytest.approx(0.02, abs=0.005)
    assert abs(after) < 0.008


def test_models_that_agree_in_every_row_share_one_estimate():
    """Their sampling errors are singular; what is known of the one is known of the other."""
    seen = np.array([[0.2, 0.2], [0.1, 0.1], [0.3, 0.3]])
    errors = np.full((3, 2, 2), 0.01)
    both = joint_gains(seen, errors).expected
    assert both[:, 0] == pytest.approx(both[:, 1], abs=1e-6)
    assert np.isfinite(both).all()
    nothing = joint_gains(np.zeros((3, 2)), np.zeros((3, 2, 2)))
    assert not nothing.expected.any()


def test_test_rows_of_all_sites_have_one_variance():
    """Four rows on which two models happened to agree do not take all of the weight."""
    variance, rows = np.array([1e-12, 0.05, 0.02, NAN]), np.array([4.0, 4.0, 10.0, 0.0])
    error = row_variances(variance, rows)
    of_row = (16 * 1e-12 + 16 * 0.05 + 100 * 0.02) / 18
    assert error[:3].tolist() == pytest.approx([of_row / 4, of_row / 4, of_row / 10])
    assert np.isnan(error[3])
    test, expected, spread = np.array([0.0, 0.4, 0.2, NAN]), np.full(4, 0.2), np.full(4, 0.01)
    tied = drift_of(test, variance, expected, spread).value
    assert tied < -0.04
    assert drift_of(test, error, expected, spread).value == pytest.approx(0)
    assert np.isnan(row_variances(np.full(2, NAN), np.zeros(2))).all()
