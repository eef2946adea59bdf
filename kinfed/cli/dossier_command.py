"""`kinfed dossier`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer
from typer import Argument, Option
from typer.core import TyperGroup

from kinfed.cli.parameters import CommandGroup
from kinfed.cli.terminal import say

Vaults = Annotated[
    list[Path] | None, Option("--vault", help="Vault of a node whose ledger is read, too; may be given several times.")
]
PAGE = "dossier.html"
WRITE = "write"


class FolderOrVerify(TyperGroup):
    """A folder in place of a command's name is written about."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = [WRITE, *args]
        return super().parse_args(ctx, args)


dossier = CommandGroup(
    cls=FolderOrVerify, no_args_is_help=True, subcommand_metavar="FOLDER | verify DOCUMENT",
    help="Write a document for an ethics board or a data-protection officer: what left a site, how it was protected.",
)  # fmt: skip


@dossier.command(WRITE)
def write(
    folder: Annotated[Path, Argument(help="Folder of a finished run, fit or deployment.")],
    by: Annotated[str | None, Option(help="Column of the table whose groups are compared: sex, age, ...")] = None,
    vault: Vaults = None,
    out: Annotated[Path | None, Option("--out", "-o", help=f"Page to write (default: {PAGE} in the folder).")] = None,
) -> None:
    """Write the dossier of a folder: one HTML page that needs nothing else. The word write may be left out."""
    from kinfed.dossier import collect_facts, write_dossier

    path = write_dossier(collect_facts(folder, by, vault or ()), out or folder / PAGE)
    say(f"wrote    {path}")
    say(f"check it kinfed dossier verify {path}" + ("" if out is None else f" --folder {folder}"))


@dossier.command()
def verify(
    document: Annotated[Path, Argument(help="The dossier.")],
    folder: Annotated[Path | None, Option(help="Folder that it describes (default: the one it lies in).")] = None,
    vault: Vaults = None,
) -> None:
    """Compute every fact and every sentence of a dossier again; exit status 1 if one differs."""
    from kinfed.dossier import verify_dossier

    outcome = verify_dossier(document, folder or document.absolute().parent, vault or ())
    for sentence in outcome.differences:
        say(sentence)
    if not outcome.holds:
        say(f"{document} does not say what the records say")
        raise typer.Exit(1)
    say(f"verified {outcome.facts} facts and {outcome.sentences} pieces of text")
