"""`kinfed deploy certs`, `key`, `enrol`, `members` and `revoke`: who is believed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from kinfed.cli.terminal import console, plain_table, say
from kinfed.errors import ConfigError


@contextlib.contextmanager
def _needs_cryptography() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"keys and certificates need the extra: pip install 'kinfed[node]' ({error})") from None


def certs(
    folder: Annotated[Path, Argument(help="Folder for certificates, and for the public keys of sites.")],
    host: Annotated[list[str], Option(help="Name or address under which nodes reach the server (repeatable).")],
    node: Annotated[list[str] | None, Option(help="For a trial on one machine: a node to make a key for.")] = None,
) -> None:
    """Make a CA and the server's certificate; an existing CA stays. Sites make their own keys: kinfed deploy key."""
    with _needs_cryptography():
        from kinfed.deploy import make_certificates

    for path in make_certificates(folder, host, node or []):
        say(f"wrote    {path}")
    say("ca.key and server.key stay here; sites get ca.crt")
    if node:
        say(
            f"TRIAL    the private keys of {', '.join(node)} were made here: readers of this folder can take part "
            "as them, and secure sums protect no site from its owner. Real sites make their own: kinfed deploy key"
        )


Members = Annotated[Path, Argument(help="Folder of public keys: the operator's certs, or a node's peers.")]
Client = Annotated[str, Argument(help="Name of the client.")]


def key(
    client: Client,
    folder: Annotated[Path, Option(help="Folder of this site.")] = Path(),
    renew: Annotated[bool, Option("--renew", help="Make the next key, signed by the present one.")] = False,
    switch: Annotated[bool, Option("--switch", help="Use the next key from now on.")] = False,
    show: Annotated[bool, Option("--show", help="Only show the fingerprint of the present key.")] = False,
) -> None:
    """Make a site's key, at the site. The private half never leaves it; the public one goes to operator and peers."""
    if renew + switch + show > 1:
        raise ConfigError("take one of --renew, --switch and --show")
    with _needs_cryptography():
        from kinfed.deploy import members

    if show:
        say(f"{client}: {members.show_key(folder, client)}")
        return
    if switch:
        members.switch_key(folder, client)
        say(f"{folder / client} is the new key; start the node again")
        return
    fingerprint = (members.renew_key if renew else members.make_key)(folder, client)
    name = f"{client}.next" if renew else client
    say(f"SECRET   {folder / name} stays here (mode 600): the operator does not need it")
    say(f"send     {folder / name}.pub to the operator and to the other sites")
    say(f"compare  {fingerprint} with what they see, by telephone")
    if renew:
        say(f"when all have enrolled it: kinfed deploy key {client} --switch")


def enrol(
    folder: Members,
    file: Annotated[Path, Argument(help="The .pub that a site has sent.")],
    days: Annotated[int | None, Option(help="Days for which it is valid (default 730).", min=1)] = None,
    replace: Annotated[bool, Option("--replace", help="Accept it even if the former key did not sign it.")] = False,
) -> None:
    """Take a site's public key into the folder of those that are believed."""
    with _needs_cryptography():
        from kinfed.deploy import members

    member = members.enrol(folder, file, days or members.KEY_DAYS, replace=replace)
    say(f"enrolled {member.client} until {member.until}")
    say(f"compare  {member.fingerprint} with what the site sees (kinfed deploy key NAME --show), by telephone")
    say(f"at the server: flwr supernode register {folder / member.client}.pub <superlink>; a former key: unregister it")


def members_(folder: Members) -> None:
    """List the sites whose keys are believed, with fingerprints and the day on which they expire."""
    with _needs_cryptography():
        from kinfed.deploy import members

    table = plain_table("client", "fingerprint", "until")
    known = members.read_members(folder)
    for member in known:
        table.add_row(member.client, member.fingerprint, "-" if member.until is None else str(member.until))
    console.print(table)
    for member in known:
        if member.warning:
            say(member.warning, style="red")


def revoke(folder: Members, client: Client) -> None:
    """Stop believing a site's key: it leaves the folder, and cannot be enrolled again."""
    with _needs_cryptography():
        from kinfed.deploy import members

    member = members.revoke(folder, client)
    say(f"revoked  {client}, {member.fingerprint}; runs that start or resume from now on do not know it")
    say("at the server: flwr supernode unregister (flwr supernode list shows its number), and start the run again")
    say("other sites have their own folders: tell them to revoke it in their peers")
