"""Epsilon of what was asked, and the noise for a wanted epsilon. Needs the extra `dp` (Google's dp-accounting).

The numbers come from privacy loss distributions (PLD), which are tight: every value is an upper bound, above the exact
one by less than 0.1 % (a few % where epsilon is in the thousands). Renyi accounting (RDP) stands beside it, because
most papers print it; its epsilon is larger by 5 to 20 %, and by as much again with the conversion of 2017 that older
libraries use. Accountants that approximate by a Gaussian limit are not offered: they report less than is spent.

Neighbouring data sets differ in one example that one of them lacks (add or remove one). Samples of a fixed size, such
as the clients of a round, are accounted with neighbours that differ in one member's data (replace one): the number of
members is public (`fixed_size_epsilon`).
"""

import logging
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import optimize, stats

from kinfed.errors import ConfigError
from kinfed.privacy.ledger import Event, Events, maximal, merge

try:
    import dp_accounting
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from dp_accounting.rdp import RdpAccountant
except ImportError as error:
    raise ConfigError(
        "differential privacy needs the package dp-accounting, which is not installed: pip install 'kinfed[dp]'"
    ) from error

# Points of the grid of privacy losses, over all losses that matter to epsilon and over those of one gradient. A
# coarser grid gives a larger epsilon, never a smaller one.
POINTS, POINTS_OF_ONE = 7e3, 2e5
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
GAUSSIAN_TAIL = 8.0  # deviations beyond which a Gaussian loss counts as infinite: a chance of 6e-16
NOISE_PRECISION = 1e-3  # relative, of the noise found for an epsilon

Measure = Callable[[Events, float, float], float]


def epsilon(events: Events, noise: float, delta: float) -> float:
    """ε(δ) of one client's events under noise of `noise` times the clipping norm; inf without noise.

    Rounded up to five digits."""
    return epsilon_over_noises(((noise, events),), delta)


@lru_cache(maxsize=4096)
def epsilon_over_noises(by_noise: tuple[tuple[float, Events], ...], delta: float) -> float:
    """ε(δ) of events under several noises, such as those of all runs that a client has been in, together."""
    by_noise = tuple((noise, events) for noise, events in by_noise if events)
    if not by_noise:
        return 0.0
    if any(noise == 0 for noise, _ in by_noise):
        return math.inf
    step = max(_grid(events, noise, delta) for noise, events in by_noise)
    total: Any = None
    for noise, events in by_noise:
        for event in events:
            part = _loss(event.q, noise / math.sqrt(event.gradients), step)
            part = part if event.batches == 1 else part.self_compose(event.batches)
            total = part if total is None else total.compose(part)
    return _rounded_up(float(total.get_epsilon_for_delta(delta)))


@lru_cache(maxsize=64)
def _loss(q: float, noise: float, step: float) -> Any:
    """Privacy loss of one gradient; cached, because the same client is asked about again and again."""
    return privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=q, value_discretization_interval=step)


def _grid(events: Events, noise: float, delta: float) -> float:
    """Distance of the grid's points: a power of two, so that few different ones occur."""
    mu2 = max(event.gradients for event in events) / noise**2
    one = mu2 / 2 + 7 * math.sqrt(mu2)
    return float(2.0 ** math.floor(math.log2(max(_guess(events, noise, delta) / POINTS, one / POINTS_OF_ONE))))


def _guess(events: Events, noise: float, delta: float) -> float:
    """Rough size of epsilon: from a Gaussian limit, or from no sampling at all, whichever gives less. Grids are
    chosen and searches begun by it; a bad guess costs time or tightness, never truth."""
    sampled = plain = 0.0
    for event in events:
        mu2 = event.gradients / noise**2
        plain += event.batches * mu2
        sampled += event.batches * event.q**2 * math.expm1(min(mu2, 700.0))
    mu = math.sqrt(min(plain, sampled))
    return mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))


@lru_cache(maxsize=1024)
def renyi_epsilon(events: Events, noise: float, delta: float, conversion: str = "tight") -> float:
    """ε(δ) by Renyi accounting at the usual orders. `conversion` is "tight" (Canonne, Kamath, Steinke 2020), or "2017"
    (Mironov) to compare with figures printed before."""
    if not events or not noise:
        return math.inf if events else 0.0
    with _quiet():
        accountant = RdpAccountant(ORDERS)
        for event in events:
            gaussian = dp_accounting.GaussianDpEvent(noise / math.sqrt(event.gradients))
            accountant.compose(dp_accounting.PoissonSampledDpEvent(event.q, gaussian), event.batches)
        if conversion == "tight":
            return _rounded_up(float(accountant.get_epsilon(delta)))
        rdp = np.asarray(accountant.rdp)
    return _rounded_up(float(np.min(rdp + math.log(1 / delta) / (np.asarray(ORDERS) - 1))))


def _rounded_up(value: float) -> float:
    """Round up to five digits: an accountant's last bits differ from call to call (vector instructions depend on where
    arrays lie in memory), and runs that are resumed or repeated are to write and decide the same."""
    if value == 0 or math.isinf(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 4)
    return float(f"{math.ceil(value / unit) * unit:.5g}")


def largest(all_events: Iterable[Events], noise: float, delta: float, measure: Measure = epsilon) -> float:
    """The largest epsilon of any client; only those that no other client surely exceeds are computed."""
    return max((measure(events, noise, delta) for events in maximal(all_events)), default=0.0)


def noise_for(target: float, all_events: Iterable[Events], delta: float) -> float:
    """The least noise (to 0.1 %, rounded up) with which no client's epsilon exceeds the target; 1 if none is asked."""
    noise = 0.0
    for events in sorted(maximal(all_events), key=lambda events: _guess(events, 1.0, delta), reverse=True):
        if not noise or epsilon(events, noise, delta) > target:
            noise = _noise_of_one(target, events, delta)
    return noise or 1.0


def _noise_of_one(target: float, events: Events, delta: float) -> float:
    return least_noise(target, lambda noise: epsilon(events, noise, delta), lambda noise: _guess(events, noise, delta))


def least_noise(target: float, measure: Callable[[float], float], guess: Callable[[float], float]) -> float:
    """The least noise (to 0.1 %, rounded up) whose epsilon, `measure(noise)`, does not exceed the target. `guess` is
    about the same and quickly computed: the search begins by it."""

    def excess(log_noise: float) -> float:
        return math.log(measure(math.exp(log_noise)) / target)

    low = high = float(optimize.brentq(lambda x: math.log(guess(math.exp(x)) / target), -30, 30))
    while excess(low) < 0:
        low -= 0.2
    while excess(high) > 0:
        high += 0.2
    log_noise = float(optimize.brentq(excess, low, high, xtol=NOISE_PRECISION / 4))
    while measure(noise := float(f"{math.exp(log_noise):.6g}")) > target:
        log_noise += NOISE_PRECISION / 4
    return noise


# ---- samples of a fixed size ----


@lru_cache(maxsize=1024)
def fixed_size_epsilon(q: float, rounds: int, noise: float, delta: float) -> float:
    """ε(δ) of `rounds` noisy sums over samples without replacement, each of the share q < 1 of all members. Neighbours
    differ in the data of one member. `noise` is in units of what one member adds to a sum at most; replacing it moves
    the sum by up to twice as much.

    One round (Balle, Barthe, Gaboardi 2018, Theorem 9), δ_G that of a Gaussian at distance μ = 2 / noise:

        δ(log(1 + q (e^ε − 1))) = q δ_G(ε)         for ε ≥ 0,        δ(−ε) = 1 − e^−ε + e^−ε δ(ε)

    The second line holds because neighbours may change places. Both together are the profile of one pair of
    distributions that dominates every round, so rounds are composed by composing its loss."""
    if not rounds or not noise:
        return math.inf if rounds else 0.0
    events = (Event(q, 1, rounds),)
    step = _grid(events, noise / 2, delta)
    return _rounded_up(float(_fixed_size_loss(q, noise, step).self_compose(rounds).get_epsilon_for_delta(delta)))


@lru_cache(maxsize=64)
def _fixed_size_loss(q: float, noise: float, step: float) -> Any:
    mu = 2 / noise
    largest_loss = math.log1p(q * math.expm1(min(mu * mu / 2 + GAUSSIAN_TAIL * mu, 700.0)))
    points = math.ceil(largest_loss / step)
    above = np.arange(points + 1) * step
    e = np.log1p(np.expm1(above) / q)
    delta = q * (stats.norm.cdf(mu / 2 - e / mu) - np.exp(e + stats.norm.logcdf(-mu / 2 - e / mu)))
    delta = np.clip(delta, 0.0, 1.0)
    below = -np.expm1(-above) + np.exp(-above) * delta
    profile = np.concatenate([below[:0:-1], delta])
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -points, points, profile)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def fixed_size_renyi_epsilon(q: float, rounds: int, noise: float, delta: float) -> float:
    """The same by Renyi accounting (Wang, Balle, Kasiviswanathan 2019, Theorem 27)."""
    if not rounds or not noise:
        return math.inf if rounds else 0.0
    with _quiet():
        accountant = RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
        # Only the ratio of the two sizes enters.
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(1.0, q, dp_accounting.GaussianDpEvent(noise / 2))
        accountant.compose(sampled, rounds)
        return _rounded_up(float(accountant.get_epsilon(delta)))


def fixed_size_noise(target: float, q: float, rounds: int, delta: float) -> float:
    """The least noise with which `fixed_size_epsilon` does not exceed the target."""
    events = (Event(q, 1, rounds),)
    return least_noise(
        target, lambda noise: fixed_size_epsilon(q, rounds, noise, delta),
        lambda noise: _guess(events, noise / 2, delta),
    )  # fmt: skip


def most_rounds(spent: Events, each: Events, noise: float, delta: float, budget: float, horizon: int) -> int:
    """How many more rounds of `each` the budget allows after `spent`, up to `horizon`."""

    def fits(rounds: int) -> bool:
        return epsilon(merge(spent, each, rounds), noise, delta) <= budget

    if fits(horizon):
        return horizon
    return bisect(range(1, horizon), False, key=lambda rounds: not fits(rounds))


@contextmanager
def _quiet() -> Iterator[None]:
    """dp-accounting warns of every order that it leaves out; the others give a valid, if larger, epsilon."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
