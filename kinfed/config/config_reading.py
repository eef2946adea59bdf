"""A configuration from a file, settings by name and texts such as "ditto.lam=0.5"."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kinfed.config.algorithm_choice import parse_algorithms
from kinfed.config.config import DEFAULT_ALGORITHMS, RunConfig
from kinfed.config.config_fields import CHOICES, Named, as_codec, as_named, plugin_files, toml_value
from kinfed.config.requirements import requirement
from kinfed.errors import ConfigError, unknown_name


def make_config(
    file: Path | None = None, settings: Mapping[str, Any] | None = None, sets: tuple[str, ...] = ()
) -> RunConfig:
    """Configuration from a TOML file, overridden by `settings`, then by "owner.option=value" texts.

    The owner is `dataset`, `partition`, `model`, `robust`, `compress`, `mode`, `clock`, the label of an algorithm, or
    absent for a setting of the run."""
    values: dict[str, Any] = read_toml(file) if file is not None else {}
    values |= {name: value for name, value in (settings or {}).items() if value is not None}
    if unknown := values.keys() - RunConfig.model_fields.keys():
        raise unknown_name("setting", min(unknown), RunConfig.model_fields)
    try:
        plugin_files(values.get("plugins", ()))
        if "algorithms" in values:
            values["algorithms"] = parse_algorithms(values["algorithms"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for text in sets:
        _apply(values, text)
    try:
        config = RunConfig(**values)
    except ValidationError as error:
        raise ConfigError(_first_error(error)) from error
    config.check()
    return config


def read_toml(file: Path) -> dict[str, Any]:
    """The settings in a file, as they are written."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _apply(values: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes owner.option=value, such as ditto.lam=0.5; got {text!r}")
    value = toml_value(raw.strip())
    owner, dot, option = key.strip().rpartition(".")
    if not dot:
        if option not in RunConfig.model_fields:
            raise unknown_name("setting", option, RunConfig.model_fields)
        values[option] = value
        return
    if owner in CHOICES:
        current = values.get(owner) or RunConfig.model_fields[owner].default
        current = as_codec(current) if owner == "compress" else current
        if current is None:
            raise ConfigError(f"--set {key} needs --{owner} to say which one it is for")
        choice = current if isinstance(current, Named) else Named(**as_named(current))
        values[owner] = {"name": choice.name, **choice.options, option: value}
        return
    methods = values.setdefault("algorithms", parse_algorithms(DEFAULT_ALGORITHMS))
    if owner not in methods:
        raise unknown_name("owner in --set", owner, [*CHOICES, *methods])
    methods[owner] = {**methods[owner], option: value}


def _first_error(error: ValidationError) -> str:
    """One sentence about the first setting that is wrong."""
    first = error.errors()[0]
    if first["type"] == "value_error":  # of a validator of this module, which says all
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])
    value = first["input"]
    return f"{name} must be {requirement(RunConfig.model_fields[name])}; got {value!r}"
