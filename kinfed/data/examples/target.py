"""The target of a table or of arrays, understood: one rule, said aloud, that a user may override.

    values                                             become
    text, booleans, categories                         classes
    two different values of any type                   classes (binary)
    whole numbers, at most FEW_VALUES different ones   classes
    other numbers                                      numbers: a regression
    a column of times and one of events                survival (also a structured array of a boolean and a number)
    several columns of two values each                 labels, any of which a row may have
    several columns of other numbers                   a regression of several numbers

Nothing else decides: a column of ages is no list of 90 classes, and a grade from 1 to 5 is no real number unless its
owner says so (`task = "regression"`). Whole numbers may be classes, classes in an order, counts or numbers; `ordinal`
and `counts` are therefore always asked for by name.
"""

from collections.abc import Callable, Sequence
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

    labels: Tensor  # [N, *shape] int64 numbers of classes, or float64 in the column's own unit
    problem: Problem  # of a regression without mean and scale, which training rows have: `Problem.of_numbers`
    note: str  # what was decided, why, and how to decide otherwise


def read_target(
    values: Any, what: str, task: TaskName = "auto", *, codes: bool = False, names: Sequence[str] | None = None
) -> Target:
    """The target `values` [N] or [N, ...]; `what` names them in messages. `codes`: whole numbers are the classes 0..C-1
    themselves, and otherwise the different values become the classes, in their natural order, and keep their names.
    `names` are those of several columns."""
    if task not in TASKS:
        raise ConfigError(f"task is one of {', '.join(TASKS)}; got {task!r}")
    array = np.asarray(values)
    one_column = array.ndim == 2 and array.shape[1] == 1 and task == "auto"  # by mistake, most likely
    if (
        (array.ndim > 1 and not one_column)
        or array.dtype.names is not None
        or task in ("survival", "multilabel", "dense")
    ):
        return _several(array, what, task, names)
    column = column_of(values, what)
    if not len(column):
        raise DataError(f"{what} is empty; there should be a value for every example, and at least one example")
    kind, reason = infer_task(column)
    head = f"{what} holds {reason}" if task == "auto" else f"{what}, by --task"
    if task == "counts":
        return Target(_counts(column, what), Problem.of_counts(), f"{head}: counts")
    kind = kind if task in ("auto", "ordinal") else task  # type: ignore[assignment]  # the other two
    if kind == "regression" and task != "ordinal":
        other = "" if task != "auto" else "; if its values are classes, --task classification"
        return Target(_numbers(column, what), Problem.of_numbers(), f"{head}: regression{other}")
    if task == "ordinal" and column.dtype.kind not in "iuf":
        raise DataError(f"{what} is text, which has no order; number its classes in their order: 1, 2, 3, ...")
    labels, names = encode(_whole(column), what) if task == "auto" else encode_labels(column, what)
    if codes and _whole(column).dtype.kind in "iu":
        if column.min() < 0:
            least = f"{column.min():g} in {what}"
            raise DataError(f"labels must lie in 0..C-1, where C is the number of classes; got {least}")
        labels, problem = torch.from_numpy(column.astype(np.int64)), Problem.of_classes(int(column.max()) + 1)
    else:
        problem = Problem.of_classes(len(names), names)
    if task == "ordinal":
        problem = _in_order(problem, what)
    is_number = column.dtype.kind in "iuf"
    other = "; if it is a number to predict, --task regression" if is_number and task == "auto" else ""
    return Target(labels, problem, f"{head}: {problem.in_words()}{_shares(labels, problem)}{other}")


def _in_order(problem: Problem, what: str) -> Problem:
    if problem.num_classes < 3:
        raise DataError(f"{what} has {problem.num_classes} classes, and an order needs three; --task classification")
    return Problem("ordinal", problem.num_classes, problem.class_names)


def _several(array: np.ndarray, what: str, task: TaskName, names: Sequence[str] | None) -> Target:
    """A target of several values per example."""
    if array.dtype.names is not None:
        if len(array.dtype.names) != 2 or task not in ("auto", "survival"):
            raise DataError(f"{what} with fields holds an event and a time; got {', '.join(array.dtype.names)}")
        event, time = sorted(array.dtype.names, key=lambda name: array.dtype[name].kind != "b")
        return survival_target(array[time], array[event], what)
    if task == "survival":
        if array.ndim != 2 or array.shape[1] != 2:
            raise DataError(f"{what} of survival is [N, 2], time and event; got shape {list(array.shape)}")
        return survival_target(array[:, 0], array[:, 1], what)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} of several values per example holds numbers; got {array.dtype}")
    if task == "dense":
        if array.dtype.kind not in "iu" or array.ndim < 2:
            raise DataError(f"{what} of a dense problem holds a class for each position, [N, ...]; got {array.dtype}")
        labels = torch.from_numpy(array.astype(np.int64))
        problem = Problem("dense", int(labels.max()) + 1, shape=tuple(labels.shape[1:]))
        return Target(labels, problem, f"{what}: {problem.in_words()}")
    values = array.astype(np.float64)
    labels = torch.from_numpy(values if values.ndim > 1 else values[:, None])
    two = bool(((values == 0) | (values == 1) | np.isnan(values)).all())
    if task == "multilabel" or (task == "auto" and two and array.ndim == 2):
        named = None if names is None else tuple(names)
        problem = Problem("multilabel", shape=tuple(labels.shape[1:]), target_names=named)
        problem.check(labels, what)
        return Target(labels, problem, f"{what}: {problem.in_words()}; if they are numbers, --task regression")
    if task not in ("auto", "regression"):
        raise DataError(f"{what} holds {list(array.shape[1:])} values per example, and {task} takes one")
    if np.isinf(values).any() or np.isnan(values).all(0).any():
        raise DataError(f"{what} has infinite numbers, or none at all in one place; gaps are NaN")
    problem = Problem.of_numbers(values[:0], names)
    return Target(labels, problem, f"{what}: {problem.in_words()}")


YES, NO = ("1", "1.0", "true", "yes", "dead", "event"), ("0", "0.0", "false", "no", "alive", "censored")


def survival_target(time: Any, event: Any, what: str) -> Target:
    """Times [N] of 0 or more, and whether the event happened then [N]: 1 or 0, booleans, or words as in YES and NO."""
    times = _numbers(column_of(time, f"time in {what}"), f"time in {what}")
    if bool((times < 0).any()):
        row = int((times < 0).nonzero()[0])
        raise DataError(
            f"time in {what} is {times[row]:g} in entry {row}; a time of follow-up is 0 or more: leave such rows out, "
            "or count from another day"
        )
    words = [str(value).strip().lower() for value in column_of(event, f"event in {what}").tolist()]
    if others := sorted(set(words) - {*YES, *NO}):
        raise DataError(f"event in {what} is 1 where it happened and 0 where not; got {others[0]!r}")
    events = torch.tensor([word in YES for word in words], dtype=torch.float64)
    share = f"{int(events.sum()):,} events in {len(events):,} rows"
    return Target(torch.stack([times, events], 1), Problem.of_survival(), f"{what}: survival, {share}")


def _shares(labels: Tensor, problem: Problem) -> str:
    """(benign 94 %, malignant 6 %), of a few classes."""
    if problem.num_classes > MOST_SHARES:
        return ""
    shares = torch.bincount(labels, minlength=problem.num_classes) / len(labels)
    pairs = zip(problem.class_labels, shares.tolist(), strict=True)
    return f" ({', '.join(f'{name} {100 * share:.3g} %' for name, share in pairs)})"


def read_known_target(values: Any, problem: Problem, what: str) -> Tensor:
    """Labels [N, *shape] of data for a problem that is known: its classes, of which no other may occur, or numbers."""
    if problem.shape:
        task: TaskName = problem.kind  # type: ignore[assignment]  # kinds of several values are tasks
        labels = read_target(values, what, task).labels
        problem.check(labels, what)
        return labels
    if not problem.has_classes:
        read: Callable[[np.ndarray, str], Tensor] = _counts if problem.kind == "counts" else _numbers
        return read(column_of(values, what), what)
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


def _counts(column: np.ndarray, what: str) -> Tensor:
    counts = _numbers(column, what)
    bad = ((counts < 0) | (counts != counts.round())).nonzero().flatten()
    if len(bad):
        raise DataError(f"{what} should hold counts 0, 1, 2, ...; entry {int(bad[0])} is {counts[bad[0]]:g}")
    return counts


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
