"""`kinfed vault`: what a node keeps, and what has left it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import CommandGroup
from kinfed.cli.terminal import console, plain_table, say

vault = CommandGroup(help="On a node: the personal states and models it keeps.", no_args_is_help=True)

VaultFolder = Annotated[Path, Option("--vault", envvar="KINFED_VAULT", help="The vault's folder, as in node.toml.")]
DEFAULT = Path("~/.kinfed/vault")


@vault.command("list")
def list_(folder: VaultFolder = DEFAULT) -> None:
    """List what this node keeps: runs, clients, rounds, sizes."""
    from kinfed.deploy import Vault

    entries = Vault(folder).entries()
    if not entries:
        say(f"the vault {folder.expanduser()} is empty")
        return
    table = plain_table()
    for column in ("run", "client", "method", "round", "version", "bytes", "saved", "model"):
        table.add_column(column, no_wrap=True)
    for entry in entries:
        numbers = (str(entry.round), str(entry.version), str(entry.nbytes))
        table.add_row(entry.run, entry.client, entry.method, *numbers, entry.saved, "yes" if entry.has_model else "no")
    console.print(table)


@vault.command()
def budget(folder: VaultFolder = DEFAULT) -> None:
    """Show what has left each client over all runs and servers, the privacy spent, and the owner's limit."""
    from kinfed.deploy import Vault
    from kinfed.privacy import epsilon_over_noises

    pages = {log.client: log.read() for log in Vault(folder).privacy_logs()}
    if any(page.released for page in pages.values()):
        table = plain_table("client", "run", "left without a price", "times")
        for client, page in pages.items():
            for run, by_rule in page.released.items():
                for rule, times in by_rule.items():
                    table.add_row(client, run, rule, str(times))
        console.print(table)
    pages = {client: page for client, page in pages.items() if page.answers}
    if not pages:
        say(f"the vault {folder.expanduser()} has not answered any private request yet")
        return
    table = plain_table("client", "run", "answers", "epsilon", "of evaluations", "as a whole")
    for client, page in pages.items():
        for run in dict.fromkeys(answer.run for answer in page.answers):
            spent = [epsilon_over_noises(one, page.rules["delta"]) for one in page.accounts(run).values()]
            answers = sum(answer.run == run for answer in page.answers)
            table.add_row(client, run, str(answers), *(f"{epsilon:g}" for epsilon in spent))
    console.print(table)
    for client, page in pages.items():
        rules = page.rules
        total, judged, whole = (epsilon_over_noises(one, rules["delta"]) for one in page.accounts().values())
        limit, whole_limit = (
            "no limit set" if rules.get(name) is None else f"of {rules[name]:g}" for name in ("epsilon", "user_epsilon")
        )
        say(
            f"{client}: epsilon {total:g} {limit} (delta {rules['delta']:g}), {judged:g} {limit} for rows that models "
            f"are evaluated on, {whole:g} {whole_limit} for the client as a whole (user level); "
            f"noise {rules['min_noise']:g} at least; "
            f"methods {', '.join(rules['methods']) or 'any'}; evaluates on {', '.join(rules['evaluate'])}; "
            f"exact sums {'allowed' if rules['sums'] else 'refused under privacy'}"
            + ("; strict" if rules["strict"] else "")
        )


@vault.command()
def export(
    out: Annotated[Path, Argument(help="File to write (.safetensors).")],
    folder: VaultFolder = DEFAULT,
    run: Annotated[str | None, Option(help="Run (default: the newest).")] = None,
    client: Annotated[str | None, Option(help="Client (if the vault has several).")] = None,
) -> None:
    """Copy a personal model out of the vault, as safetensors that plain PyTorch loads."""
    from kinfed.core import storage
    from kinfed.deploy import Vault

    path = Vault(folder).model_path(run, client)
    with storage.storage_errors("write", out):
        shutil.copyfile(path, out)
    say(f"wrote    {out}")


@vault.command()
def clear(
    run: Annotated[str, Argument(help="Run whose states and models are removed.")],
    folder: VaultFolder = DEFAULT,
    client: Annotated[str | None, Option(help="Only this client.")] = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a run from the vault. This cannot be undone: personal models exist nowhere else."""
    from kinfed.deploy import Vault

    if not yes:
        typer.confirm(f"remove all personal states and models of run {run}?", abort=True)
    say(f"removed  {', '.join(Vault(folder).clear(run, client))}")
