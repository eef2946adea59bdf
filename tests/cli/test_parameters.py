"""The options of the command line are the settings of a run: all of them, with their texts, completed and checked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from command_line import kinfed
from typer.main import get_command

from kinfed.algorithms import ALGORITHMS
from kinfed.cli.app import app
from kinfed.cli.parameters import SettingsCommand, TypedSettings
from kinfed.config.config import RunConfig
from kinfed.config.setting_groups import DEFAULTS, HEADINGS
from kinfed.core.options import declared

GROUP = get_command(app)
assert isinstance(GROUP, click.Group)
QUICK = ["--clients", "4", "--model", "mlr", "--rounds", "1", "--seeds", "0"]

PLUGIN = """
import kinfed
from kinfed.algorithms.fedavg import FedAvg

@kinfed.register("algorithm", "{name}", summary="FedAvg of a [/bold] plugin")
class Plugged(FedAvg):
    pass
"""


def command(name: str) -> SettingsCommand:
    assert isinstance(GROUP, click.Group)
    found = GROUP.commands[name]
    assert isinstance(found, SettingsCommand)
    return found


def options(name: str) -> dict[str, click.Parameter]:
    one = command(name)
    return {str(param.name): param for param in one.get_params(click.Context(one))}


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """A file that registers the algorithm `plugged`, which is forgotten after the test."""
    file = tmp_path / "plug.py"
    file.write_text(PLUGIN.format(name="plugged"))
    yield file
    ALGORITHMS.unregister("plugged")


def test_every_setting_is_an_option_of_run_with_its_text() -> None:
    params = options("run")
    for name, declaration in declared(RunConfig).items():
        param = params[name]
        assert isinstance(param, click.Option)
        assert declaration.text, f"{name} has no text"
        assert param.help is not None
        assert param.help.replace("\\[", "[").startswith(declaration.text)
        assert param.default is None, f"--{name} would override a file by its default"
        assert getattr(param, "rich_help_panel", None) in HEADINGS
    assert {"--momentum", "--weight-decay", "--lr-decay", "--lr-floor", "--augment", "--pretrain", "--no-save-models",
            "--backend", "--plugin"} <= {o for p in params.values() for o in (*p.opts, *p.secondary_opts)}  # fmt: skip


@pytest.mark.parametrize("name", ["describe", "tune"])
def test_other_commands_take_theirs_from_the_same_declarations(name: str) -> None:
    params, of_run = options(name), options("run")
    settings = set(params) & set(DEFAULTS)
    assert {"dataset", "clients", "plugins", "data"} <= settings
    for setting in settings:
        assert params[setting].opts == of_run[setting].opts
    assert not any(setting.startswith("dp_") for setting in settings)


def typed(*arguments: str) -> TypedSettings:
    """What `kinfed run ARGUMENTS` hands to the function behind it."""
    seen: list[TypedSettings] = []
    probe = typer.Typer(add_completion=False)

    @probe.command(cls=SettingsCommand.taking())
    def run(context: typer.Context) -> None:
        seen.append(context.obj)

    probe(list(arguments), standalone_mode=False)
    return seen[0]


def test_what_is_typed_is_what_the_configuration_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINFED_DATA", raising=False)
    assert typed() == TypedSettings()
    config = typed(
        "--momentum", "0.9", "--seeds", "3,4", "--no-save-models", "--foreign-targets", "--validation", "0.25",
        "--largest-norm", "inf", "--set", "ditto.lam=0.5", "--set", "rounds=3", "--algorithms", "local,ditto",
        "--backend", "rows",
    ).make_config()  # fmt: skip
    assert (config.momentum, config.seeds, config.save_models, config.foreign_targets) == (0.9, (3, 4), False, True)
    assert (config.validation, config.largest_norm, config.rounds) == (0.25, float("inf"), 3)
    assert config.algorithms["ditto"] == {"method": "ditto", "lam": 0.5}
    assert config.backend == "rows"


def test_where_and_how_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINFED_DATA", "somewhere")
    assert typed().values == {"data": "somewhere"}
    assert not typed("--workers", "1").change_results
    assert typed("--lr", "1").change_results
    assert typed("--set", "lr=1").change_results
    assert typed("file.toml").change_results


@pytest.mark.parametrize(
    ("option", "incomplete", "words"),
    [
        ("algorithms", "di", ["ditto"]),
        ("algorithms", "local,weak=dit", ["local,weak=ditto"]),
        ("algorithms", "all,-mocha_", ["all,-mocha_deep"]),
        ("algorithms", "al", ["all"]),
        ("dataset", "digi", ["digits"]),
        ("partition", "dirich", ["dirichlet"]),
        ("model", "ml", ["mlr", "mlp"]),
        ("robust", "kr", ["krum"]),
        ("pool", "", ["local", "ray"]),
        ("validation", "", ["auto"]),
        ("rounds", "", []),
    ],
)
def test_names_and_choices_are_completed(option: str, incomplete: str, words: list[str]) -> None:
    context = click.Context(command("run"))
    param = options("run")[option]
    assert [item.value for item in param.shell_complete(context, incomplete)] == words


def test_names_of_a_plugin_are_completed(plugin: Path) -> None:
    context = click.Context(command("run"))
    context.params = {"plugins": (str(plugin),)}
    items = options("run")["algorithms"].shell_complete(context, "plug")
    assert [item.value for item in items] == ["plugged"]


def test_every_argument_and_option_has_a_text() -> None:
    def walk(one: click.Command, path: str) -> Iterator[tuple[str, click.Parameter]]:
        for param in one.get_params(click.Context(one)):
            yield f"{path} {param.name}", param
        for name, inner in one.commands.items() if isinstance(one, click.Group) else ():
            yield from walk(inner, f"{path} {name}")

    for name, param in walk(GROUP, "kinfed"):
        assert getattr(param, "help", None), f"{name} has no help"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["tune", "--help"],
        ["fit", "--help"],
        ["adopt", "--help"],
        ["--version"],
        ["list", "algorithms"],
    ],
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['kinfed', *{arguments}]\n"
        "from kinfed.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'sklearn', 'scipy', 'plotly', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    done = kinfed("--version", cwd=Path.cwd())
    assert (done.returncode, done.stdout.split()[0]) == (0, "kinfed")


def test_a_plugin_is_listed_run_resumed_and_reported(plugin: Path, tmp_path: Path) -> None:
    listing = kinfed("list", "methods", "--plugin", plugin, cwd=tmp_path)
    assert "FedAvg of a [/bold] plugin" in listing.stdout
    done = kinfed(
        "run", *QUICK, "--algorithms", "local,mine=plugged", "--plugin", "plug.py", "--out", "r", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    assert json.loads((tmp_path / "r/config.json").read_text())["config"]["plugins"] == [str(plugin)]
    again = kinfed("run", "--out", tmp_path / "r", "--resume", cwd=tmp_path.parent)
    assert again.returncode == 0, again.stderr


def test_a_run_with_a_plugin_is_resumed_in_another_process(plugin: Path, tmp_path: Path) -> None:
    arguments = ["run", *QUICK, "--algorithms", "plugged", "--plugin", plugin, "--no-report", "--out", "r"]
    assert kinfed(*arguments, cwd=tmp_path).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "kinfed", "run", "--out", "r", "--resume", "--no-report", "--plugin", "plug.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_infinity_from_the_command_line_is_resumed(tmp_path: Path) -> None:
    infinite = ["--algorithms", "selffl", "--set", "selffl.r_max=inf"]
    assert kinfed("run", *QUICK, *infinite, "--no-report", "--out", "r", cwd=tmp_path).returncode == 0
    again = kinfed("run", "--out", "r", "--resume", "--no-report", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path: Path) -> None:
    rows = "\n".join(f"{'[/bold]' if i % 2 else '[red]'},{i},{i % 3}" for i in range(60))
    (tmp_path / "[").mkdir()
    (tmp_path / "[/x].csv").write_text(f"who,x,y\n{rows}\n")
    table = ["--dataset", "[/x].csv", "--client-column", "who", "--label-column", "y"]
    described = kinfed("describe", *table, cwd=tmp_path)
    assert described.returncode == 0, described.stderr
    assert "[/bold]" in described.stdout
    done = kinfed("run", *table, *QUICK[2:], "--algorithms", "local", "--out", "[/r]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[/r]" in done.stdout
