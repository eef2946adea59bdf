"""Plain values: what a configuration may hold, and a file can record without loss.

Numbers, texts, true and false, none, and lists and tables of them. JSON has no infinity: files hold it as the text
"inf", and "inf" and "-inf" are numbers wherever a configuration is read.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INFINITIES = {"inf": math.inf, "-inf": -math.inf}


def plain(value: Any, owner: str) -> Any:
    """The value with lists for tuples and Python's own numbers; ValueError for what a file could not give back."""
    if isinstance(value, str):
        return _INFINITIES.get(value, str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if math.isnan(value):
            raise ValueError(f"{owner} is not a number (NaN), which no option can be")
        return float(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item, owner) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{owner}.{key}") for key, item in value.items()}
    raise ValueError(
        f"{owner} must be a plain value (a number, a text, true or false, none, or a list or table of them), so that "
        f"the run can be recorded and resumed; got {value!r}, a {type(value).__name__}"
    )


def recordable(value: Any) -> Any:
    """A plain value as strict JSON can hold it; `plain` gives the value back."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [recordable(item) for item in value]
    if isinstance(value, Mapping):
        return {key: recordable(item) for key, item in value.items()}
    return value
