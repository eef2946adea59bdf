"""The command `kinfed`. Mistakes get one clear sentence and exit status 2; an interrupted run says how to go on."""

import os
import sys
from typing import Annotated

import click
import typer
from typer import Option

from kinfed.cli import (
    arena_command,
    doctor_command,
    dossier_command,
    fit_command,
    inspect_command,
    models_command,
    predict_command,
    results_command,
    run_command,
    study_command,
    tune_command,
)
from kinfed.cli.deployment.audit_command import audit
from kinfed.cli.deployment.deploy_group import deploy
from kinfed.cli.deployment.vault_command import vault
from kinfed.cli.installed import OpenGroup, PapersCommand
from kinfed.cli.parameters import CommandGroup, SettingsCommand
from kinfed.errors import KinfedError, StorageError
from kinfed.pools import keep_freed_memory
from kinfed.version import __version__

app = CommandGroup(
    name="kinfed",
    cls=OpenGroup,
    help="Personalized federated learning: one good model per client, compared honestly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kinfed {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(cls=SettingsCommand.taking())(run_command.run)
app.command(cls=fit_command.FitCommand)(fit_command.fit)
app.command(cls=fit_command.ContributionsCommand)(fit_command.contributions)
app.command(cls=SettingsCommand.taking(reads_file=False))(run_command.init)
app.command(cls=SettingsCommand.taking(*tune_command.SETTINGS, texts=tune_command.TEXTS))(tune_command.tune)
app.command()(study_command.study)
app.command()(study_command.table)
app.command("list")(inspect_command.list_)
app.command(cls=SettingsCommand.taking(*inspect_command.DESCRIBE_SETTINGS))(inspect_command.describe)
for command in (
    results_command.report, models_command.export, models_command.adopt, results_command.gain,
    results_command.coefficients, models_command.forget,
    results_command.compare, results_command.runs, results_command.board, models_command.watch,
    models_command.insure,
):  # fmt: skip
    app.command(cls=models_command.AdoptCommand if command is models_command.adopt else None)(command)
for name in ("reproduce", "bench"):
    app.command(name, cls=PapersCommand, help="In the package kinfed-papers, which is not installed.")(lambda: None)
app.command()(predict_command.predict)
app.command()(doctor_command.doctor)
app.add_typer(dossier_command.dossier, name="dossier")
app.add_typer(deploy, name="deploy")
app.add_typer(vault, name="vault")
app.add_typer(audit, name="audit")
app.add_typer(arena_command.arena, name="arena")


def main() -> None:
    """Entry point of the command `kinfed`."""
    keep_freed_memory()
    try:
        status = app(standalone_mode=False)
    except KinfedError as error:
        _exit_with(str(error))
    except click.exceptions.NoArgsIsHelpError:
        sys.exit(2)  # the help is printed already
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "kinfed"
        _exit_with(f"{error.format_message().rstrip('.')}; see: {command} --help")
    except click.Abort:
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; say nothing more
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        _exit_with("there is not enough memory; take fewer clients, a smaller model, or --state disk for client states")
    except OSError as error:
        _exit_with(str(StorageError(f"{error.filename or 'disk'}: {error.strerror or error}")))
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _exit_with(sentence: str) -> None:
    """Print the sentence of an error; exit status 2."""
    from rich.console import Console

    Console(stderr=True, markup=False).print(f"error: {sentence}", style="red", highlight=False, soft_wrap=True)
    sys.exit(2)
