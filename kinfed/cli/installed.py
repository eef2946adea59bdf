"""Commands and lists of other packages, found by their entry points.

    [project.entry-points."kinfed.commands"]
    reproduce = "kinfed_papers.reproduce_command:reproduce"        a function as typer takes it, or a typer

    [project.entry-points."kinfed.lists"]
    recipes = "kinfed_papers.recipes:RECIPES"                      name -> one line, for `kinfed list`

Entry points are looked up when such a command is used or all commands are listed, so that no other one waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click
import typer
from typer.core import TyperGroup

from kinfed.cli.parameters import Command, CommandGroup
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS, LISTS = "kinfed.commands", "kinfed.lists"


def names(group: str) -> list[str]:
    """Names of the entry points of a group."""
    from importlib import metadata  # which takes its time

    return sorted({point.name for point in metadata.entry_points(group=group)})


def find(group: str, name: str) -> EntryPoint | None:
    """The entry point of a name, where an installed package has one."""
    from importlib import metadata

    return next(iter(metadata.entry_points(group=group, name=name)), None)


def load_list(name: str) -> Mapping[str, str]:
    """Lines of `kinfed list` for a kind of thing; an error that says what to install if none is installed."""
    point = find(LISTS, name)
    if point is None:
        _not_installed(f"the list of {name}")
    lines: Mapping[str, str] = point.load()
    return lines


def _not_installed(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} is in the package kinfed-papers, which is not installed: pip install kinfed-papers, or in a checkout "
        "of the repository pip install -e papers"
    )


class PapersCommand(Command):
    """The place of a command of kinfed-papers where that is not installed: whatever is typed, it says what to do."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # but for completing a word
            _not_installed(ctx.command_path)
        return []


class OpenGroup(TyperGroup):
    """Commands of kinfed in their order, then those of installed packages; these take the place of a PapersCommand,
    but of no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *(name for name in names(COMMANDS) if name not in self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None and not isinstance(own, PapersCommand):
            return own
        point = find(COMMANDS, cmd_name)
        return own if point is None else _as_click(cmd_name, point.load())


def _as_click(name: str, command: Any) -> click.Command:
    if isinstance(command, typer.Typer):
        group = typer.main.get_command(command)
        group.name = name
        return group
    alone = CommandGroup(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(command)
    return typer.main.get_command(alone)
