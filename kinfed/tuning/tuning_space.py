"""What tuning varies: the ranges that algorithms declare, with those of the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kinfed.algorithms import tuning_space
from kinfed.core import Range
from kinfed.errors import ConfigError, unknown_name


def space_of(
    method: str, fixed: Mapping[str, Any], changes: Mapping[str, Range] | None = None, optimizer: str = "sgd"
) -> dict[str, Range]:
    """The method's space without the options that the user has fixed, with ranges of the user's own."""
    space = tuning_space(method, optimizer)
    for option, range_ in (changes or {}).items():
        if option not in space:
            raise unknown_name(f"tuned option of {method}", option, space)
        if option in fixed:
            raise ConfigError(f"{method}.{option} is fixed at {fixed[option]!r} and has a range; keep one of the two")
        space[option] = range_
    return {option: range_ for option, range_ in space.items() if option not in fixed}


def parse_ranges(texts: Iterable[str], methods: Mapping[str, str]) -> dict[str, dict[str, Range]]:
    """Ranges by label and option from texts "label.option=low:high"; `methods` says what each label stands for.

    A range is of the same kind as the usual one: logarithmic (unless it begins at 0), whole numbers."""
    ranges: dict[str, dict[str, Range]] = {}
    for text in texts:
        key, _, ends = text.partition("=")
        label, _, option = key.strip().rpartition(".")
        low, _, high = ends.partition(":")
        try:
            numbers = float(low), float(high)
        except ValueError:
            raise ConfigError(f"--range takes label.option=low:high, such as ditto.lam=0.01:10; got {text!r}") from None
        if label not in methods:
            raise unknown_name("owner in --range", label, methods)
        space = tuning_space(methods[label])
        if option not in space:
            raise unknown_name(f"tuned option of {methods[label]}", option, space)
        usual = space[option]
        ranges.setdefault(label, {})[option] = Range(*numbers, log=usual.log and numbers[0] > 0, whole=usual.whole)
    return ranges
