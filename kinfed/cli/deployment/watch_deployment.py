"""`kinfed deploy status`, `doctor` and `messages`: how a deployment goes, what is wrong with it, what leaves a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import Plugins, TrustPlugins, trust_recorded
from kinfed.cli.terminal import console, plain_table, say
from kinfed.errors import ConfigError


def status(
    folder: Annotated[Path, Argument(help="The run's folder on the server: `out` of the app's settings.")],
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Show the state of a deployment: rounds, clients and when they were last seen, bytes, privacy."""
    from kinfed.deploy import status as deployed
    from kinfed.records import headline_text
    from kinfed.runs import read_config

    trust_recorded(folder, trust_plugins)
    current = deployed.read_status(folder)
    if current is None:
        raise ConfigError(f"{folder} holds no status.json; name the folder `out` of a deployment that has begun")
    progress = deployed.read_progress(folder)
    since, written = deployed.clock_of(current.since), deployed.clock_of(current.written)
    say(f"{current.method}: {current.doing} since {since}; as of {written}")
    if current.state not in deployed.ENDED and current.age > deployed.STALE_SECONDS:
        silence = f"the server's part has not written for {current.age:.0f} s"
        say(f"{silence}: it has probably died; see flwr list", style="red")
    if current.reason:
        say(f"reason   {current.reason}", style="red")
    config = read_config(folder)
    figure = f"; personal {headline_text(progress.personal, config.metric)}" if progress.personal else ""
    say(f"rounds   {progress.rounds} of {current.rounds}, {progress.seconds:.1f} s each{figure}")
    say(f"bytes    {progress.bytes_down:,} to clients, {progress.bytes_up:,} from clients")
    if config.privacy is not None:
        spent = "known at the first evaluation" if progress.epsilon is None else f"{progress.epsilon:.4g}"
        limit = "no budget set" if config.dp_budget is None else f"of {config.dp_budget:g}"
        say(f"epsilon  {spent} ({limit})")
    if config.user_privacy is not None:
        hidden = "known at the first evaluation" if progress.user_epsilon is None else f"{progress.user_epsilon:.4g}"
        against = "against the server, too" if config.user_at_nodes else "against anyone who sees the server's models"
        say(f"epsilon  {hidden} (user level: per client, {against})")
    table = plain_table("client", "connected", "last seen", "last answer", "awaited since", "last error")
    for name, client in current.clients.items():
        times = [deployed.clock_of(client[key]) for key in ("last_seen", "last_answer")]
        awaited = "-" if client["awaited_since"] is None else deployed.clock_of(client["awaited_since"])
        table.add_row(name, "yes" if client["connected"] else "no", *times, awaited, client["last_error"] or "-")
    console.print(table)
    for sentence in current.nodes:
        say(sentence)


def doctor(
    place: Annotated[Path, Argument(help="At a node its node.toml; at the server its folder of certificates.")],
    host: Annotated[str, Option(help="At the server: as kinfed deploy server.")] = "127.0.0.1",
    port: Annotated[int, Option(help="At the server: port for nodes.", min=1, max=65535)] = 8000,
    control_port: Annotated[int, Option(help="At the server: port for flwr.", min=1, max=65535)] = 8001,
    folder: Annotated[Path, Option(help="At the server: folder of its files.")] = Path("superlink"),
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for what is wrong at a node or at the server, and say what to do; exit status 1 if anything is wrong.

    Clock, disk, keys and certificates, reachability, versions, ledger and audit log, and the rows that node.toml names.
    """
    import dataclasses
    import json

    from kinfed.deploy import ServerPlace, deploy_doctor

    if place.is_dir():
        conditions = deploy_doctor.server_conditions(ServerPlace(place, host, port, control_port, folder))
    else:
        conditions = deploy_doctor.node_conditions(place)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in conditions], indent=1))
    else:
        styles = {"wrong": "red", "warning": "yellow"}
        for one in conditions:
            say(f"{one.level:8} {one.check}: {one.text}", style=styles.get(one.level))
            if one.advice:
                say(f"         do: {one.advice}")
    if any(one.level == "wrong" for one in conditions):
        raise typer.Exit(1)


def messages(
    method: Annotated[list[str] | None, Argument(help="Methods (default: all, those of plugins too).")] = None,
    plugin: Plugins = None,
) -> None:
    """What leaves a node in every round, by method: the fields of its updates; (some) only with some options."""
    from kinfed.algorithms import ALGORITHMS, make_algorithm
    from kinfed.data import LocalTraining
    from kinfed.deploy import not_for_nodes, sent_fields

    table = plain_table("method", "sends")
    for name in method or ALGORITHMS:
        algorithm = make_algorithm(name, LocalTraining(), {})
        fields = [field if always else f"({field})" for field, always in sent_fields(algorithm).items()]
        reason = not_for_nodes(algorithm)
        table.add_row(name, f"refused: {reason}" if reason else ", ".join(fields) or "nothing")
    console.print(table)
