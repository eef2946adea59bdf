"""Commands on folders of runs: runs, board."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kinfed.cli.terminal import console, say
from kinfed.errors import ConfigError

Folder = Annotated[Path, typer.Argument(help="Folder with runs in it, at any depth.")]


def runs(
    folder: Folder = Path("runs"),
    dataset: Annotated[str, typer.Option(help="Only runs on this data set.")] = "",
    algorithm: Annotated[str, typer.Option(help="Only runs with this method.")] = "",
    state: Annotated[str, typer.Option(help="Only runs that are finished, running, stopped or damaged.")] = "",
    where: Annotated[
        list[str] | None, typer.Option(help="Only runs with this setting, e.g. rounds=40 or algorithms.ditto.lam=0.1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per run, with all its settings.")] = False,
) -> None:
    """List the runs in a folder, newest first."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    from kinfed.records import find_runs, matching

    pairs = [text.partition("=") for text in where or ()]
    if wrong := [name + equals for name, equals, value in pairs if not equals or not value]:
        raise ConfigError(f"--where takes setting=value, such as rounds=40; got {wrong[0]!r}")
    wanted = {name.strip(): value.strip() for name, _, value in pairs}
    every = find_runs(folder)
    chosen = matching(every, dataset=dataset, algorithm=algorithm, state=state, where=wanted)
    if as_json:
        for run in chosen:
            about = {"path": str(run.path), "state": run.state, "done": run.done, "planned": run.planned}
            best = None if run.best is None else {"algorithm": run.best.algorithm, run.best.metric: run.best.mean}
            print(json.dumps({**about, "best": best, "settings": dict(run.settings)}))
        return
    if not chosen:
        say(f"none of the {len(every)} runs in {folder} match" if every else f"there are no runs in {folder}")
        return
    title = Text(f"{len(chosen)} of {len(every)} runs in {folder}")
    table = Table(title=title, title_justify="left", title_style="dim", box=SIMPLE)
    for heading in ("run", "state", "data", "methods", "seeds", "rounds", "best mean", "changed"):
        is_figure = heading in ("seeds", "rounds")
        # Names fold where there is no room: a cut one could not be copied.
        table.add_column(heading, overflow="fold", justify="right" if is_figure else "left")
    for run in chosen:
        table.add_row(
            Text(run.name),
            run.state if run.state in ("finished", "damaged") else f"{run.state}, {run.done} of {run.planned}",
            Text(run.dataset),
            Text(", ".join(run.algorithms[:6]) + (", ..." if len(run.algorithms) > 6 else "")),
            str(len(run.settings.get("seeds") or ())),
            str(run.settings.get("rounds", "")),
            Text("" if run.best is None else str(run.best)),
            datetime.fromtimestamp(run.changed).strftime("%m-%d %H:%M"),
        )
    console.print(table)


def board(
    folder: Folder = Path("runs"),
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)] = 8050,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a local, read-only page with all runs in a folder, and running ones live."""
    from kinfed.board import BoardServer

    with BoardServer(folder, port) as server:
        say(f"board    {server.url}  (this machine only, read-only; Ctrl-C ends it)")
        if show:
            typer.launch(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")
