"""Configurations from files, settings by name and texts such as "ditto.lam=0.5", and as a commented TOML file.

In that file every setting has its text and its default. Settings that differ from the defaults are in force; the others
are comments, so that a file says at a glance what was chosen.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from kinfed.config.algorithm_choice import METHOD, parse_algorithms
from kinfed.config.config import RunConfig
from kinfed.config.config_fields import CHOICES, Named, as_codec, as_named, toml_value
from kinfed.config.setting_groups import DEFAULT_ALGORITHMS, DEFAULTS, HEADINGS
from kinfed.core import convert, declared, option_types, requirement
from kinfed.errors import ConfigError, unknown_name


def make_config(
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    sets: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Make a configuration from a TOML file, overridden by `settings`, then by `sets`, texts "owner.option=value".
    `defaults` apply where none of them says anything.

    The owner is `dataset`, `partition`, `model`, `robust`, `compress`, `mode`, `clock`, the label of an algorithm, or
    absent for a setting of the run.

    Example:

        >>> kinfed.make_config(settings={"rounds": 5, "algorithms": "ditto"}, sets=("ditto.lam=0.1", "lr=0.01"))
        RunConfig(algorithms=['ditto'], rounds=5, lr=0.01)
    """
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


_WIDTH = 100
_HEAD = """\
# A run of kinfed: edit this file, then
#
#     kinfed run {file}
#
# Lines without "#" are in force. "# name = value" shows a default; remove the "#" to change it. Options on the command
# line override this file. `kinfed list` shows methods, data sets, partitions and models, `kinfed list NAME` the
# options of one, which are given so:
#
#     partition = {{ name = "dirichlet", alpha = 0.1 }}
#     algorithms = {{ local = {{}}, weak = {{ method = "ditto", lam = 0.1 }}, far = {{ method = "ditto", lam = 1 }} }}
"""


def config_toml(config: RunConfig, file: str = "run.toml") -> str:
    """The text of a file that gives this configuration."""
    values, defaults = config.dump(), RunConfig().dump()
    parts = [_HEAD.format(file=file)]
    for heading, names in HEADINGS.items():
        parts.append(f"\n\n# ---- {heading} ".ljust(_WIDTH, "-") + "\n")
        for name in names:
            unchanged = values[name] in (None, defaults[name])  # TOML has no null: what is none is left out
            parts.append(_entry(name, _text(name), values[name], unchanged))
    return "".join(parts)


def _text(name: str) -> str:
    """Text of a setting, with its range where the text leaves that open."""
    declaration = declared(RunConfig)[name]
    kinds = requirement(option_types(RunConfig)[name], declaration.bounds)
    is_plain = kinds in ("true or false", "a text", "a path") or "table" in kinds
    return declaration.text if is_plain else f"{declaration.text} ({kinds})"


def _entry(name: str, text: str, value: Any, is_default: bool) -> str:
    comment = "".join(f"\n# {line}" for line in wrap(text, _WIDTH - 2))
    written = "" if value is None else toml_text(_short(name, value))
    return f"{comment}\n{'# ' if is_default else ''}{name} = {written}".rstrip() + "\n"


def _short(name: str, value: Any) -> Any:
    """Things without options by their names alone."""
    if name == "algorithms":
        plain = all(choice.keys() == {METHOD} for choice in value.values())
        labels = (label if choice[METHOD] == label else f"{label}={choice[METHOD]}" for label, choice in value.items())
        return ",".join(labels) if plain else value
    return value["name"] if name in CHOICES and value is not None and value.keys() == {"name"} else value


def toml_text(value: Any) -> str:
    """A value of TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        text = json.dumps(str(value), ensure_ascii=False)
        return text.replace("\x7f", "\\u007F")  # the one that JSON does not escape
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, nan
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {toml_text(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return repr(value)


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else toml_text(text)
