"""`kinfed deploy init`, `up`, `server`, `node` and `kit`: what starts a deployment."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import (
    settings_of,
)  # fmt: skip
from kinfed.cli.terminal import say
from kinfed.errors import PoolError

if TYPE_CHECKING:
    from kinfed.deploy import Site, Trial

SETTINGS = (
    "dataset", "partition", "client_column", "label_column", "group_column", "split_column", "time_column",
    "event_column", "task", "columns", "data",
    "validation", "model", "algorithms", "rounds", "participation", "seeds", "lr", "batch", "steps", "epochs",
    "optimizer", "momentum", "dp_noise", "dp_epsilon", "dp_clip", "dp_delta", "dp_budget", "sampling",
    "user_noise", "user_epsilon", "user_clip", "user_delta", "user_quantile", "secure_sum", "secure_range",
    "secure_least", "robust", "largest_norm", "eval_every",
)  # fmt: skip
TEXTS = {
    "algorithms": "The method (default ditto).",
    "rounds": "Communication rounds (default 5).",
    "seeds": "The seed (default 0).",
    "participation": "Share of clients active in a round, in (0, 1] (default 1).",
    "eval_every": "Rounds between evaluations (default 0: only the last).",
}


Health = Annotated[
    str,
    Option(
        envvar="KINFED_HEALTH",
        help="Answer /health and /metrics at this port of this machine, or at host:port (default: nowhere).",
    ),
]
Alert = Annotated[
    str,
    Option(envvar="KINFED_ALERT", help="Command or http(s) address to call when a trouble begins and when it ends."),
]
Log = Annotated[str, Option(envvar="KINFED_LOG_FORMAT", help="text, or json: one line of JSON for each message.")]
Cold = Annotated[bool, Option("--cold", help="Start a new Python process for every message.")]


def up(
    context: typer.Context,
    local: Annotated[int, Option(help="Number of nodes to start on this machine.", min=1)],
    out: Annotated[Path, Option("--out", "-o", help="New folder for the run, the sites and the logs.")] = Path("trial"),
    seconds: Annotated[float, Option(help="Time limit in seconds.", min=1)] = 1800.0,
    cold: Cold = False,
) -> None:
    """Try a whole deployment on this machine: certificates, a superlink with TLS, nodes with their data, the run."""
    from dataclasses import replace

    from kinfed.deploy import DEFAULTS, Trial
    from kinfed.report import build

    config = replace(settings_of(context).make_config(DEFAULTS), clients=local)
    trial = Trial.of_run(out, config, seconds, warm=not cold)
    sites = run_trial(trial)
    say(f"page     {build([trial.run_folder], trial.run_folder / 'report.html')}")
    _say_what_next(out, sites)


def run_trial(trial: Trial) -> list[Site]:
    """Run a trial, and say what is left where it stops."""
    from kinfed.deploy import RunStopped, stop_signals

    with stop_signals() as should_stop:
        try:
            return trial.run(say, should_stop)
        except RunStopped:
            say(f"stopped; no process is left. What was written is in {trial.folder}")
            raise typer.Exit(130) from None
        except PoolError as error:
            logs = trial.folder / "logs"
            raise PoolError(f"{error}\nall processes were ended; the logs are in {logs}") from None


def _say_what_next(out: Path, sites: list[Site]) -> None:
    vault = shlex.quote(str(sites[0].vault))
    say(f"log      {out / 'run' / 'log.txt'}; of every process: {out / 'logs'}")
    say("all processes were ended; keys and Flower's own files were removed")
    say("what next:")
    say(f"  kinfed deploy status {shlex.quote(str(out / 'run'))}          rounds, clients, bytes")
    say(f"  kinfed vault list --vault {vault}         the personal model of {sites[0].client}")
    say("  kinfed deploy init study                 on real machines: an app to edit, then")
    say("  kinfed deploy certs certs --host SERVER  the server's certificate, and for every site")
    say("  kinfed deploy key NAME                   there: its key; kinfed deploy enrol and kit, here")


def init(folder: Annotated[Path, Argument(help="Folder to make.")]) -> None:
    """Write an app folder: a configuration to edit, what Flower starts, and an example of a node's data."""
    from kinfed.deploy import make_app

    for path in make_app(folder):
        say(f"wrote    {path}")
    say(f"edit {folder / 'pyproject.toml'}, then: flwr run {folder} <superlink>")


def server(
    certs: Annotated[Path, Argument(help="Folder of kinfed deploy certs.")],
    host: Annotated[str, Option(help="Address for nodes: 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port for nodes.", min=1, max=65535)] = 8000,
    control_port: Annotated[int, Option(help="Port of this machine alone, for flwr.", min=1, max=65535)] = 8001,
    folder: Annotated[Path, Option(help="Folder for its database and Flower's own files.")] = Path("superlink"),
    cold: Annotated[bool, Option("--cold", help="Start a new Python process for every run.")] = False,
    health: Health = "",
    alert: Alert = "",
    log: Log = "text",
) -> None:
    """Run the server: Flower's superlink for this machine alone, and a door with TLS for nodes."""
    from kinfed.deploy import ServerPlace, Watching, run_server, stop_signals

    place, watching = ServerPlace(certs, host, port, control_port, folder), Watching(health, alert, log)
    with stop_signals() as should_stop:
        run_server(place, say, should_stop, warm=not cold, watching=watching)


def node(
    file: Annotated[Path, Argument(help="The node's file, node.toml of its kit.")],
    cold: Cold = False,
    home: Annotated[Path | None, Option(help="Folder of Flower's own files (default: flower/ beside FILE).")] = None,
    health: Health = "",
    alert: Alert = "",
    log: Log = "text",
) -> None:
    """Run a node: its supernode, started again whenever it ends, and one warm process that answers messages."""
    from kinfed.deploy import NodeFile, Watching, run_node, stop_signals

    start, watching = NodeFile.read(file), Watching(health, alert, log)
    with stop_signals() as should_stop:
        run_node(start, say, should_stop, warm=not cold, home=home, watching=watching)


def kit(
    client: Annotated[str, Option(help="Name of the client, as in kinfed deploy enrol.")],
    server: Annotated[str, Option(help="The superlink as the site reaches it: host:port.")],
    certs: Annotated[Path, Option(help="Folder of kinfed deploy certs.")] = Path("certs"),
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder or .zip file to write (default: kit-<client>).")
    ] = None,
    data: Annotated[str, Option(help="Path of the data at the site, which can change it later.")] = "data.csv",
    label: Annotated[str, Option(help="Column with the class, if the site uses another name.")] = "",
    peers: Annotated[bool, Option(help="Include the public keys of all clients, for secure aggregation.")] = True,
) -> None:
    """Write what a site needs beside its own key: CA certificate, configuration, peers, a command to start the node."""
    from kinfed.deploy import kit_files, write_kit

    files = kit_files(certs, client, server, {"data": data, "label": label}, peers)
    for path in write_kit(out or Path(f"kit-{client}"), files):
        say(f"wrote    {path}")
    say(f"nothing in it is secret; before the node starts: flwr supernode register {certs / client}.pub <superlink>")
