"""`kinfed study` and `kinfed table`."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from kinfed.cli.parameters import Plugins
from kinfed.cli.terminal import StopRequest, console, say

Form = Literal["text", "markdown", "latex", "csv", "html"]
SUFFIXES: dict[str, Form] = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "html"}


def study(
    file: Annotated[Path, Argument(help="TOML file of the study.")],
    out: Annotated[Path | None, Option("--out", "-o", help="Folder of the study (default: studies/<name>).")] = None,
    plugin: Plugins = None,
) -> None:
    """Run federations x models x a swept setting with all methods and seeds, and show them as one table.

    The file holds settings of `kinfed run` for all cells, tables `federations` and `models` with a name and settings of
    their own, `sweep` with a setting and its values, and `tuning` with the trials of every method. Repeat the command
    to go on where it stopped, or after adding a method, a seed, a value or a federation to the file.
    """
    from kinfed.api import total_rounds
    from kinfed.arena import study as run_study
    from kinfed.cli.display import display
    from kinfed.config import RunConfig
    from kinfed.report import write_page
    from kinfed.runs import Interrupted, Observer

    def watch(config: RunConfig) -> AbstractContextManager[Observer]:
        return display(console, total_rounds(config), config.metric)

    folder = out or Path("studies") / file.stem
    with StopRequest(console) as stop:
        try:
            result = run_study(file, folder, should_stop=stop, begin=say, watch=watch)
        except (Interrupted, KeyboardInterrupt):
            again = f"kinfed study {shlex.quote(str(file))} --out {shlex.quote(str(folder))}"
            say(f"stopped; what is done is saved. To continue: {again}")
            raise typer.Exit(130) from None
    shown = result.table()
    console.print(shown.table)
    for note in shown.notes:
        say(note)
    write_page(folder / "study.html", shown.html())
    say(f"results  {folder}")
    say(f"page     {folder / 'study.html'}")
    say(f"tables   kinfed table {shlex.quote(str(folder))} --form latex")


def table(
    folder: Annotated[Path, Argument(help="Folder of a study, finished or not.")],
    form: Annotated[
        Form | None, Option(help="text, markdown, latex, csv or html (default: by --out, or text).")
    ] = None,
    out: Annotated[Path | None, Option("--out", "-o", help="File to write instead of showing the table.")] = None,
    metric: Annotated[str | None, Option(help="Metric to show instead of the headline one.")] = None,
    costs: Annotated[bool, Option("--costs", help="Add columns of bytes and seconds.")] = False,
) -> None:
    """Show the table of a study, for the terminal, a paper or a page."""
    from kinfed.arena import open_study
    from kinfed.report import write_page

    form = form or ("text" if out is None else SUFFIXES.get(out.suffix, "text"))
    shown = open_study(folder).table(metric, costs=costs)
    text = getattr(shown, form)()
    if out is not None:
        write_page(out, text)
        say(f"wrote    {out}")
    elif form == "text":
        console.print(shown.table)
        for note in shown.notes:
            say(note)
    else:
        typer.echo(text)
