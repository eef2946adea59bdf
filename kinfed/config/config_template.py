"""A configuration as a commented TOML file: every setting with its text and its default, ready to be edited.

Settings that differ from the defaults are in force; the others are comments that show the default, so that a file says
at a glance what was chosen. `make_config` reads it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from kinfed.config.algorithm_choice import METHOD
from kinfed.config.config import RunConfig
from kinfed.config.config_fields import CHOICES
from kinfed.config.setting_groups import HEADINGS
from kinfed.core import declared, option_types, requirement

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
        return json.dumps(str(value), ensure_ascii=False).replace(
            "\x7f", "\\u007F"
        )  # the one that JSON does not escape
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, nan
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {toml_text(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return repr(value)


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else toml_text(text)
