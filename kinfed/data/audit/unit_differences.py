"""Columns whose values differ by site as units do: Fahrenheit at one, µmol/l at another, pounds among kilograms.

A column has, at every site with enough rows, a median and a range between quartiles. A site is asked about where

    its median lies outside of what all other sites hold (their 1 % to 99 %), by more than the whole of that; or
    it is a multiple of the others, at least twice or at most half: median and quartile range have the same ratio to
    theirs, and sites otherwise agree (ratios of their medians differ eight times less)

Sites do differ: these are distances that a difference of patients hardly makes, and one of units does. Columns with few
different values, and those that have one value at a site, are not numbers of this kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kinfed.data.audit.findings import Finding
from kinfed.data.preprocessing.cells import Cells

LEAST_AT_SITE = 20  # rows
LEAST_DIFFERENT = 10  # values at a site
MOST_SITES = 2_000
BEYOND = 1.0  # ranges of all others, by which a median lies outside of it
RATIO, SAME_RATIO, TIMES = 2.0, 1.6, 8.0
AGREEMENT = 0.05  # least spread of sites' medians, as a logarithm

Array = np.ndarray[Any, Any]


def unit_findings(numbers: Mapping[str, Cells], rows: Array, owner: Array, names: Sequence[str]) -> list[Finding]:
    """Doubts about columns of numbers in these `rows` [m] of the clients `owner` [m]."""
    if not 2 <= len(names) <= MOST_SITES:
        return []
    questions = []
    for name, cells in numbers.items():
        if cells.form == "boolean":
            continue
        questions += _questions(name, cells.as_numbers()[rows], owner, names)
    if not questions:
        return []
    shown = "; ".join(questions[:3]) + (f"; and {len(questions) - 3} more" if len(questions) > 3 else "")
    return [Finding("units", f"{shown}. Are these other units? Convert them before")]


def _questions(column: str, values: Array, owner: Array, names: Sequence[str]) -> list[str]:
    present = ~np.isnan(values)
    order = np.lexsort((values[present], owner[present]))
    sorted_values, sites = values[present][order], owner[present][order]
    start = np.flatnonzero(np.diff(sites, prepend=-1))
    count = np.diff(start, append=len(sites))
    changes = np.diff(sorted_values, prepend=np.nan) != 0
    different = np.add.reduceat(changes, start) if len(start) else count
    large = np.flatnonzero((count >= LEAST_AT_SITE) & (different >= LEAST_DIFFERENT))
    if len(large) < 2:
        return []
    first, size = start[large], count[large]
    low, median, high = (sorted_values[first + ((size - 1) * share).astype(np.int64)] for share in (0.25, 0.5, 0.75))
    spread = high - low
    questions = []
    for place in _suspects(median, spread):
        site = int(sites[first[place]])
        if spread[place] <= 0:
            continue
        others = np.delete(np.arange(len(large)), place)
        if len(others) == 1 and place > 0:
            continue  # of two, one question is enough
        kind = _kind(place, others, median, spread, sorted_values[sites != site])
        if kind:
            usual = float(np.median(median[others]))
            questions.append(f"{column} at {names[site]}: {kind} (median {median[place]:.4g}, elsewhere {usual:.4g})")
    return questions


def multiple_of_others(place: int, others: Array, middle: Array, spread: Array) -> float:
    """How many times the values of other sites those of a site are, by `middle` and `spread` [K] of all; 0 if they are
    no multiple."""
    usual, usual_spread = float(np.median(middle[others])), float(np.median(spread[others]))
    ratio = float(middle[place]) / usual if usual > 0 and middle[place] > 0 else 0.0
    same = ratio > 0 and 1 / SAME_RATIO <= spread[place] / max(usual_spread, 1e-300) / ratio <= SAME_RATIO
    if not same or 1 / RATIO < ratio < RATIO or not bool((middle[others] > 0).all()):
        return 0.0
    logs = np.log(middle[others])
    agreement = max(float(np.median(np.abs(logs - np.median(logs)))), AGREEMENT)
    return ratio if abs(np.log(ratio)) >= TIMES * agreement else 0.0


def _suspects(median: Array, spread: Array) -> Array:
    """Places of sites that are worth a look: the farthest from the middle, of sites with values that vary."""
    middle = np.median(median)
    return np.argsort(-np.abs(median - middle), kind="stable")[: max(3, len(median) // 10)]


def _kind(place: int, others: Array, median: Array, spread: Array, elsewhere: Array) -> str:
    """Sentence on unusual values of a site; "" if there are none."""
    low, high = np.quantile(elsewhere, [0.01, 0.99])
    outside = max(median[place] - high, low - median[place])
    if ratio := multiple_of_others(place, others, median, spread):
        return f"about {ratio:.2g} times the values of other sites"
    if outside > BEYOND * (high - low) > 0:
        return "values far from those of all other sites"
    return ""
