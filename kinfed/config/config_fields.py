"""Kinds of settings: things chosen by name, files of plugins, values of TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kinfed.config.plain_values import plain
from kinfed.core import load_plugin


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


def as_codec(value: Any) -> Any:
    """Also one word with the first option: qsgd:4."""
    if isinstance(value, str) and ":" in value:
        from kinfed.updates import first_option

        name, _, option = value.partition(":")
        return {"name": name, first_option(name): toml_value(option)}
    return value


def plugin_files(value: Any) -> tuple[Path, ...]:
    """Absolute paths, so that a run can be resumed from anywhere. The files are run: names they add can be used."""
    files = [value] if isinstance(value, str | Path) else value
    if not isinstance(files, list | tuple):
        raise ValueError(f"plugins must be a list of Python files; got {value!r}")
    paths = tuple(Path(file).expanduser().absolute() for file in files)
    for path in paths:
        load_plugin(path)
    return paths


def toml_value(text: str) -> Any:
    """A TOML value where the text is one (0.5, true, [1, 2]), otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
