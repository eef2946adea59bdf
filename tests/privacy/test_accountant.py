"""Epsilon against published and independently computed values, and what follows from it: noise for an epsilon, rounds
for a budget."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from kinfed.privacy.ledger import Event, Events, Ledger, dominates, maximal, merge

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

from kinfed.privacy.accountant import epsilon, largest, most_rounds, noise_for, renyi_epsilon

DELTA = 1e-5


def asked(q: float, batches: int, gradients: int = 1) -> Events:
    return (Event(q, gradients, batches),)


# ---- known values ----


def test_the_value_on_which_accountants_agree() -> None:
    """Noise 1, q 0.01, 1000 steps: PLD and PRV 1.8282, RDP of two libraries 2.1014 (a Gaussian limit says 1.6177)."""
    assert epsilon(asked(0.01, 1000), 1.0, DELTA) == pytest.approx(1.8282, abs=2e-4)
    assert renyi_epsilon(asked(0.01, 1000), 1.0, DELTA) == pytest.approx(2.1014, abs=2e-4)


@pytest.mark.parametrize(("noise", "printed", "tight"), [(1.0, 10.636, 9.761), (2.0, 3.820, 3.346)])
def test_a_hundred_epochs_of_2667_examples(noise: float, printed: float, tight: float) -> None:
    """FedFomo's private runs, all rounds counted: 53 batches of 50 per epoch."""
    events = asked(0.01875, 5300)
    assert renyi_epsilon(events, noise, DELTA, "2017") == pytest.approx(printed, abs=2e-3)
    assert renyi_epsilon(events, noise, DELTA) == pytest.approx(tight, abs=1e-3)
    assert epsilon(events, noise, DELTA) < tight


def of_one_gaussian(mu: float) -> float:
    """ε(δ) of N(0, 1) against N(mu, 1): Balle and Wang 2018, Theorem 8."""

    def excess(e: float) -> float:
        with np.errstate(over="ignore"):
            second = math.exp(min(e + float(stats.norm.logcdf(-mu / 2 - e / mu)), 700.0))
        return float(stats.norm.cdf(mu / 2 - e / mu)) - second - DELTA

    return float(optimize.brentq(excess, 0, 1000, xtol=1e-12))


@pytest.mark.parametrize(("noise", "batches", "gradients"), [(1.0, 1, 1), (3.0, 50, 1), (2.0, 4, 5), (10.0, 1, 30)])
def test_without_sampling_it_is_one_gaussian(noise: float, batches: int, gradients: int) -> None:
    exact = of_one_gaussian(math.sqrt(batches * gradients) / noise)
    found = epsilon(asked(1.0, batches, gradients), noise, DELTA)
    assert exact <= found <= exact * 1.001


@pytest.mark.parametrize(("q", "noise", "gradients"), [(0.1, 1.0, 1), (0.5, 2.0, 1), (0.02, 0.6, 1), (0.2, 3.0, 4)])
def test_one_sample_by_integration(q: float, noise: float, gradients: int) -> None:
    """δ(ε) = max over both orders of ∫ max(p − e^ε p', 0), for the mixture that sampling makes."""
    s = noise / math.sqrt(gradients)
    x = np.linspace(-12 * s, 1 + 12 * s, 50_001)
    r = stats.norm.pdf(x, 0, s)
    p = (1 - q) * r + q * stats.norm.pdf(x, 1, s)

    def delta(e: float) -> float:
        both = (np.maximum(a - math.exp(e) * b, 0) for a, b in ((p, r), (r, p)))
        return max(float(integrate.simpson(values, x=x)) for values in both)

    exact = float(optimize.brentq(lambda e: delta(e) - DELTA, 0, 60))
    assert epsilon(asked(q, 1, gradients), noise, DELTA) == pytest.approx(exact, rel=2e-3)
    assert epsilon(asked(q, 1, gradients), noise, DELTA) >= exact * (1 - 1e-6)


def test_gradients_on_one_sample_cost_more_than_on_samples_of_their_own() -> None:
    """Five on each of 100 samples: less noise for whoever is in it, and sampling hides that only once."""
    shared, own = epsilon(asked(0.05, 100, 5), 2.0, DELTA), epsilon(asked(0.05, 500), 2.0, DELTA)
    assert shared > 1.2 * own
    assert shared == epsilon(asked(0.05, 100), 2.0 / math.sqrt(5), DELTA)


def test_tiny_and_huge_privacy_losses() -> None:
    assert epsilon((), 1.0, DELTA) == renyi_epsilon((), 1.0, DELTA) == 0.0
    assert epsilon(asked(0.1, 1), 0.0, DELTA) == renyi_epsilon(asked(0.1, 1), 0.0, DELTA) == math.inf
    assert epsilon(asked(1e-4, 100_000), 5.0, DELTA) == pytest.approx(0.0166, rel=0.01)
    assert epsilon(asked(1.0, 600), 0.1, DELTA) == pytest.approx(of_one_gaussian_large(math.sqrt(600) / 0.1), rel=0.03)


def of_one_gaussian_large(mu: float) -> float:
    """μ²/2 + μ Φ⁻¹(1 − δ), to which the exact value comes close from below for large μ."""
    return mu * mu / 2 + mu * float(stats.norm.isf(DELTA))


@pytest.mark.parametrize(("q", "batches", "noise"), [(0.02, 150, 1.0), (0.3, 3, 2.5)])
def test_more_steps_less_noise_and_more_sampling_cost_more(q: float, batches: int, noise: float) -> None:
    here = epsilon(asked(q, batches), noise, DELTA)
    grain = 1 + 1e-3  # of the grid
    assert here <= renyi_epsilon(asked(q, batches), noise, DELTA) * grain
    assert here <= epsilon(asked(q, 2 * batches), noise, DELTA) * grain
    assert here <= epsilon(asked(q, batches), noise / 1.2, DELTA) * grain
    assert here <= epsilon(asked(min(1.2 * q, 1.0), batches), noise, DELTA) * grain
    assert here <= epsilon(asked(q, batches), noise, DELTA / 10) * grain
    assert here <= epsilon(asked(q, batches, 2), noise, DELTA) * grain


# ---- what follows ----


def test_noise_is_found_for_an_epsilon() -> None:
    clients = [asked(0.05, 200), asked(0.2, 20), (), asked(0.1, 40, 2)]
    noise = noise_for(3.0, clients, DELTA)
    assert largest(clients, noise, DELTA) <= 3.0
    assert largest(clients, noise * 0.998, DELTA) > 3.0
    assert noise_for(60.0, clients[:1], DELTA) < 0.6 < 5 < noise_for(0.5, clients[:1], DELTA)
    assert noise_for(3.0, [()], DELTA) == 1.0  # whoever is asked nothing is safe with any


def test_rounds_that_a_budget_allows() -> None:
    each = asked(0.1, 10)
    allowed = most_rounds((), each, 1.5, DELTA, 4.0, 100)
    assert 1 < allowed < 100
    assert epsilon(asked(0.1, 10 * allowed), 1.5, DELTA) <= 4.0 < epsilon(asked(0.1, 10 * allowed + 10), 1.5, DELTA)
    assert most_rounds(asked(0.1, 10 * allowed), each, 1.5, DELTA, 4.0, 100) == 0
    assert most_rounds(asked(0.1, 10 * allowed - 10), each, 1.5, DELTA, 4.0, 100) == 1
    assert most_rounds((), each, 1.5, DELTA, 4.0, 3) == 3
    assert most_rounds((), each, 1.5, DELTA, 0.01, 1) == 0


# ---- books ----


def test_books_keep_clients_rates_and_samples_apart() -> None:
    ledger = Ledger()
    ledger.add(3, 0.5, 1)
    ledger.add(3, 0.5, 1, 4)
    ledger.add(3, 0.5, 2)
    ledger.add(0, 1.0, 1, 7)
    ledger.add(1, 1.0, 0)
    twice = ledger.join(ledger)
    assert ledger.events(4) == [asked(1.0, 7), (), (), (Event(0.5, 1, 5), Event(0.5, 2, 1))]
    assert twice.events(4)[3] == (Event(0.5, 1, 10), Event(0.5, 2, 2))
    assert Ledger.load(twice.named()) == twice
    assert Ledger.load(Ledger().named()) == Ledger()


def test_what_covers_what() -> None:
    assert dominates(asked(0.2, 10, 2), asked(0.1, 10, 1))
    assert dominates((Event(0.1, 1, 5), Event(0.1, 2, 5)), asked(0.1, 10, 1))
    assert not dominates((Event(0.1, 1, 5), Event(0.1, 2, 5)), asked(0.1, 6, 2))
    assert not dominates(asked(0.1, 10, 2), asked(0.1, 11, 1))
    assert not dominates(asked(0.1, 10), asked(0.2, 1))
    assert dominates(asked(0.1, 1), ())
    assert dominates((), ())
    assert not dominates((), asked(0.1, 1))
    # Both of the second need the one strong sample of the first.
    assert not dominates((Event(0.2, 2, 1), Event(0.05, 5, 1)), (Event(0.1, 2, 1), Event(0.2, 1, 1)))


events_of_a_client = st.builds(
    lambda q, parts: tuple(sorted(Event(q, k, n) for k, n in parts.items())),
    st.sampled_from([0.1, 0.25, 1.0]),
    st.dictionaries(st.integers(1, 3), st.integers(1, 4), max_size=3),
)


@given(st.lists(events_of_a_client, max_size=8))
def test_the_largest_is_on_the_skyline(clients: list[Events]) -> None:
    """For any measure that grows with q, gradients and samples; here one that is quick."""

    def measure(events: Events) -> float:
        return sum(e.q**1.5 * math.expm1(e.gradients / 2) * e.batches for e in events)

    line = maximal(clients)
    assert set(line) <= set(clients)
    assert max(map(measure, line), default=0.0) == max(map(measure, clients), default=0.0)
    assert all(any(dominates(kept, events) for kept in line) for events in clients if events)


@given(events_of_a_client, events_of_a_client, st.integers(0, 3))
def test_putting_together_counts_everything(one: Events, other: Events, times: int) -> None:
    def samples(events: Events, q: float, gradients: int) -> int:
        return sum(e.batches for e in events if (e.q, e.gradients) == (q, gradients))

    both = merge(one, other, times)
    for q in (0.1, 0.25, 1.0):
        for k in (1, 2, 3):
            assert samples(both, q, k) == samples(one, q, k) + times * samples(other, q, k)
    assert list(both) == sorted(both)
    assert all(e.batches for e in both)
