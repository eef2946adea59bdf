"""Commands and lists of other packages: found by entry points, and missed with advice."""

from __future__ import annotations

from importlib import metadata

import pytest
import typer
from typer.testing import CliRunner

from kinfed.cli import inspect_command as listing
from kinfed.cli.app import app
from kinfed.cli.installed import COMMANDS, LISTS
from kinfed.errors import ConfigError

group = typer.Typer()


@group.command()
def one() -> None:
    """The first of two."""
    typer.echo("one of a group")


@group.command()
def two() -> None:
    """The second of two."""


def greet(name: str) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[metadata.EntryPoint]:
    """Entry points of installed packages; none at first."""
    points: list[metadata.EntryPoint] = []
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: metadata.EntryPoints(points).select(**wanted))
    return points


def call(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("words", [("reproduce", "selffl-mnist", "--scale", "smoke"), ("bench", "--help")])
def test_a_command_of_a_missing_package_says_what_to_install(
    words: tuple[str, ...], offered: list[metadata.EntryPoint]
) -> None:
    with pytest.raises(ConfigError, match=r"pip install kinfed-papers, .* pip install -e papers"):
        call(*words)


def test_lists_of_a_missing_package_are_left_out_until_they_are_asked_for(offered: list[metadata.EntryPoint]) -> None:
    assert "recipes" not in listing.kinds()
    with pytest.raises(ConfigError, match="pip install kinfed-papers"):
        listing.names("recipes")
    offered.append(metadata.EntryPoint("recipes", f"{__name__}:RECIPES", LISTS))
    assert "recipes" in listing.kinds()
    assert listing.names("recipes") == RECIPES
    assert listing.kind_of("mine") == "recipes"


RECIPES = {"mine": "a recipe of my own"}


def test_functions_and_groups_become_commands(offered: list[metadata.EntryPoint]) -> None:
    offered += [metadata.EntryPoint(name, f"{__name__}:{name}", COMMANDS) for name in ("greet", "group")]
    offered.append(metadata.EntryPoint("bench", f"{__name__}:greet", COMMANDS))
    assert call("greet", "Ada") == "hello Ada\n"
    assert call("bench", "Bo") == "hello Bo\n"  # in the place that is kept for it
    assert call("group", "one") == "one of a group\n"
    lines = [line.split()[1] for line in call("--help").splitlines() if line.startswith("│ ") and len(line.split()) > 2]
    assert lines.index("board") < lines.index("bench") < lines.index("predict") < lines.index("greet")


def test_no_package_replaces_a_command_of_kinfed(offered: list[metadata.EntryPoint]) -> None:
    offered.append(metadata.EntryPoint("doctor", f"{__name__}:greet", COMMANDS))
    assert "Greet somebody" not in call("doctor", "--help")
