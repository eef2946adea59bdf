"""Kinds of settings: plain values, things chosen by name, files of plugins, values of TOML.

Plain values are what a configuration may hold and a file can record without loss: numbers, texts, true and false, none,
and lists and tables of them. JSON has no infinity: files hold it as the text "inf", and "inf" and "-inf" are numbers
wherever a configuration is read.
"""

import math
import numbers
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kinfed.core import plugins

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


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings of a run without nesting: algorithms.ditto.lam."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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


class Named(BaseModel):
    """A thing chosen by name, with its options: "classes" or {name = "classes", classes = 3}."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    options: dict[str, Any] = Field(default_factory=dict)


def as_named(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping):
        name = value.get("name")
        options = {key: plain(option, f"{name}.{key}") for key, option in value.items() if key != "name"}
        return {"name": name, "options": options}
    return value


Choice = Annotated[Named, BeforeValidator(as_named)]
CHOICES = ("dataset", "partition", "model", "robust", "compress", "mode", "clock")  # settings that are a Named


def as_models(value: Any) -> Any:
    """Models by the name of their architecture: "phone=mlr,server=mlp", or a table of names or tables of options."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {name.strip(): model.strip() for name, _, model in pairs}
    if not isinstance(value, Mapping):
        return value
    models = {}
    for label, choice in value.items():
        named = Named(**as_named(choice))
        if not named.name or not label or not set(str(label)).isdisjoint(". "):
            raise ValueError(f"models gives every architecture a name and a model, phone=mlr,server=mlp; got {label!r}")
        models[str(label)] = {"name": named.name, **named.options}
    if len(models) == 1:
        raise ValueError("models is for several architectures; name one alone with model")
    return models or None


def as_codec(value: Any) -> Any:
    """Name and first option from one word: qsgd:4."""
    if isinstance(value, str) and ":" in value:
        from kinfed.updates import first_option

        name, _, option = value.partition(":")
        return {"name": name, first_option(name): toml_value(option)}
    return value


def accepted_names(value: Any) -> Any:
    """Names of findings, separated by commas; unknown ones are refused."""
    from kinfed.data import findings

    if not isinstance(value, str | list | tuple):
        return value
    return ",".join(sorted(findings.accepted(value)))


def plugin_files(value: Any) -> tuple[Path, ...]:
    """Absolute paths, so that a run can be resumed from anywhere. The files are run: names they add can be used.
    What a folder has recorded comes here only after `JobFiles.trusted_settings`, which has seen to it that it may."""
    files = [value] if isinstance(value, str | Path) else value
    if not isinstance(files, list | tuple):
        raise ValueError(f"plugins must be a list of Python files; got {value!r}")
    paths = tuple(Path(file).expanduser().absolute() for file in files)
    for path in paths:
        plugins.load(path)
    return paths


def toml_value(text: str) -> Any:
    """A TOML value where the text is one (0.5, true, [1, 2]), otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
