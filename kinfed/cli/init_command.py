"""`kinfed init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kinfed.cli.parameters import settings_of
from kinfed.cli.terminal import say
from kinfed.errors import ConfigError


def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="TOML file to write; one that exists is left alone.")] = Path("run.toml"),
) -> None:
    """Write a TOML file to edit, with every setting explained; the options given here are set in it."""
    from kinfed.config import config_toml
    from kinfed.core import storage

    if file.exists():
        raise ConfigError(f"{file} exists already; name another file, or remove it first")
    text = config_toml(settings_of(context).make_config(), shlex.quote(str(file)))
    storage.write_atomically(file, text.encode())
    say(f"wrote    {file}")
    say(f"edit it, then: kinfed run {shlex.quote(str(file))}")
