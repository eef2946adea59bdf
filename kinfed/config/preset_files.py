"""Presets as they are stored: a folder with one TOML file per family of models, FAMILY.toml, and a table of options for
each method in it.

    [methods.ditto]
    lr = 0.1
    lam = 0.3

This module is imported for `kinfed list` and needs no pydantic.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinfed.core import Registry
from kinfed.errors import ConfigError

PRESETS: Registry[Path] = Registry("preset")
PRESETS.register(
    "tuned",
    Path(__file__).with_name("tuned"),
    summary="settings found on validation data, every method with the same budget of trials (docs/presets.md)",
)


def preset_methods(name: str, family: str | None) -> dict[str, dict[str, Any]]:
    """Options by method of a preset for a family of models; empty if it has none for the family."""
    folder = PRESETS[name].target
    return {} if family not in preset_families(name) else _read(folder / f"{family}.toml")


def preset_families(name: str) -> list[str]:
    return sorted(file.stem for file in PRESETS[name].target.glob("*.toml"))


def _read(file: Path) -> dict[str, dict[str, Any]]:
    try:
        methods = tomllib.loads(file.read_text("utf-8"))["methods"]
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        raise ConfigError(f"{file} is no file of a preset, TOML with tables [methods.NAME]: {error!r}") from error
    return {str(method): dict(options) for method, options in methods.items()}


def in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in options.items())
