"""Options, declared once: type, range, default, one line of text, and the range that tuning searches.

    @dataclass(frozen=True)
    class Ditto(Algorithm[...]):
        lam: float = option(0.1, "λ: strength of the pull towards the server model", ge=0, tune=Range(0.01, 1.9))
        weights: Literal["examples", "equal"] = option("examples", "weights of the average")

From this one line come validation (`make_options`, `check_options`), `kinfed list`, the tables in the documentation
(`describe_options`), the search space of `kinfed tune` and, for settings, the options of the command line, the TOML
template and what errors say. Choices are `Literal` types. What another dataclass has declared is taken from there, with
a default of its own where it needs one:

    dp_noise: float | None = option_of(Privacy, "noise")
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from kinfed.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

_KEY = "option"  # of the declaration in a field's metadata


@dataclass(frozen=True)
class Range:
    """Numbers that tuning searches, from low to high, both included."""

    low: float
    high: float
    log: bool = True  # even on a logarithmic scale
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ConfigError(f"a range needs low < high, and low > 0 on a logarithmic scale; got {self}")
        if self.whole and (self.low != int(self.low) or self.high != int(self.high)):
            raise ConfigError(f"a range of whole numbers has whole ends; got {self.low:g} and {self.high:g}")

    def __str__(self) -> str:
        kind = "whole numbers" if self.whole else "numbers"
        return f"{kind} {self.low:g} to {self.high:g}" + (", logarithmic" if self.log else "")

    def __contains__(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and (not self.whole or value == int(value))

    def at_edge(self, value: float) -> bool:
        """Whether a value is so near an end that the best may lie beyond it."""
        if self.whole:
            return value in (self.low, self.high)
        if self.log:
            return value < self.low * 1.2 or value > self.high / 1.2
        return min(value - self.low, self.high - value) < 0.03 * (self.high - self.low)


@dataclass(frozen=True)
class Declaration:
    """Facts that `option` gives of a field, besides its type and default."""

    text: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    infinite: bool = False  # an infinite number is a value like any other
    or_zero: bool = False  # zero is one too, whatever the range
    tune: Range | None = None
    registry: str = ""  # whose names the value is one of
    flag: str = ""  # of the command line, where it is not the option's name
    variable: str = ""  # of the environment, that the command line reads

    def admits(self, value: Any) -> bool:
        """Whether a value lies in the range; text, None, booleans and collections always do."""
        if not isinstance(value, int | float) or isinstance(value, bool) or (self.or_zero and value == 0):
            return True
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
            and value == value  # no NaN
            and (self.infinite or abs(value) != math.inf)  # compared, not converted: whole numbers know no bound
        )

    @property
    def bounds(self) -> str:
        """The range in words: "at least 0", "in (0, 1]", "positive", "finite"."""
        return "0 or " * self.or_zero + bounds_in_words(self.gt, self.ge, self.lt, self.le)


def option(
    default: Any, text: str, *, gt: float | None = None, ge: float | None = None, lt: float | None = None,
    le: float | None = None, infinite: bool = False, or_zero: bool = False, tune: Range | None = None,
    registry: str = "", flag: str = "", variable: str = "",
) -> Any:  # fmt: skip
    """A dataclass field that is an option. Numbers must lie above `gt` (from `ge` on), below `lt` (up to `le`). For the
    command line: the registry whose names can be completed, another name of the option, an environment variable."""
    declaration = Declaration(text, gt, ge, lt, le, infinite, or_zero, tune, registry, flag, variable)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def option_of(kind: type[Any], name: str, default: Any = ..., text: str | None = None) -> Any:
    """The option that another dataclass declares, with a default or a sentence of its own where one is given."""
    other = kind.__dataclass_fields__[name]
    declaration = other.metadata[_KEY]
    if text is not None:
        declaration = dataclasses.replace(declaration, text=text)
    return dataclasses.field(default=other.default if default is ... else default, metadata={_KEY: declaration})


@dataclass(frozen=True)
class NoOptions:
    """For what has nothing to choose."""


@dataclass(frozen=True)
class OptionDoc:
    """One line of `kinfed list` and of a table in the documentation."""

    name: str
    type: str
    default: Any
    text: str
    bounds: str = ""  # "" if every value of the type will do
    tune: Range | None = None


def declared(kind: type[Any]) -> dict[str, Declaration]:
    """The options of a dataclass by name, in order."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(kind) if _KEY in field.metadata}


def make_options(kind: type[T], values: Mapping[str, Any], owner: str) -> T:
    """kind(**values) with types checked and text from a command line converted ("3" for an int, "3,4" for several).

    `owner` is what errors call the thing whose options these are, for example "partition dirichlet"."""
    return kind(**convert_options(kind, values, owner))


def convert_options(kind: type[Any], values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The values as the types that `kind` declares; ConfigError for an unknown name, a wrong type or range."""
    known = declared(kind)
    for name in values:
        if name not in known:
            if not known:
                raise ConfigError(f"{owner} has no options; got {name!r}")
            raise unknown_name(f"option of {owner}", name, known)
    return {name: convert(kind, name, value, owner) for name, value in values.items()}


def convert_fields(instance: Any, owner: str = "") -> None:
    """Convert and check all options of a frozen dataclass of settings; for its `__post_init__`."""
    for name in declared(type(instance)):
        object.__setattr__(instance, name, convert(type(instance), name, getattr(instance, name), owner))


def convert(kind: type[Any], name: str, value: Any, owner: str = "") -> Any:
    """The value of one option as its type says; ConfigError if it is none, or lies outside the range. With an owner
    the sentence says what is wrong about the value; without, for settings, all that it may be."""
    from pydantic import ValidationError  # where it is needed: names are listed without it

    hint, declaration = option_types(kind)[name], kind.__dataclass_fields__[name].metadata[_KEY]
    several = isinstance(value, str) and get_origin(hint) is tuple
    parts = [part.strip() for part in value.split(",") if part.strip()] if several else value
    try:
        result = adapter_of(hint).validate_python(parts)
        wanted = "" if declaration.admits(result) else declaration.bounds
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # of a validator, which says all
            raise ConfigError(f"{owner}: {name} " * bool(owner) + first["msg"].removeprefix("Value error, ")) from None
        wanted = readable(hint)
    if not wanted:
        return result
    if owner:
        raise ConfigError(f"{owner}: {name} must be {wanted}; got {value!r}")
    raise ConfigError(f"{name} must be {requirement(hint, declaration.bounds)}; got {value!r}")


def check_options(instance: Any, owner: str | None = None) -> None:
    """Refuse choices and ranges that the declarations do not admit; for `__post_init__` of what has options."""
    kind = type(instance)
    owner = owner or kind.__name__
    for name, declaration in declared(kind).items():
        value, hint = getattr(instance, name), option_types(kind)[name]
        if isinstance(value, str) and (words := choices(hint)) and value not in words:
            raise ConfigError(f"{owner}: {name} must be {readable(hint)}; got {value!r}")
        if not declaration.admits(value):
            raise ConfigError(f"{owner}: {name} must be {declaration.bounds}; got {value!r}")


def describe_options(kind: type[Any], preset: Mapping[str, Any] | None = None) -> list[OptionDoc]:
    """Every option of a dataclass, with the defaults that a preset changes."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)} | dict(preset or {})
    types = {name: readable(hint) for name, hint in option_types(kind).items()}
    return [
        OptionDoc(name, types[name], defaults[name], one.text, "" if one.bounds == "finite" else one.bounds, one.tune)
        for name, one in declared(kind).items()
    ]


_OPTION_TYPES: WeakKeyDictionary[type[Any], dict[str, Any]] = WeakKeyDictionary()  # resolving them takes long


def option_types(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's options by name; not to be changed."""
    if kind not in _OPTION_TYPES:
        hints = get_type_hints(kind, include_extras=True)
        _OPTION_TYPES[kind] = {name: hints[name] for name in declared(kind)}
    return _OPTION_TYPES[kind]


@cache
def adapter_of(hint: Any) -> TypeAdapter[Any]:
    """What makes values of a type, or says why it cannot."""
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def changed_repr(thing: Any, always: Sequence[str] = ()) -> str:
    """Ditto(lam=0.1): what differs from the defaults, and the fields named in `always`."""
    values = {field: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    fields = [(f.name, value) for f, value in values.items() if f.name in always or value != _default(f)]
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


# Types and ranges in words: "a whole number of at least 1", "auto or a number in [0, 1)", "int or none", "a | b".
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
    """The values of a Literal, also inside a union; () if the type is not made of choices and None alone."""
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
