"""A configuration from a file, settings by name and texts such as "ditto.lam=0.5"."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfed.config.algorithm_choice import parse_algorithms
from kinfed.config.config import RunConfig
from kinfed.config.config_fields import CHOICES, Named, as_codec, as_named, toml_value
from kinfed.config.setting_groups import DEFAULT_ALGORITHMS, DEFAULTS
from kinfed.core import convert
from kinfed.errors import ConfigError, unknown_name


def make_config(
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    sets: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Configuration from a TOML file, overridden by `settings`, then by "owner.option=value" texts. `defaults` apply
    where none of them says anything.

    The owner is `dataset`, `partition`, `model`, `robust`, `compress`, `mode`, `clock`, the label of an algorithm, or
    absent for a setting of the run."""
    values: dict[str, Any] = {**(defaults or {}), **(read_toml(file) if file is not None else {})}
    values |= {name: value for name, value in (settings or {}).items() if value is not None}
    for name in ("plugins", "algorithms") if sets else ():  # which may be the owners of options
        if name in values:
            values[name] = convert(RunConfig, name, values[name])
    for text in sets:
        _apply(values, text)
    config = RunConfig(**values)
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
        if option not in DEFAULTS:
            raise unknown_name("setting", option, DEFAULTS)
        values[option] = value
        return
    if owner in CHOICES:
        current = values.get(owner) or DEFAULTS[owner]
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
