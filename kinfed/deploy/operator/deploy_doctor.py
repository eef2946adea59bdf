"""A look at a node or a server before, or while, it runs: what is wrong, and what to do. Nothing is changed, and only a
request without content goes to the server.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from kinfed.deploy.node.node_data import audit_sentences
from kinfed.deploy.node.node_settings import NodeSettings, calls_function
from kinfed.deploy.node.vault import Vault
from kinfed.deploy.operations import checks
from kinfed.deploy.operations.checks import OK, WARNING, WRONG, Condition
from kinfed.deploy.operations.watched import WatchedServer
from kinfed.deploy.operator.services import HEARTBEAT, NodeFile, ServerPlace
from kinfed.errors import KinfedError

_RENEW_CA = "ask the operator for a new ca.crt"


def node_conditions(path: Path) -> list[Condition]:
    """Conditions of a node, by its file; also while the node runs."""
    try:
        file = NodeFile.read(path)
        clients = NodeSettings.parse_all(file.node)
    except KinfedError as error:
        return [Condition("settings", WRONG, str(error), f"mend {path}")]
    conditions = [Condition("settings", OK, f"{path}: {file.node['client']} at {file.server}")]
    door = checks.ask_door(file.server, file.ca)
    if door.trouble:
        conditions.append(Condition("reach", WRONG, door.trouble, door.advice))
    else:
        conditions += [Condition("reach", OK, f"{file.server} answers"), checks.clock(door.clock)]
    conditions += checks.versions(door.version)
    if file.ca is not None:
        conditions.append(checks.certificate(file.ca, _RENEW_CA))
    if file.key is not None:
        conditions.append(checks.private_key(file.key, file.key.name))
    for settings in clients:
        conditions += [checks.disk(Vault(settings.vault).folder), *_kept(settings), *_rows(settings)]
    return list(dict.fromkeys(conditions))


def server_conditions(place: ServerPlace) -> list[Condition]:
    """Conditions of a server; ports are looked at unless it runs."""
    try:
        place.check()
    except KinfedError as error:
        return [Condition("files", WRONG, str(error), "then look again")]
    renewal = f"kinfed deploy certs {place.certs} --host NAME, then start the server again"
    certificates = {place.certs / name: renewal for name in ("ca.crt", "server.crt")}
    home = place.folder / "flower" / HEARTBEAT
    watched = WatchedServer("server", home, place.folder, certificates, place.folder / "unfinished", place.certs)
    conditions = list(watched.conditions())
    if checks.read_service(home) is None or any(one.check == "service" and one.level == WRONG for one in conditions):
        conditions = [one for one in conditions if one.check not in ("service", "programs")]
        conditions.append(Condition("service", WARNING, "it does not run", f"kinfed deploy server {place.certs}"))
        conditions.append(checks.port_is_free(place.host, place.port, "nodes"))
        conditions.append(checks.port_is_free("127.0.0.1", place.control_port, "operator"))
    else:
        door = checks.ask_door(f"127.0.0.1:{place.port}", place.certs / "ca.crt")
        level = WRONG if door.trouble else OK
        conditions.append(Condition("reach", level, door.trouble or f"port {place.port} answers", door.advice))
    return conditions + checks.versions()


def _kept(settings: NodeSettings) -> list[Condition]:
    """Whether ledger and audit log are whole."""
    vault, client = Vault(settings.vault, settings.counter), settings.client
    if not vault.folder.exists():
        return [Condition("vault", OK, f"{vault.folder} is new: nothing of {client} has left yet")]
    try:
        head = vault.audit_log(client).verify()
        page = vault.privacy_log(settings.owner).read()
    except KinfedError as error:
        return [
            Condition("vault", WRONG, str(error), "restore the vault from its newest copy; until then nothing leaves")
        ]
    limit = (
        "no limit of epsilon" if math.isinf(settings.rules.epsilon) else f"epsilon {settings.rules.epsilon:g} at most"
    )
    text = f"{client}: {head.lines} messages, {len(page.answers)} at a price; {limit}"
    return [Condition("vault", OK, text)]


def _rows(settings: NodeSettings) -> list[Condition]:
    """Whether the rows can be read, and who says which of them are for what."""
    client, data = settings.client, settings.data
    if not calls_function(data) and not Path(data).is_file():
        return [Condition("rows", WRONG, f"{data} is no file", "check data in node.toml")]
    if (missing := _missing_columns(settings)) is not None:
        return [missing]
    conditions = []
    for sentence in audit_sentences(settings):
        wrong = sentence.startswith("not audited")
        advice = "check data, label and split in node.toml" if wrong else ""
        conditions.append(Condition("rows", WRONG if wrong else OK, f"{client}: {sentence}", advice))
    if not settings.label and data.endswith((".csv", ".tsv", ".csv.gz", ".parquet")):
        text = f"{client} names no label: a run may name any column, and learns whether its values fit"
        conditions.append(Condition("rows", WARNING, text, 'label = "COLUMN" in node.toml'))
    if settings.split:
        named = f"the column {settings.split} says which rows are for what"
    elif settings.drawn_roles is not None:
        named = f"{settings.drawn_roles[0]:.0%} of the rows are for the test, drawn here for good"
    else:
        named = "a run chooses which rows are for the test"
        advice = 'split = "COLUMN" or test_fraction = 0.25 in node.toml, if the owner shall choose'
        return [*conditions, Condition("roles", WARNING, f"{client}: {named}", advice)]
    return [*conditions, Condition("roles", OK, f"{client}: {named}")]


def _missing_columns(settings: NodeSettings) -> Condition | None:
    """A condition if node.toml names columns that the table has not."""
    if not settings.data.endswith((".csv", ".tsv", ".parquet")):
        return None
    try:
        if settings.data.endswith(".parquet"):
            import pyarrow.parquet

            there = list(pyarrow.parquet.read_schema(settings.data).names)
        else:
            with Path(settings.data).open(newline="", encoding="utf-8-sig", errors="replace") as file:
                there = next(csv.reader(file, delimiter="\t" if settings.data.endswith(".tsv") else ","), [])
    except OSError as error:
        advice = "give the node's user the right to read it"
        return Condition("rows", WRONG, f"{settings.data} cannot be read: {error.strerror}", advice)
    keys = ("label", "split", "person", "row_weight", "image", "text")
    lacking = [f'{key} = "{name}"' for key in keys if (name := getattr(settings, key)) and name not in there]
    if not lacking:
        return None
    columns = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "")
    text = f"{settings.data} has no such column: {', '.join(lacking)}; it has {columns}"
    return Condition("rows", WRONG, text, "name the columns as the table does, in node.toml")
