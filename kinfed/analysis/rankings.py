"""Ranks of methods over several federations, and what may be said of them.

    table = {"ditto": {"digits": {0: 0.91, 1: 0.90}, "wisdm": {0: 0.84, 1: 0.86}}, "local": ...}     higher is better
    mean_ranks(table)                                 {"ditto": 1.25, ...}: 1 is the best
    rank_intervals(table)                             95 % intervals by drawing federations, and seeds within them, anew
    critical_difference(len(table), 2)                mean ranks that are closer are not told apart (Nemenyi)
    alike(mean_ranks(table), critical)                the groups of a critical-difference picture

What has no finite value is last. Federations that share data are no independent draws: an interval says how stable a
rank is over federations like these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from kinfed.analysis.statistics import Interval

DRAWS = 2000
Table = NDArray[np.float64]
Scores = Mapping[str, Mapping[str, Mapping[int, float]]]  # by method, federation and seed; higher is better


def places(scores: Mapping[str, float], lower_is_better: bool = False) -> dict[str, float]:
    """Places, 1 the best; equal scores share the mean of theirs, and what is not finite is last."""
    sign = -1.0 if lower_is_better else 1.0
    signed = {name: sign * score if math.isfinite(score) else -math.inf for name, score in scores.items()}
    values = list(signed.values())
    better = {name: sum(other > own for other in values) for name, own in signed.items()}
    return {name: better[name] + (values.count(own) + 1) / 2 for name, own in signed.items()}


def mean_ranks(scores: Scores) -> dict[str, float]:
    """Every method's place by its mean over seeds, averaged over federations."""
    means = _means(scores)
    return {name: float(row.mean()) for name, row in zip(scores, _ranks(means.mean(2)), strict=True)}


def rank_intervals(scores: Scores, confidence: float = 0.95, draws: int = DRAWS) -> dict[str, Interval]:
    """Mean ranks with percentile intervals: federations are drawn with replacement, and within each its seeds, the same
    for all methods."""
    return _intervals(scores, lambda means: _ranks(means.mean(2)).mean(1), confidence, draws)


def mean_intervals(values: Scores, confidence: float = 0.95, draws: int = DRAWS) -> dict[str, Interval]:
    """Means over federations and seeds, such as regrets, with percentile intervals by the same draws."""
    return _intervals(values, lambda table: table.mean((1, 2)), confidence, draws)


def critical_difference(methods: int, federations: int, confidence: float = 0.95) -> float:
    """The difference of mean ranks from which two of several methods are told apart, for all pairs together (Nemenyi's
    test, as in Demšar 2006)."""
    from scipy.stats import studentized_range  # half a second to import

    quantile = float(studentized_range.ppf(confidence, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * federations))


def alike(ranks: Mapping[str, float], critical: float) -> list[list[str]]:
    """The largest groups of methods, best first, whose ranks all lie within the critical difference."""
    order = sorted(ranks, key=lambda name: ranks[name])
    groups: list[list[str]] = []
    for start, name in enumerate(order):
        group = [other for other in order[start:] if ranks[other] - ranks[name] < critical]
        if len(group) > 1 and (not groups or group[-1] != groups[-1][-1]):
            groups.append(group)
    return groups


def worst_share(scores: Iterable[float], share: float = 0.1) -> float:
    """The mean of the worst share of scores, at least one of them; higher is better."""
    ordered = sorted(scores)
    return fmean(ordered[: max(1, round(share * len(ordered)))])


def rank_correlation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Spearman's correlation of two rankings of the same methods; 0 if all tie in one of them, which says nothing of
    the other."""
    names = [name for name in one if name in other]
    first, second = (places({name: ranks[name] for name in names}) for ranks in (one, other))
    if 1 in (len(set(first.values())), len(set(second.values()))):
        return 0.0
    return float(np.corrcoef([first[name] for name in names], [second[name] for name in names])[0, 1])


def _means(scores: Scores) -> Table:
    """[methods, federations, seeds]; all methods have the federations and seeds of the first."""
    first = next(iter(scores.values()))
    rows = [[[one[block][seed] for seed in seeds] for block, seeds in first.items()] for one in scores.values()]
    table = np.array(rows, dtype=np.float64)
    return np.where(np.isfinite(table), table, -np.inf)


def _ranks(means: Table) -> Table:
    """[methods, federations] places among the methods."""
    better = (means[None] > means[:, None]).sum(1)
    equal = (means[None] == means[:, None]).sum(1)
    return np.asarray(better + (equal + 1) / 2, np.float64)


def _intervals(
    scores: Scores, statistic: Callable[[Table], Table], confidence: float, draws: int
) -> dict[str, Interval]:
    """A statistic [methods] of all scores, with percentile intervals over federations and seeds drawn anew."""
    table, generator = _means(scores), np.random.default_rng(0)
    methods, blocks, seeds = table.shape
    drawn = np.empty((draws, methods))
    for number in range(draws):
        block = generator.integers(blocks, size=(blocks, 1))
        drawn[number] = statistic(table[:, block, generator.integers(seeds, size=(blocks, seeds))])
    value, tail = statistic(table), 50 * (1 - confidence)
    low, high = np.percentile(drawn, [tail, 100 - tail], axis=0)
    bounds = zip(value.tolist(), low.tolist(), high.tolist(), strict=True)
    return {
        name: Interval(mean, below, above, blocks) for name, (mean, below, above) in zip(scores, bounds, strict=True)
    }
