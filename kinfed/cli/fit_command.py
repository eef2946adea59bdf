"""`kinfed fit`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from kinfed.cli.parameters import DeclaredCommand, OptionPanel
from kinfed.cli.terminal import StopRequest, console, new_folder, say
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.tabular import FitResult, coalitions

TABLE, SEARCH, MODELS, FILES = "Table", "Search", "What sites are handed", "Files and time"
TRAINING = "Training"
DEMO = "post_offices"
DEMO_SETTINGS = {"trials": 2, "rounds": 15, "algorithms": "ditto", "models": "mlr"}  # half a minute on a laptop
NOTHING_TO_GAIN = (
    "It is not always like this: on breast_cancer (kinfed fit breast_cancer), where sites alone are right about "
    "nearly every row, there is little to gain, and the page says that no gain is shown."
)
TEXTS = {
    "client_column": "Column that names the site of each row.",
    "label_column": "Column with the class, or the number to predict; several with commas between.",
    "task": "What it holds: classification, regression, counts, ... (default: by the column).",
    "columns": "Types of columns: age=number,zip=category,note=skip.",
    "weight_column": "Column with the weight of a row, in training and in results.",
    "split_column": "Column with train or test, if the split is given.",
    "person_column": "Column with the person (patient, case) of a row, all of whose rows stay in one part.",
    "order_column": "Column with the date or number of a row: what is tested, or chosen by, comes after what trains.",
    "encoding": "Encoding of CSV files, such as latin-1 (utf-8).",
    "data": "Folder with data sets.",
}


def panels() -> Iterator[OptionPanel]:
    from kinfed.config import RunConfig
    from kinfed.data.sources import TableOptions
    from kinfed.tabular import FitSettings

    columns = (
        "client_column", "label_column", "time_column", "event_column", "task", "columns", "ignore", "weight_column",
        "split_column", "person_column", "order_column", "encoding",
    )  # fmt: skip
    yield OptionPanel(TABLE, TableOptions, columns)
    yield OptionPanel(TABLE, FitSettings, ("test_fraction",))
    yield OptionPanel(TABLE, RunConfig, ("accept", "data"))
    names = ("algorithms", "models", "metric", "class_weights", "trials", "folds", "rounds", "references", "seed")
    yield OptionPanel(SEARCH, FitSettings, names)
    yield OptionPanel(MODELS, FitSettings, ("deploy", "alone_prior"))


def fit(
    context: typer.Context,
    tables: Annotated[
        list[str] | None,
        Argument(
            help="A .csv or .parquet file, several (one per site), or a data set with sites (kinfed list datasets).",
            metavar="[TABLE]...",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        Option(
            help="Time limit (processor time on a busy machine); tries are left out to meet it.", rich_help_panel=FILES
        ),
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder to write (default: fits/<time>).", rich_help_panel=FILES)
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the fit in --out.", rich_help_panel=FILES)] = False,
    demo: Annotated[bool, Option("--demo", help="Use a small built-in table; works offline.")] = False,
) -> None:
    """Train and explain a good model for every site of a table."""
    from kinfed.runs import Interrupted
    from kinfed.tabular import PAGE
    from kinfed.tabular import fit as fit_table

    options: dict[str, Any] = dict(context.obj)
    data, accept = options.pop("data", None), options.pop("accept", "")
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the fit to continue")
    table: str | list[str] | None = tables[0] if tables and len(tables) == 1 else tables or None
    if demo:
        if tables:
            raise ConfigError("--demo has a table of its own; leave out the other")
        table, options = DEMO, {**DEMO_SETTINGS, **options}
    elif resume and out is not None and table is None:
        table, before = _started_with(out)
        options = {**before, **options}
    if table is None:
        raise ConfigError("which table? Give a .csv or .parquet file with a column of sites, or try kinfed fit --demo")
    folder = out or new_folder("fits")
    with StopRequest(console) as stop, FitDisplay() as display:
        try:
            result = fit_table(
                table, out=folder, resume=resume, minutes=minutes, data=None if data is None else Path(data),
                observer=display, should_stop=stop, accept=accept, **options,
            )  # fmt: skip
        except (Interrupted, KeyboardInterrupt) as interruption:
            say(f"{str(interruption) or 'stopped'}. To continue: kinfed fit --out {shlex.quote(str(folder))} --resume")
            raise typer.Exit(130) from None
    show_gains(result, MOST_SENTENCES)
    if demo:
        say(NOTHING_TO_GAIN)
    say(f"models   {folder / 'models'}")
    say(f"page     {folder / PAGE}")


def contribution_panels() -> Iterator[OptionPanel]:
    from kinfed.tabular import FitSettings

    yield from (panel for panel in panels() if panel.heading == TABLE)
    yield OptionPanel(TRAINING, FitSettings, ("models", "metric", "class_weights", "rounds", "steps", "seed"))


def contributions(
    context: typer.Context,
    tables: Annotated[list[str], Argument(help="A table with a column of sites, several (one per site), or a name.")],
    algorithm: Annotated[str, Option(help="The method.", rich_help_panel=TRAINING)] = "ditto",
    sets: Annotated[
        list[str] | None, Option("--set", help="An option of the method: lam=0.5.", rich_help_panel=TRAINING)
    ] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Folder to write (default: fits/<time>).", rich_help_panel=FILES)
    ] = None,
) -> None:
    """Show which sites give and which gain: Shapley values of up to ten sites, for each pair, with intervals."""
    from kinfed.tabular import coalitions

    options: dict[str, Any] = dict(context.obj)
    data = options.pop("data", None)
    folder = out or new_folder("fits")
    result = coalitions.contributions(
        tables[0] if len(tables) == 1 else tables, algorithm=algorithm, out=folder,
        method_options=typed_options(sets or ()), data=None if data is None else Path(data), **options,
    )  # fmt: skip
    show_contributions(result)
    say(f"page     {folder / coalitions.PAGE}")


def show_contributions(result: coalitions.Contributions) -> None:
    """Print who gives what to whom."""
    from kinfed.tabular import coalitions

    table, sentences = coalitions.summary(result)
    console.print(table)
    for sentence in sentences:
        say(f"- {sentence}")


def typed_options(sets: Sequence[str]) -> dict[str, str]:
    """Options of a method, typed as name=value."""
    for text in sets:
        if "=" not in text:
            raise ConfigError(f"--set takes name=value, such as lam=0.5; got {text!r}")
    return {name: value for name, _, value in (text.partition("=") for text in sets)}


ContributionsCommand = DeclaredCommand.of(contribution_panels, texts=TEXTS, after="tables", default_form=" ({}).")
FitCommand = DeclaredCommand.of(panels, texts=TEXTS, after="tables", default_form=" ({}).")
MOST_SENTENCES = 12  # on a terminal; the page has all


def show_gains(result: FitResult, limit: int) -> None:
    """Print what every site has alone and takes: a table, the balance, and a sentence for each."""
    from kinfed.tabular import Wording, short_table

    words = Wording(result)
    console.print(short_table(result, limit))
    say(words.overall())
    if references := words.references():
        say(references)
    for site in result.sites[:limit]:
        say(f"- {words.sentence(site)}")
    if len(result.sites) > limit:
        say(f"and {len(result.sites) - limit} more sites on the page")


def _started_with(folder: Path) -> tuple[str | list[str], dict[str, Any]]:
    """The table and options of a folder, so that `kinfed fit --out DIR --resume` alone is enough."""
    from kinfed.records import JobFiles

    settings = dict(JobFiles(folder).settings)
    if "table" not in settings or "folds" not in settings:
        raise ConfigError(f"{folder} holds no fit; give the --out of kinfed fit")
    options = settings.pop("options")
    tables = settings.pop("table").split(", ")
    if len(tables) > 1:
        options.pop("client_column")
    chosen = {name: value for name, value in options.items() if value not in (None, "", [])}
    return tables[0] if len(tables) == 1 else tables, settings | chosen


class FitDisplay:
    """A bar over all steps on a terminal, a line now and then elsewhere."""

    EVERY = 10.0  # seconds between lines

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._bar = self._progress.add_task("")
        self._done, self._total, self._last = 0, 0, 0.0

    def __enter__(self) -> FitDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, steps: int) -> None:
        self._total, self._done = steps, 0
        self._progress.update(self._bar, total=steps, completed=0)

    def step(self, text: str) -> None:
        self._progress.update(self._bar, completed=self._done, description=text)
        self._done += 1
        if not console.is_terminal and time.monotonic() - self._last > self.EVERY:
            self._last = time.monotonic()
            say(f"step {self._done} of {self._total}: {text}")

    def note(self, text: str) -> None:
        say(f"note: {text}")
