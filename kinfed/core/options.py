"""Options of data sets and partitions: frozen dataclasses, filled from a configuration with clear errors.

    classes: Annotated[int, "how many classes a client holds"] = 3

declares an option with its type, the sentence that `kinfed list` shows, and its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from kinfed.errors import ConfigError, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class NoOptions:
    """For what has nothing to choose."""


@dataclass(frozen=True)
class OptionDoc:
    """One line of `kinfed list`."""

    name: str
    type: str
    default: Any
    doc: str


def build(kind: type[T], given: Mapping[str, Any], owner: str) -> T:
    """kind(**given) with types checked and text from a command line converted ("3" for an int)."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {field.name for field in fields if field.init}
    for name in given:
        if name not in known:
            if not known:
                raise ConfigError(f"{owner} has no options; got {name!r}")
            raise unknown_name(f"option of {owner}", name, known)
    try:
        return TypeAdapter(kind).validate_python(dict(given))
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'][0].lower()}{problem['msg'][1:]} "
            f"(got {problem['input']!r})"
            for problem in error.errors()
        ]
        raise ConfigError(f"{owner}: {'; '.join(problems)}") from None


def documented(kind: type[Any]) -> list[OptionDoc]:
    hints = get_type_hints(kind, include_extras=True)
    docs = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        plain, doc = (hint.__origin__, hint.__metadata__[0]) if hasattr(hint, "__metadata__") else (hint, "")
        docs.append(OptionDoc(field.name, _readable(plain), field.default, doc))
    return docs


def _readable(hint: Any) -> str:
    """int, "a | b" for choices, "int or none" for optional ones."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if isinstance(hint, type) and not get_args(hint):
        return "none" if hint is type(None) else hint.__name__
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_readable(part) for part in get_args(hint))
    return str(hint)
