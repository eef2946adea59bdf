"""Commands on the folders of runs: report, coefficients, gain, compare, runs, board."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kinfed.cli.parameters import (
    Plugins,
    RunFolderArgument,
    TrustPlugins,
    trust_recorded,
)
from kinfed.cli.terminal import console, say
from kinfed.errors import ConfigError

Algorithm = Annotated[str | None, Option(help="Method (if the run has several).")]
Seed = Annotated[int | None, Option(help="Seed (default: the first).")]


def report(
    folders: Annotated[list[Path], Argument(help="Run folders to show on one page.")],
    out: Annotated[
        Path | None,
        Option(
            "--out", "-o", help="Page to write (default: report.html of the run; comparison.html here for several)."
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Build the HTML page of one or several runs."""
    from kinfed.report import build

    say(f"report   {build(folders, out)}")


def coefficients(
    folder: RunFolderArgument,
    algorithm: Algorithm = None,
    seed: Seed = None,
    profile: Annotated[
        bool, Option("--profile", help="Also give intervals by the profile likelihood (method lmm).")
    ] = False,
    out: Annotated[
        Path | None, Option("--out", "-o", help="File to write: .csv, .tex or .md (default: the terminal).")
    ] = None,
    plugin: Plugins = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Show coefficients with standard errors and intervals, and how sites differ (methods lmm, glmm and cox)."""
    from kinfed.core import storage
    from kinfed.newcomers import profiled
    from kinfed.records import load_run
    from kinfed.report import coefficient_table
    from kinfed.serving import coefficients as fits

    if profile:
        trust_recorded(folder, trust_plugins)
    run = load_run(folder.resolve(), folder.name)
    fit = fits.coefficients_of(run, algorithm, seed)
    if profile:
        fit = profiled(folder, fit.label, seed=fit.seed)
    table = coefficient_table(fit)
    if out is None:
        console.print(table)
    else:
        forms = {".csv": table.csv, ".tex": table.latex, ".md": table.markdown}
        if out.suffix not in forms:
            raise ConfigError(f"--out writes .csv, .tex or .md; got {out}")
        storage.write_atomically(out, forms[out.suffix]().encode())
    for sentence in fit.sentences():
        say(sentence)
    if out is not None:
        say(f"wrote    {out}")


def gain(
    source: Annotated[
        Path, Argument(help="Folder of a run or of kinfed fit, or a table: client, estimate, variance, n.")
    ],
    algorithm: Annotated[str | None, Option(help="Method of the run (default: the best federated one).")] = None,
    seed: Annotated[int | None, Option(help="Seed of the run (default: the first).")] = None,
    s0: Annotated[float | None, Option(help="Variance between clients, if known.")] = None,
    margin: Annotated[float, Option(help="Changes smaller than this share count as none.")] = 0.05,
    limit: Annotated[int, Option(help="Clients to show.")] = 40,
) -> None:
    """Show who gains from federating: every client's figure alone and with a method, measured in a run that has local.
    Of Self-FL runs and of tables, also each client's theoretical error."""
    from kinfed.analysis import gain
    from kinfed.tabular import FitResult, is_fit

    if is_fit(source):
        from kinfed.cli.fit_command import show_gains

        if algorithm is not None or seed is not None:
            raise ConfigError(
                f"{source} holds the choice of every site; one method is in a folder of {source / 'runs'}"
            )
        show_gains(FitResult.read(source), limit)
        return
    if source.is_dir():
        from kinfed.report import measured_gain

        reason = None
        try:
            table, sentence = measured_gain(source, algorithm, limit)
        except ConfigError as error:
            reason = error
        else:
            console.print(table)
            say(sentence)
        try:
            gains = gain.gain_from_run(source, algorithm, seed, s0=s0, margin=margin)
        except ConfigError:
            if reason is not None:
                raise reason from None
            return
    else:
        gains = gain.gain_from_table(source, s0=s0, margin=margin)
    console.print(gain.render(gains, limit))
    say(gain.summary(gains))


def compare(
    first: Annotated[Path, Argument(help="Folder of a run.")],
    second: Annotated[Path, Argument(help="Folder of another run.")],
    tolerance: Annotated[float, Option(help="Largest difference between numbers that counts as none.")] = 0.0,
) -> None:
    """Check whether two runs have the same results, apart from times; exit status 1 if they differ."""
    from kinfed.records import same_results

    differences = same_results(first, second, tolerance=tolerance)
    for line in differences:
        say(line)
    if differences:
        raise typer.Exit(1)
    say("same results")


Folder = Annotated[Path, Argument(help="Folder with runs in it, at any depth.")]


def runs(
    folder: Folder = Path("runs"),
    dataset: Annotated[str, Option(help="Only runs on this data set.")] = "",
    algorithm: Annotated[str, Option(help="Only runs with this method.")] = "",
    state: Annotated[str, Option(help="Only runs that are finished, running, stopped or damaged.")] = "",
    where: Annotated[
        list[str] | None, Option(help="Only runs with this setting, e.g. rounds=40 or algorithms.ditto.lam=0.1.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON line per run, with all its settings.")] = False,
) -> None:
    """List the runs, fits, studies and arena entries in a folder, newest first."""
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
            about = {
                "path": str(run.path),
                "kind": run.kind,
                "state": run.state,
                "done": run.done,
                "planned": run.planned,
            }
            best = None if run.best is None else {"algorithm": run.best.algorithm, run.best.metric: run.best.mean}
            print(json.dumps({**about, "best": best, "settings": dict(run.settings)}))
        return
    if not chosen:
        say(f"none of the {len(every)} runs in {folder} match" if every else f"there are no runs in {folder}")
        return
    title = Text(f"{len(chosen)} of {len(every)} runs in {folder}")
    table = Table(title=title, title_justify="left", title_style="dim", box=SIMPLE)
    for heading in ("run", "kind", "state", "data", "methods", "seeds", "rounds", "best mean", "changed"):
        is_figure = heading in ("seeds", "rounds")
        # Names fold on narrow terminals: a cut one could not be copied.
        table.add_column(heading, overflow="fold", justify="right" if is_figure else "left")
    for run in chosen:
        table.add_row(
            Text(run.name),
            run.kind,
            run.state if run.state in ("finished", "damaged") else f"{run.state}, {run.done} of {run.planned}",
            Text(run.dataset),
            Text(", ".join(run.algorithms[:6]) + (", ..." if len(run.algorithms) > 6 else "")),
            str(len(run.settings.get("seeds") or ()) or ""),
            str(run.settings.get("rounds", "")),
            Text("" if run.best is None else str(run.best)),
            datetime.fromtimestamp(run.changed).strftime("%m-%d %H:%M"),
        )
    console.print(table)


def board(
    folder: Folder = Path("runs"),
    port: Annotated[int, Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)] = 8050,
    show: Annotated[bool, Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a local, read-only page with all runs, fits, studies and entries in a folder, and running ones live."""
    from kinfed.board import BoardServer

    with BoardServer(folder, port) as server:
        say(f"board    {server.url}  (this machine only, read-only; Ctrl-C ends it)")
        if show:
            typer.launch(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")
