"""Averages over seeds, differences between methods, gains of clients.

The rule for calling a method best is here and nowhere else. Method A leads method B *clearly* if Student's 95 %
interval of the mean difference A - B lies above zero:

* with at least two shared seeds the difference is taken seed by seed (same data, same sampling, same batches), and
  its spread is the standard deviation of these differences;
* with no two seeds shared but at least two seeds each, the spread is sqrt(sd_A² + sd_B²), and the interval is Welch's;
* with fewer seeds there is no spread and nothing is clear.

Folds of a cross-validation are no seeds: they are joined to one value per seed before they come here
(kinfed.runs.cross_validation).

A method is marked best if it leads every other method clearly. Seeds change the sampling and the start, seldom the
data: what is clear here may be otherwise on other clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np
from numpy.typing import NDArray

from kinfed.analysis.comparison import Comparison, Method
from kinfed.records import finite


@dataclass(frozen=True)
class Average:
    mean: float
    sd: float | None  # sample standard deviation; None with fewer than two values
    n: int


def average(values: Mapping[int, float]) -> Average | None:
    """None without values; a single value that is not finite makes the mean so, which is to be shown, not hidden."""
    if not values:
        return None
    entries = list(values.values())
    if not all(map(finite, entries)):
        return Average(math.nan, None, len(entries))
    return Average(fmean(entries), stdev(entries) if len(entries) > 1 else None, len(entries))


@dataclass(frozen=True)
class Interval:
    """Mean of differences that belong together seed by seed, and where the true mean may lie."""

    mean: float
    low: float
    high: float
    n: int


def student_quantile(degrees: float | NDArray[np.int64], confidence: float) -> NDArray[np.float64]:
    """The reach of Student's interval to either side, in standard errors."""
    from scipy.special import stdtrit  # a quarter of a second to import, and a page of one seed has no interval

    return np.asarray(stdtrit(degrees, 0.5 + confidence / 2))


def interval(differences: Mapping[int, float], confidence: float = 0.95) -> Interval | None:
    """Student's interval; None for fewer than two seeds or values that are not finite."""
    paired = average(differences)
    if paired is None or paired.sd is None:
        return None
    reach = float(student_quantile(paired.n - 1, confidence)) * paired.sd / math.sqrt(paired.n)
    return Interval(paired.mean, paired.mean - reach, paired.mean + reach, paired.n)


MOST_SEEDS = 100  # beyond this, "how many seeds would decide" has no practical answer


def seeds_to_decide(margin: Interval, confidence: float = 0.95) -> int | None:
    """The number of seeds that would move Student's interval off zero, if mean and standard deviation stayed as they
    are; None if more than MOST_SEEDS would be needed, or none are enough because the mean is zero."""
    if margin.mean == 0.0:
        return None
    t = float(student_quantile(margin.n - 1, confidence))
    deviation = (margin.high - margin.mean) * math.sqrt(margin.n) / t
    counts = np.arange(2, MOST_SEEDS + 1)
    reach = student_quantile(counts - 1, confidence) * deviation / np.sqrt(counts)
    enough = counts[reach < abs(margin.mean)]
    return int(enough[0]) if len(enough) else None


@dataclass(frozen=True)
class Difference:
    mean: float  # positive: the first is better
    spread: float
    n: int  # seeds behind it
    ahead: int | None  # in how many of the shared seeds the first is better; None if unpaired
    likely: Interval  # where the true mean lies

    @property
    def clear(self) -> bool:
        return self.likely.low > 0


def difference(
    one: Mapping[int, float], other: Mapping[int, float], lower_is_better: bool = False
) -> Difference | None:
    """The lead of `one` over `other`, both by seed; None without a spread to judge it by."""
    sign = -1.0 if lower_is_better else 1.0
    shared = sorted(one.keys() & other.keys())
    if len(shared) >= 2:
        differences = {seed: sign * (one[seed] - other[seed]) for seed in shared}
        paired, likely = average(differences), interval(differences)
        if paired is None or paired.sd is None or likely is None:
            return None
        return Difference(paired.mean, paired.sd, paired.n, sum(value > 0 for value in differences.values()), likely)
    a, b = average(one), average(other)
    if a is None or b is None or a.sd is None or b.sd is None:
        return None
    mean = sign * (a.mean - b.mean)
    return Difference(mean, math.hypot(a.sd, b.sd), min(a.n, b.n), None, _welch(mean, a, b))


def _welch(mean: float, a: Average, b: Average, confidence: float = 0.95) -> Interval:
    """Welch's interval of a difference of means over seeds that do not belong together."""
    assert a.sd is not None
    assert b.sd is not None
    own, other = a.sd**2 / a.n, b.sd**2 / b.n
    if own + other == 0:
        return Interval(mean, mean, mean, min(a.n, b.n))
    degrees = (own + other) ** 2 / (own**2 / (a.n - 1) + other**2 / (b.n - 1))
    reach = float(student_quantile(degrees, confidence)) * math.sqrt(own + other)
    return Interval(mean, mean - reach, mean + reach, min(a.n, b.n))


def leader(values: Mapping[int, Mapping[int, float]], lower_is_better: bool = False) -> int | None:
    """The key with the best mean over seeds, clear or not; entries that are not finite cannot lead."""
    means = {key: entry.mean for key, by_seed in values.items() if (entry := average(by_seed)) and finite(entry.mean)}
    return (min if lower_is_better else max)(means, key=lambda key: means[key], default=None)


def clear_winner(values: Mapping[int, Mapping[int, float]], lower_is_better: bool = False) -> int | None:
    """The key that leads every other clearly, if there is one; a diverged rival needs no spread to be beaten."""
    first = leader(values, lower_is_better)
    rivals = [key for key in values if key != first and values[key]]
    if first is None or not rivals or len(values[first]) < 2:
        return None
    for key in rivals:
        if all(map(finite, values[key].values())):
            lead = difference(values[first], values[key], lower_is_better)
            if lead is None or not lead.clear:
                return None
    return first


@dataclass(frozen=True)
class Gain:
    """One client with one seed: how much better its personal model is than what training alone gave it."""

    client: str
    seed: int
    n_train: int
    n_test: int
    gain: float  # in the metric's unit; positive is better, whichever way the metric points
    alone: float = 0.0
    own: float = 0.0
    error: float | None = None  # standard error of the gain by the examples of the test, where it is known

    @property
    def likely(self) -> Interval | None:
        """Student's 95 % interval for as many examples as the client is tested on; None if the error is unknown."""
        if self.error is None or not finite(self.error) or self.n_test < 2:
            return None
        reach = float(student_quantile(self.n_test - 1, 0.95)) * self.error
        return Interval(self.gain, self.gain - reach, self.gain + reach, self.n_test)


def client_gains(values: list[Gain]) -> list[Gain]:
    """One entry per client, its mean over seeds, largest gain first. Seeds share much of a client's data, so that the
    error of the mean is taken to be that of one seed."""
    by_client: dict[str, list[Gain]] = {}
    for value in values:
        by_client.setdefault(value.client, []).append(value)
    means = []
    for client, own in by_client.items():
        errors = [g.error for g in own if g.error is not None]
        error = math.sqrt(fmean(e * e for e in errors)) if len(errors) == len(own) else None
        sizes = round(fmean(g.n_train for g in own)), round(fmean(g.n_test for g in own))
        gain, alone, with_others = (fmean(getattr(g, name) for g in own) for name in ("gain", "alone", "own"))
        means.append(Gain(client, own[0].seed, *sizes, gain, alone, with_others, error))
    return sorted(means, key=lambda g: (-g.gain, g.client))


def gains(comparison: Comparison, method: Method) -> list[Gain]:
    """Clients that took part in the method's complete trials and in Local's, largest gain first. Errors are those of
    the difference over the same test examples, where both models were judged in one run; otherwise, and where a
    deployment's clients keep to themselves which examples they got right, as if these were others: too wide."""
    entries, name = [], f"personal_{comparison.metric}"
    for trial in method.complete_trials:
        local = comparison.local_trial(method, trial.seed)
        baseline = {c.client: c.values for c in local.participants} if local else {}
        in_own_run = any(local is one for one in method.run.trials)
        for client in trial.participants:
            other = baseline.get(client.client, {})
            own, alone = client.values.get(name), other.get(name)
            if own is not None and alone is not None and finite(own) and finite(alone):
                error = client.values.get("personal_error_of_gain") if in_own_run else None
                error = _as_if_apart(client.values, other) if error is None else error
                gain = comparison.style.gain(own, alone)
                if error == 0 and gain:
                    error = None  # all rows judged alike by either model: drawing them anew says nothing of chance
                sizes = client.n_train, client.n_test
                entries.append(Gain(client.client, trial.seed, *sizes, gain, alone, own, error))
    return sorted(entries, key=lambda g: (-g.gain, g.seed, g.client))


def _as_if_apart(own: Mapping[str, float], alone: Mapping[str, float]) -> float | None:
    """The standard error of a difference, were the two judged on examples of their own."""
    errors = [values["personal_error"] for values in (own, alone) if "personal_error" in values]
    return math.hypot(*errors) if len(errors) == 2 else None


@dataclass(frozen=True)
class GainSummary:
    helped: int
    unchanged: int
    hurt: int
    mean: float
    median: float
    lowest: float

    @property
    def n(self) -> int:
        return self.helped + self.unchanged + self.hurt


# Accuracies are ratios of small integers; two that are equal may differ in the last digit once written to a file.
_EQUAL = 1e-6


def summarize_gains(values: list[Gain]) -> GainSummary:
    gains = [entry.gain for entry in values]
    helped, hurt = sum(gain > _EQUAL for gain in gains), sum(gain < -_EQUAL for gain in gains)
    unchanged = sum(abs(gain) <= _EQUAL for gain in gains)
    return GainSummary(helped, unchanged, hurt, fmean(gains), median(gains), min(gains))


def adjusted_rand(one: Sequence[int], other: Sequence[int]) -> float:
    """The adjusted Rand index of two groupings of the same things (Hubert and Arabie 1985): 1 where they are the same,
    about 0 where they have nothing to do with each other. By pairs: together in both, in one of them, in neither."""

    def pairs(groups: Iterable[Hashable]) -> int:
        return sum(size * (size - 1) // 2 for size in Counter(groups).values())

    both, in_one, in_other = pairs(zip(one, other, strict=True)), pairs(one), pairs(other)
    expected = in_one * in_other / max(math.comb(len(one), 2), 1)
    largest = (in_one + in_other) / 2
    return 1.0 if largest == expected else (both - expected) / (largest - expected)
