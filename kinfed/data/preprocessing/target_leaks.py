"""Columns that give the target away: written down after the outcome, or another name for it.

A column is suspected where it tells almost all of the target by itself. Training rows are sorted into the values of the
column, or into bins of equal size where it has many:

    classes    the most frequent class of its bin is right in 99 % of rows, and wrong in at most a tenth of those that
               the most frequent class of all gets wrong
    numbers    the means of its bins, or a straight line, explain 99 % of the variance

Nothing is left out for that: some columns are that good. A note names them, and whoever knows the table decides. Rows
of all clients are looked at in one place, as an experiment has them; nodes of a deployment do not do this.
"""

from typing import Any

import numpy as np

from kinfed.data.examples.problem import Problem
from kinfed.data.preprocessing.encodings import CategoryEncoding, Encoding, TextEncoding

LEAST_ROWS = 100  # of fewer, bins say little
MOST_ROWS = 20_000  # that are looked at, evenly spread over the table
ROWS_IN_BIN, MOST_BINS = 10, 50
TELLS, MISSES = 0.99, 0.1

Array = np.ndarray[Any, Any]


def leak_note(columns: list[Encoding], raw: Array, target: Array, problem: Problem) -> str:
    """A sentence about columns that tell the target; "" where there are none. `raw` [n, D] are the features of training
    rows in the order of `columns`, `target` [n]."""
    if len(target) < LEAST_ROWS:
        return ""
    chosen = np.linspace(0, len(target) - 1, min(len(target), MOST_ROWS)).astype(np.int64)
    raw, target = raw[chosen], target[chosen]
    suspects, first = [], 0
    for column in columns:
        part = raw[:, first : first + len(column.features)]
        first += len(column.features)
        if not isinstance(column, TextEncoding) and _tells(column, part, target, problem):
            suspects.append(column.name)
    if not suspects:
        return ""
    names = ", ".join(suspects[:5]) + (", ..." if len(suspects) > 5 else "")
    head = "a column" if len(suspects) == 1 else "columns, each of"
    return (
        f"{head} which tells almost all of the target by itself: {names}. Leave out what is known only after the "
        f"outcome (--columns {','.join(f'{name}=skip' for name in suspects[:5])})"
    )


def _tells(column: Encoding, part: Array, target: Array, problem: Problem) -> bool:
    if isinstance(column, CategoryEncoding):
        value = np.where(part.any(1), part.argmax(1), -1).astype(np.float64)
    else:
        value = part[:, 0].astype(np.float64)
    bins = _bins(value)
    if not problem.has_classes:
        numbers = target.astype(np.float64).reshape(len(target), -1).T
        return any(_explained(value[known], bins[known], y[known]) >= TELLS
                   for y in numbers if (known := ~np.isnan(y)).sum() > 1)  # fmt: skip
    counts = np.zeros((int(bins.max()) + 1, problem.num_classes), np.int64)
    np.add.at(counts, (bins, target), 1)
    wrong = 1 - counts.max(1).sum() / len(target)
    wrong_without = 1 - counts.sum(0).max() / len(target)
    return bool(wrong <= 1 - TELLS and wrong <= MISSES * wrong_without)


def _bins(value: Array) -> Array:
    """[n] the number of a row's value, or that of its bin where there are many different ones."""
    different, place = np.unique(value, return_inverse=True)
    most = min(MOST_BINS, len(value) // ROWS_IN_BIN)
    if len(different) <= most:
        return place
    ranks = np.empty(len(value), np.int64)
    ranks[np.argsort(value, kind="stable")] = np.arange(len(value))
    return ranks * most // len(value)


def _explained(value: Array, bins: Array, target: Array) -> float:
    """The share of the target's variance that a straight line, or the means of bins, explain: the larger one."""
    spread = ((target - target.mean()) ** 2).sum()
    if not spread:
        return 0.0
    centred = value - value.mean()
    line = (centred @ target) ** 2 / max(centred @ centred, 1e-300)
    sums, counts = np.bincount(bins, target), np.bincount(bins)
    between = (counts * (sums / np.maximum(counts, 1) - target.mean()) ** 2).sum()
    return float(max(line, between) / spread)
