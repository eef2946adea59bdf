"""`kinfed audit`: what left a node or a server, when, by which rule, to whom.

The data audit, which looks at data before a run, is another thing: it is in the run's audit.json and on its page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import CommandGroup
from kinfed.cli.terminal import console, plain_table, say
from kinfed.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from kinfed.deploy import audit_log

audit = CommandGroup(help="What left a node or a server: show its audit log, or verify it.", no_args_is_help=True)

Place = Annotated[Path, Argument(help="A node's vault, a deployment's folder on the server, or a .jsonl file.")]


@audit.command()
def show(
    place: Place,
    client: Annotated[str, Option(help="Only of this client.")] = "",
    run: Annotated[str, Option(help="Only of this run.")] = "",
    last: Annotated[int, Option(help="Number of the newest messages to show; 0: all.", min=0)] = 50,
    as_json: Annotated[bool, Option("--json", help="Print all of them as lines of JSON.")] = False,
) -> None:
    """Show what left and what was refused; --json also has the run, the server and the digest of the message."""
    entries = [
        entry
        for log in _logs(place)
        for entry in log.read()
        if client in ("", entry.get("client")) and run in ("", entry.get("run"))
    ]
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(entry, ensure_ascii=False))
        return
    entries.sort(key=lambda entry: str(entry.get("time")))
    table = plain_table("time", "client", "round", "kind", "bytes", "what, and by which rule")
    for entry in entries[-last:]:
        spent = [
            f"epsilon of {rows} {used:.4g} of {limit:g}" for rows, (used, limit) in entry.get("epsilon", {}).items()
        ]
        reason = [entry[key] for key in ("rule", "text") if entry.get(key)]
        event = ": ".join([str(entry.get("event", "")), *reason]) + "".join(f"; {one}" for one in spent)
        cells = [str(entry.get("time", ""))[5:19].replace("T", " ")]
        cells += [str(entry.get(key, "")) for key in ("client", "round", "kind", "bytes")]
        table.add_row(*cells, event)
    console.print(table)
    if last and len(entries) > last:
        say(f"the newest {last} of {len(entries)} messages; --last 0 shows all")


@audit.command()
def verify(
    place: Place,
    head: Annotated[str, Option(help="The head that verify printed earlier, NUMBER:DIGEST.")] = "",
    server: Annotated[
        Path | None, Option(help="The server's log of a run: whether all that came from a client has left it.")
    ] = None,
) -> None:
    """Verify that no line of an audit log was changed, moved or taken out; exit status 1 if one was."""

    from kinfed.deploy import audit_log

    known = None
    if head:
        number, colon, digest = head.partition(":")
        if not (colon and number.isdigit() and len(digest) == 64):
            raise ConfigError(f"--head is what verify printed, NUMBER:DIGEST; got {head!r}")
        known = audit_log.AuditHead(int(number), digest)
    logs, wrong = _logs(place), False
    if known is not None and len(logs) > 1:
        raise ConfigError(f"--head is of one log, and {place} has {len(logs)}; name the file")
    for log in logs:
        try:
            say(f"{log.path}: whole; head {log.verify(known)}")
            if server is not None:
                (theirs,) = _logs(server)
                theirs.verify()
                client = log.client
                missing = audit_log.unmatched(log, theirs, client)
                for entry in missing:
                    say(f"line {entry['n']} of {theirs.path} came from {client} and is not in its log", style="red")
                wrong = wrong or bool(missing)
                came = any(entry.get("client") == client for entry in theirs.read())
                held = f"all that came from {client} is in its log" if came else f"it lacks {client}"
                say(f"{theirs.path}: whole; " + ("" if missing else held))
        except StorageError as error:
            say(str(error), style="red")
            wrong = True
    if wrong:
        raise typer.Exit(1)
    say("keep the head elsewhere: with it, a log that was rewritten is noticed")


def _logs(place: Path) -> list[audit_log.AuditLog]:
    from kinfed.deploy import audit_log

    place = place.expanduser()
    if place.is_file():
        return [audit_log.AuditLog(place)]
    files = sorted((place / audit_log.AUDIT_FOLDER).glob("*.jsonl")) or sorted(place.glob(audit_log.TRANSFERS))
    if not files:
        wanted = f"{audit_log.AUDIT_FOLDER}/CLIENT.jsonl of a vault, or {audit_log.TRANSFERS} of a run"
        raise ConfigError(f"{place} has no audit log: no {wanted}")
    return [audit_log.AuditLog(path) for path in files]
