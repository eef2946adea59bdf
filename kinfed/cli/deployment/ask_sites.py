"""`kinfed deploy describe`, `fit` and `evaluate`: what is asked of sites that keep their rows, on one machine for a
trial or of nodes that run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from kinfed.cli.deployment.start_deployment import Cold, run_trial
from kinfed.cli.fit_command import MOST_SENTENCES, show_gains
from kinfed.cli.fit_command import TEXTS as FIT_TEXTS
from kinfed.cli.parameters import OptionPanel
from kinfed.cli.terminal import say
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.deploy import Sites

TEXTS = {**FIT_TEXTS, "dp_budget": "Largest epsilon of a search under dp_noise: as many tries as cost no more."}
SEARCH_ROUNDS = 20  # by default: each is a message to every site
TRIAL, NODES = "On one machine", "Of nodes that run"
Tables = Annotated[
    list[str] | None, Argument(help="A .csv or .parquet file with a column of sites, or one file per site.")
]
At = Annotated[
    str, Option(help="Control port of their superlink (kinfed deploy server), 127.0.0.1:8001.", rich_help_panel=NODES)
]
Certs = Annotated[Path, Option(help="Folder of kinfed deploy certs.", rich_help_panel=NODES)]
Names = Annotated[str, Option("--sites", help="Names of the sites, with commas between.", rich_help_panel=NODES)]
Seconds = Annotated[float, Option(help="Time limit in seconds.", min=1)]
Out = Annotated[Path, Option("--out", "-o", help="Folder for results; of a trial also for sites and logs.")]


def table_panel(*more: str) -> OptionPanel:
    from kinfed.data.sources import TableOptions

    return OptionPanel("Table", TableOptions, ("client_column", "ignore", "columns", "encoding", *more))


def describe_panels() -> Iterator[OptionPanel]:
    yield table_panel()


def fit_panels() -> Iterator[OptionPanel]:
    from kinfed.config import RunConfig
    from kinfed.tabular import FitSettings

    yield table_panel("label_column", "task", "time_column", "event_column", "split_column")
    names = ("algorithms", "models", "metric", "trials", "folds", "rounds", "steps", "test_fraction", "seed")
    yield OptionPanel("Search", FitSettings, names)
    yield OptionPanel("Privacy", RunConfig, (
        "dp_noise", "dp_epsilon", "dp_budget", "dp_clip", "dp_delta", "secure_sum", "secure_range", "secure_least",
    ))  # fmt: skip


def evaluate_panels() -> Iterator[OptionPanel]:
    from kinfed.tabular import FitSettings

    yield table_panel("label_column", "split_column")
    yield OptionPanel("Test rows", FitSettings, ("test_fraction", "seed", "metric"))


def describe(
    context: typer.Context, tables: Tables = None, out: Out = Path("described"), at: At = "",
    certs: Certs = Path("certs"), sites: Names = "", seconds: Seconds = 3600.0, cold: Cold = False,
) -> None:  # fmt: skip
    """Say what the tables of sites are like before any model: rows, gaps, means, categories, units that differ.

    With tables a trial on this machine, a node for each site; with --at the nodes that run. Counts of few rows stay."""
    from kinfed.deploy import Trial, question_plan

    columns = dict(context.obj)
    if (nodes := _nodes(at, certs, sites, tables, seconds)) is not None:
        nodes.describe(out, **_described(columns))
    else:
        trial = Trial(out, question_plan(_some(tables), columns), seconds, warm=not cold)
        run_trial(trial)
        out = trial.run_folder
    say(f"page     {out / 'describe.html'}")


def fit(
    context: typer.Context, tables: Tables = None, out: Out = Path("trial"),
    resume: Annotated[bool, Option("--resume", help="Go on with a trial that was stopped.")] = False,
    certified: Annotated[bool, Option(help="Sites take a federated model only where test rows show a gain.")] = False,
    at: At = "", certs: Certs = Path("certs"), sites: Names = "",
    classes: Annotated[str, Option(help="Names of the classes; or --target.", rich_help_panel=NODES)] = "",
    target: Annotated[
        str, Option(help="number or counts in place of classes; of survival its record.", rich_help_panel=NODES)
    ] = "",
    seconds: Seconds = 3600.0, cold: Cold = False,
) -> None:  # fmt: skip
    """Search for the method of every site: all are tried where the rows are, and models stay there.

    With tables a trial on this machine, a node for each site, which shows its rows to no one; with --at the nodes that
    run. A page for each and for all."""
    from kinfed.deploy import Trial, fit_plan
    from kinfed.tabular import PAGE, FitResult, FitSettings

    columns = dict(context.obj)
    typed = {name: columns.pop(name) for name in list(columns) if name in FitSettings.__dataclass_fields__}
    private = {name: columns.pop(name) for name in list(columns) if name.startswith(("dp_", "secure_"))}
    deploy: Any = "certified" if certified else "chosen"
    search = FitSettings(**{"rounds": SEARCH_ROUNDS, **typed, "deploy": deploy})
    known = {"target": target} if target else {}
    if (nodes := _nodes(at, certs, sites, tables, seconds)) is not None:
        of_target = known | ({"classes": classes} if classes else {})
        show_gains(nodes.fit(search, out, **_described(columns), **of_target, **private), MOST_SENTENCES)
        say(f"page     {out / PAGE}, for all; every site has its model and a page of its own in its vault")
        return
    plan = fit_plan(_some(tables), columns, search, **known, **private)
    trial = Trial(out, plan, seconds, warm=not cold, resume=resume)
    parts = run_trial(trial)
    show_gains(FitResult.read(trial.run_folder), MOST_SENTENCES)
    say(f"page     {trial.run_folder / PAGE}, for all; it holds one sentence per site")
    for site in parts:
        page = next(iter(sorted(site.vault.rglob(PAGE))), site.vault)
        say(f"page     {page}, which stays at {site.client}, beside its model")


def evaluate(
    context: typer.Context,
    models: Annotated[list[str], Argument(help="Model files (.safetensors), or a folder of them.")],
    table: Annotated[
        list[str] | None, Option(help="For a trial: a file with a column of sites, or one per site (repeatable).")
    ] = None,
    out: Out = Path("evaluated"), at: At = "", certs: Certs = Path("certs"), sites: Names = "",
    seconds: Seconds = 3600.0, cold: Cold = False,
) -> None:  # fmt: skip
    """Judge any exported models at every site, on rows that stay there: whose model works where."""
    from kinfed.deploy import Trial, question_plan

    columns = dict(context.obj)
    rows = {name: columns.pop(name) for name in ("test_fraction", "seed", "metric") if name in columns}
    if (nodes := _nodes(at, certs, sites, table, seconds)) is not None:
        nodes.evaluate(models, out, **rows, **_described(columns))
    else:
        trial = Trial(out, question_plan(_some(table), columns, models, **rows), seconds, warm=not cold)
        run_trial(trial)
        out = trial.run_folder
    say(f"page     {out / 'evaluate.html'}")


def forget(
    site: Annotated[str, Argument(help="The site that leaves for good.")],
    app: Annotated[Path, Argument(help="App folder of the deployment (kinfed deploy init).")],
    at: At = "127.0.0.1:8001", certs: Certs = Path("certs"),
    out: Annotated[Path | None, Option("--out", "-o", help="Folder of the new run.", show_default="beside it")] = None,
    seconds: Seconds = 86_400.0,
) -> None:  # fmt: skip
    """Let the other sites learn again without one, exactly as if it had never been there, and write a record of it."""
    from kinfed.deploy import Sites

    record = Sites(at, certs, (), say, seconds=seconds).forget(site, app, out or "")
    former = record["before"]["run"]
    say(f"forgot   {site}: run {record['run']} of {', '.join(record['clients'])} stands in place of {former}")
    say(f"Run {former} is not undone: delete its folder here, and at every node: kinfed vault clear {former}")


def _nodes(at: str, certs: Path, sites: str, tables: list[str] | None, seconds: float) -> Sites | None:
    """The nodes that run, where their superlink is named."""
    if not at:
        return None
    from kinfed.deploy import Sites

    if tables:
        raise ConfigError("nodes that run have their own rows; leave out the tables, or --at")
    if not sites:
        raise ConfigError("name the sites to ask with --sites a,b,c")
    return Sites(at, certs, [name.strip() for name in sites.split(",")], say, seconds=seconds)


def _described(typed: dict[str, Any]) -> dict[str, Any]:
    names = ("label_column", "columns", "time_column", "event_column")
    return {name: typed[name] for name in names if typed.get(name)}


def _some(tables: list[str] | None) -> list[str]:
    if not tables:
        raise ConfigError("name a table, or the nodes that run (--at, --sites)")
    return tables
