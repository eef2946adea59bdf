"""Types and ranges in words: "a whole number of at least 1", "auto or a number in [0, 1)", "int or none", "a | b"."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path",
}  # fmt: skip


def requirement(hint: Any, bounds: str = "finite") -> str:
    """Name what a setting must be, as a sentence says it; `bounds` are those of its numbers."""
    kinds = alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(requirement(kind, bounds) for kind in kinds)
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        member, *others = get_args(kind)
        several = {float: f"{1 + len(others)} numbers", int: "whole numbers"}.get(member, "names")
        return "a list of paths" if member is Path else f"{several} separated by commas"
    words = _WORDS.get(kind, "a name, or a table with a name and options")
    if bounds == "finite" or kind not in (int, float):
        return words
    if bounds.startswith("0 or "):
        return f"0 or {requirement(kind, bounds.removeprefix('0 or '))}"
    if bounds == "positive":
        return words.replace("a ", "a positive ", 1)
    return f"{words} {bounds}" if bounds.startswith("in ") else f"{words} of {bounds}"


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without None; the type itself where it is no union."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) if part is not type(None) for kind in alternatives(part))
    return (hint,)


def choices(hint: Any) -> tuple[Any, ...]:
    """The values of a Literal, also inside a union; () where the type is not made of choices and None alone."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return sum((choices(part) for part in get_args(hint)), ())
    return ()


def readable(hint: Any) -> str:
    """A type as a user reads it in a table: int, "a | b" for choices, "int or none" for what may be absent."""
    if get_origin(hint) is Annotated:
        return readable(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if isinstance(hint, type) and not get_args(hint):
        return "none" if hint is type(None) else hint.__name__
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(readable(part) for part in get_args(hint))
    return str(hint)


def bounds_in_words(gt: float | None, ge: float | None, lt: float | None, le: float | None) -> str:
    """ "at least 0", "in (0, 1]", "positive", "finite"."""
    low, high = (gt if ge is None else ge), (lt if le is None else le)
    if low is not None and high is not None:
        return f"in {'(' if ge is None else '['}{low:g}, {high:g}{')' if le is None else ']'}"
    if low is not None:
        if ge is None:
            return "positive" if low == 0 else f"above {low:g}"
        return f"at least {low:g}"
    if high is not None:
        return f"below {high:g}" if le is None else f"at most {high:g}"
    return "finite"
