"""Columns that give the target away: written down after the outcome, or another name for it.

Training rows are sorted into the values of a column, or into bins of equal size where it has many; rows without a value
are a bin of their own, since a date that only the dead have says enough by being there. A column is

    a copy     where its values, or whether there is one, name the classes one to one; or where a straight line through
               its numbers is the target (or one of its numbers)
    a leak     where the most frequent class of its bin is right in 99 % of rows, and wrong in at most a tenth of those
               that the most frequent class of all gets wrong; or where the means of its bins, or a straight line,
               explain 99 % of the variance of a number

A copy cannot be meant. A leak may be a column that is that good: someone who knows the table decides.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kinfed.data.audit.findings import Finding, some
from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.cells import Cells

LEAST_ROWS = 100  # of fewer, bins say little
LEAST_IN_CLASS = 10  # rows of every class, for a copy
MOST_ROWS = 20_000  # that are looked at, evenly spread over the table
ROWS_IN_BIN, MOST_BINS = 10, 50
TELLS, MISSES = 0.99, 0.1
EXACT = 1e-9  # of the variance, that a straight line leaves

Array = np.ndarray[Any, Any]


def leak_findings(cells: Mapping[str, Cells], rows: Array, target: Array, problem: Problem) -> list[Finding]:
    """Copies and leaks among columns. `rows` [m] are training rows, `target` [m] theirs."""
    if len(target) < LEAST_ROWS or problem.kind == "dense":
        return []
    chosen = np.linspace(0, len(target) - 1, min(len(target), MOST_ROWS)).astype(np.int64)
    rows, target = rows[chosen], target[chosen]
    copies, leaks = [], []
    for name, column in cells.items():
        if column.form in ("empty", "unreadable"):
            continue
        value = _values(column, rows)
        if _is_copy(value, target, problem):
            copies.append(name)
        elif _tells(value, column.codes is not None, target, problem):
            leaks.append(name)
    return [*_copy_findings(copies), *_leak_findings(leaks)]


def _copy_findings(names: list[str]) -> list[Finding]:
    if not names:
        return []
    head = f"column {names[0]} says" if len(names) == 1 else f"columns {some(names)} each say"
    text = (
        f"{head} the label itself, by its values or by being empty: a model would learn to read it there. Leave it "
        f"out: --columns {_skips(names)}."
    )
    return [Finding("label_copy", text, refused=True)]


def _leak_findings(names: list[str]) -> list[Finding]:
    if not names:
        return []
    head = "a column" if len(names) == 1 else "columns, each of"
    text = (
        f"{head} which tells almost all of the target by itself: {some(names)}. Leave out what is known only after the "
        f"outcome (--columns {_skips(names)})"
    )
    return [Finding("leak", text)]


def _skips(names: list[str]) -> str:
    return ",".join(f"{name}=skip" for name in names[:5])


def _values(column: Cells, rows: Array) -> Array:
    """[m] float64 numbers, days or numbers of texts; NaN if missing."""
    if column.codes is None:
        return column.numbers[rows]
    codes = column.codes[rows].astype(np.float64)
    return np.where(codes < 0, np.nan, codes)


def _is_copy(value: Array, target: Array, problem: Problem) -> bool:
    absent = np.isnan(value)
    if not problem.has_classes:
        return not absent.any() and any(
            _explained_by_line(value[known], y[known]) >= 1 - EXACT for y, known in _numbers(target)
        )
    if np.bincount(target, minlength=problem.num_classes).min() < LEAST_IN_CLASS:
        return False
    by_value = _one_to_one(np.unique(value, return_inverse=True, equal_nan=True)[1], target, problem.num_classes)
    return by_value or (bool(absent.any()) and _one_to_one(absent.astype(np.int64), target, problem.num_classes))


def _numbers(target: Array) -> Iterator[tuple[Array, Array]]:
    """Every number of a target [m] or [m, ...], with the rows that have it."""
    for y in target.astype(np.float64).reshape(len(target), -1).T:
        known = ~np.isnan(y)
        if known.sum() >= LEAST_ROWS:
            yield y, known


def _one_to_one(place: Array, target: Array, classes: int) -> bool:
    """Whether every value stands with one class and every class with one value."""
    values = int(place.max()) + 1
    return values == classes and len(np.unique(place * classes + target)) == classes


def _tells(value: Array, is_text: bool, target: Array, problem: Problem) -> bool:
    bins = _bins(value, is_text)
    if bins is None:
        return False
    if not problem.has_classes:
        by_line = not (np.isnan(value).any() or is_text)
        return any(
            max(
                _explained_by_line(value[known], y[known]) if by_line else 0.0,
                _explained_by_bins(bins[known], y[known]),
            )
            >= TELLS
            for y, known in _numbers(target)
        )
    counts = np.zeros((int(bins.max()) + 1, problem.num_classes), np.int64)
    np.add.at(counts, (bins, target), 1)
    wrong = 1 - counts.max(1).sum() / len(target)
    wrong_without = 1 - counts.sum(0).max() / len(target)
    return bool(wrong <= 1 - TELLS and wrong <= MISSES * wrong_without)


def _bins(value: Array, is_text: bool) -> Array | None:
    """[n] the number of a row's value, or that of its bin if there are many different ones; missing ones have a bin
    of their own. Many different texts are in two bins: there is one, or there is none."""
    absent = np.isnan(value)
    different, place = np.unique(value, return_inverse=True, equal_nan=True)
    most = min(MOST_BINS, len(value) // ROWS_IN_BIN)
    if len(different) <= most:
        return place
    if is_text:
        return absent.astype(np.int64) if absent.any() else None
    ranks = np.empty(len(value), np.int64)
    ranks[np.argsort(value, kind="stable")] = np.arange(len(value))  # NaN is sorted last
    present = len(value) - int(absent.sum())
    return np.where(absent, most, np.minimum(ranks * most // max(present, 1), most - 1))


def _explained_by_line(value: Array, target: Array) -> float:
    """The share of the target's variance that a straight line explains."""
    spread = ((target - target.mean()) ** 2).sum()
    centred = value - value.mean()
    return float((centred @ target) ** 2 / max(centred @ centred, 1e-300) / spread) if spread else 0.0


def _explained_by_bins(bins: Array, target: Array) -> float:
    """The share of the target's variance that the means of bins explain."""
    spread = ((target - target.mean()) ** 2).sum()
    sums, counts = np.bincount(bins, target), np.bincount(bins)
    between = (counts * (sums / np.maximum(counts, 1) - target.mean()) ** 2).sum()
    return float(between / spread) if spread else 0.0
