"""Kinds of settings: things chosen by name, numbers, files; and where a setting stands in the help."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

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


Choice = Annotated[
    Named, BeforeValidator(as_named), PlainSerializer(lambda v: {"name": v.name, **v.options}, return_type=dict)
]
CHOICES = ("dataset", "partition", "model", "robust", "compress", "mode", "clock")  # settings that are a Named


def as_codec(value: Any) -> Any:
    """Also one word with the first option: qsgd:4."""
    if isinstance(value, str) and ":" in value:
        from kinfed.updates import first_option

        name, _, option = value.partition(":")
        return {"name": name, first_option(name): toml_value(option)}
    return value


def as_numbers(value: Any) -> Any:
    """Numbers separated by commas, as the command line gives them."""
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def plugin_files(value: Any) -> tuple[Path, ...]:
    """Absolute paths, so that a run can be resumed from anywhere. The files are run: names they add can be used."""
    files = [value] if isinstance(value, str | Path) else value
    if not isinstance(files, list | tuple):
        raise ValueError(f"plugins must be a list of Python files; got {value!r}")
    paths = tuple(Path(file).expanduser().absolute() for file in files)
    for path in paths:
        load_plugin(path)
    return paths


def setting(
    default: Any, panel: str, text: str, *, registry: str = "", option: str = "", variable: str = "", **limits: Any
) -> Any:
    """A field of `RunConfig`. For the command line: the panel of the help it stands in, the registry whose names can
    be completed, the name of the option where it is not that of the field, an environment variable."""
    extra: dict[str, Any] = {"panel": panel, "registry": registry, "option": option, "variable": variable}
    make = {"default_factory": default} if callable(default) else {"default": default}
    return Field(description=text, json_schema_extra=extra, **make, **limits)


DATA, MODEL, METHODS, ROUNDS = "Data", "Model", "Methods", "Rounds"
TRAINING, PRIVACY, ROBUSTNESS, COMMUNICATION = "Local training", "Privacy", "Robustness", "Communication"
EVALUATION, PLACE = "Evaluation and files", "Where it runs"
PANELS = (
    DATA, MODEL, METHODS, ROUNDS, TRAINING, COMMUNICATION, PRIVACY, ROBUSTNESS, EVALUATION, PLACE,
)  # in the order of the help  # fmt: skip


def toml_value(text: str) -> Any:
    """A TOML value where the text is one (0.5, true, [1, 2]), otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
