"""Representations of a line: of a dataclass with many fields, those that are not as they are by default."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def changed_repr(thing: Any, always: Sequence[str] = ()) -> str:
    """Ditto(lam=0.1): what differs from the defaults, and the fields named in `always`."""
    shown = [
        f"{field.name}={getattr(thing, field.name)!r}"
        for field in dataclasses.fields(thing)
        if field.name in always or getattr(thing, field.name) != _default(field)
    ]
    return f"{type(thing).__name__}({', '.join(shown)})"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
