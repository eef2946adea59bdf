"""The target column of a table as classes or numbers: one rule, said aloud, that a user may override.

    values                                             become
    text, booleans, categories                         classes
    two different values of any type                   classes (binary)
    whole numbers, at most FEW_VALUES different ones   classes
    other numbers                                      numbers: a regression

Nothing else decides: a column of ages is no list of 90 classes, and a grade from 1 to 5 is no real number unless its
owner says so (`task = "regression"`).
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from kinfed.data.examples.arrays import column_of, encode, encode_labels
from kinfed.data.examples.problem import Problem, TaskName
from kinfed.errors import ConfigError, DataError

TASKS: tuple[TaskName, ...] = get_args(TaskName)
FEW_VALUES = 20  # different whole numbers up to which they are taken for classes
MOST_SHARES = 5  # classes whose shares are said


@dataclass(frozen=True)
class Target:
    """A target column, understood."""

    labels: Tensor  # [N] int64 numbers of classes, or float64 in the column's own unit
    problem: Problem  # of a regression without mean and scale, which training rows have: `Problem.of_numbers`
    note: str  # what was decided, why, and how to decide otherwise


def read_target(values: Any, what: str, task: TaskName = "auto", *, codes: bool = False) -> Target:
    """The target `values` [N]; `what` names them in messages. `codes`: whole numbers are the classes 0..C-1 themselves,
    and otherwise the different values become the classes, in their natural order, and keep their names."""
    if task not in TASKS:
        raise ConfigError(f"task is one of {', '.join(TASKS)}; got {task!r}")
    column = column_of(values, what)
    if not len(column):
        raise DataError(f"{what} is empty; there should be a value for every example, and at least one example")
    kind, reason = infer_task(column)
    head = f"{what} holds {reason}" if task == "auto" else f"{what}, by --task"
    kind = kind if task == "auto" else task
    if kind == "regression":
        other = "" if task != "auto" else "; if its values are classes, --task classification"
        return Target(_numbers(column, what), Problem.of_numbers(), f"{head}: regression{other}")
    labels, names = encode_labels(column, what) if task == "classification" else encode(_whole(column), what)
    if codes and _whole(column).dtype.kind in "iu":
        if column.min() < 0:
            least = f"{column.min():g} in {what}"
            raise DataError(f"labels must lie in 0..C-1, where C is the number of classes; got {least}")
        labels, problem = torch.from_numpy(column.astype(np.int64)), Problem.of_classes(int(column.max()) + 1)
    else:
        problem = Problem.of_classes(len(names), names)
    is_number = column.dtype.kind in "iuf"
    other = "; if it is a number to predict, --task regression" if is_number and task == "auto" else ""
    return Target(labels, problem, f"{head}: {problem.in_words()}{_shares(labels, problem)}{other}")


def _shares(labels: Tensor, problem: Problem) -> str:
    """(benign 94 %, malignant 6 %), of a few classes."""
    if problem.num_classes > MOST_SHARES:
        return ""
    shares = torch.bincount(labels, minlength=problem.num_classes) / len(labels)
    pairs = zip(problem.class_labels, shares.tolist(), strict=True)
    return f" ({', '.join(f'{name} {100 * share:.3g} %' for name, share in pairs)})"


def read_known_target(values: Any, problem: Problem, what: str) -> Tensor:
    """Labels [N] of data for a problem that is known: its classes, of which no other may occur, or numbers."""
    if problem.is_regression:
        return _numbers(column_of(values, what), what)
    classes = problem.class_labels
    index, names = encode_labels(values, what)
    if unknown := [name for name in names if name not in classes]:
        first = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        raise DataError(f"{what} holds the class {unknown[0]!r}, which is unknown; known classes are {first}")
    return torch.tensor([classes.index(name) for name in names], dtype=torch.int64)[index]


def infer_task(column: np.ndarray) -> tuple[Literal["classification", "regression"], str]:
    """Whether a column of values holds classes or numbers, by the rule at the head of this file, and why."""
    if column.dtype.kind not in "iuf":
        return "classification", "booleans" if column.dtype.kind == "b" else "text"
    finite = column[np.isfinite(column)]
    different = len(np.unique(finite))
    if different <= 2:
        return "classification", f"{different} different value{'s' * (different != 1)}"
    if not (finite == np.round(finite)).all():
        return "regression", f"{different:,} different numbers, not all whole"
    if different <= FEW_VALUES:
        return "classification", f"{different} different whole numbers"
    return "regression", f"{different:,} different whole numbers"


def _whole(column: np.ndarray) -> np.ndarray:
    """Whole numbers as such: a class is called 1, not 1.0. Two other numbers are classes under their own names."""
    is_whole = column.dtype.kind == "f" and bool((column == np.round(column)).all())
    return column.astype(np.int64) if is_whole else column


def _numbers(column: np.ndarray, what: str) -> Tensor:
    if column.dtype.kind not in "biuf":
        try:
            column = column.astype(np.float64)
        except ValueError:
            raise DataError(f"{what} should hold numbers for a regression; got text such as {column[0]!r}") from None
    numbers = column.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise DataError(
            f"{what} has {len(bad)} missing or infinite number(s), the first in entry {bad[0]}; a target must be "
            "known: leave such rows out"
        )
    return torch.from_numpy(numbers)
