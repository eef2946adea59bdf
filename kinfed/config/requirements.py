"""What a setting must be, in words: "a whole number of at least 1", "auto or a number in [0, 1)", "local or ray"."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from kinfed.core import Declaration

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
_LIMITS = ("gt", "ge", "lt", "le")


def requirement(field: FieldInfo) -> str:
    return _describe(field.annotation, field.metadata)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without None; the type itself where it is no union."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(part for part in get_args(hint) if part is not type(None))
    return (hint,)


def _describe(hint: Any, metadata: Iterable[Any] = ()) -> str:
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return _describe(inner, [limit for one in more for limit in getattr(one, "metadata", [one])])
    kinds = alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(_describe(kind) for kind in kinds)
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        members = get_args(kind)
        if members[0] is float:
            return f"{len(members)} numbers separated by commas"
        return "whole numbers separated by commas" if members[0] is int else "a list of paths"
    limits = {name: getattr(limit, name) for limit in metadata for name in _LIMITS if hasattr(limit, name)}
    words = _WORDS.get(kind, "a name, or a table with a name and options")
    if not limits:
        return words
    bounds = Declaration("", **limits).bounds
    return f"{words} {bounds}" if bounds.startswith("in ") else f"{words} of {bounds}"
