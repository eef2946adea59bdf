"""`kinfed reproduce`: one recipe or all of them, and the site of their pages."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kinfed.cli import console, integers, say
from kinfed.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from kinfed_papers.recipe import Recipe, Scale
    from kinfed_papers.recipe_pool import PoolState

REPRODUCTIONS = Path("reproduced")  # where they lie, if nothing else is said
SAY_EVERY = 30.0  # seconds between two lines about all recipes, where nothing ends meanwhile


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A recipe (kinfed list recipes).")] = None,
    every: Annotated[bool, typer.Option("--all", help="All recipes, several at a time (see --processes).")] = False,
    scale: Annotated[str, typer.Option(help="smoke (under a minute), small (minutes to an hour), or paper.")] = "small",
    only: Annotated[str | None, typer.Option(help="Only these parts of the recipe, e.g. mnist-mlr,mnist-dnn.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the recipe's, e.g. 0,1,2,3,4.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of all reproductions.")] = REPRODUCTIONS,
    publish: Annotated[
        Path | None,
        typer.Option(
            help="Also publish: join what was measured with the pages in this folder, and judge all of them by the "
            "recipes as they are. Without a recipe and --all, nothing is run."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", envvar="KINFED_DATA", help="Folder with data sets.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker threads of a recipe (default: all cores).")] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="With --all: recipes at a time, one core each (default: all cores)."),
    ] = None,
) -> None:
    """Run a table or figure of a paper again: our numbers beside theirs, a verdict per claim, a page with figures.

    If it is stopped, the same command continues where it left off. With --publish alone, nothing is run: the results
    in --out are joined with those already published."""
    from kinfed_papers import publishing
    from kinfed_papers.benchmark_index import write_site
    from kinfed_papers.recipe import SCALES
    from kinfed_papers.recipes import RECIPES, load_recipe

    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    if (name is not None and every) or (name is None and not every and publish is None):
        raise ConfigError(
            "name one recipe (kinfed list recipes), or give --all for every one of them, or --publish FOLDER alone"
        )
    if name is None and not every and (only is not None or seeds is not None):
        raise ConfigError("--publish alone runs nothing: leave out --only and --seeds, or name a recipe")
    if every and (only is not None or workers is not None):
        raise ConfigError("--all takes all parts of every recipe, one core each: leave out --only and --workers")
    if processes is not None and not every:
        raise ConfigError("--processes is for --all; one recipe has --workers")
    seed_numbers = None if seeds is None else integers("--seeds", seeds)
    settings: dict[str, Any] = {k: v for k, v in {"data": data, "workers": workers}.items() if v is not None}
    failures: dict[str, str] = {}
    recipes = {each: load_recipe(each) for each in RECIPES}
    if every:
        failures = _all_recipes(scale, seed_numbers, out, settings | {"workers": 1}, processes or os.cpu_count() or 1)
    elif name is not None:
        chosen = None if only is None else only.split(",")
        _one_recipe(load_recipe(name), chosen, scale, seed_numbers, out, settings)
    runs_something = every or name is not None
    if runs_something:
        say(f"index    {write_site(publishing.find_reproductions(out, recipes.values(), [scale]), out)}")
    if publish is not None:
        if not runs_something and not out.exists() and out != REPRODUCTIONS:
            raise ConfigError(f"--out {out} does not exist: nothing to publish there; to only judge again, omit --out")
        asked = recipes.values() if name is None else [recipes[name]]
        scales = [scale] if runs_something else publishing.PUBLISHED_SCALES
        measured = publishing.find_reproductions(out, asked, scales)
        say(f"Markdown {publishing.publish(measured, publish, recipes)}")
    for recipe_name, text in failures.items():
        say(f"{recipe_name} failed: {text}", style="red")
    if failures:
        raise typer.Exit(1)


def _one_recipe(
    whole: Recipe,
    only: list[str] | None,
    scale: Scale,
    seeds: tuple[int, ...] | None,
    out: Path,
    settings: dict[str, Any],
) -> None:
    """In this process, with tables and verdicts of these parts in the terminal; the page has all that was measured."""
    from kinfed.cli import StopRequest, display
    from kinfed.runs import Interrupted
    from kinfed_papers import measure, result_tables
    from kinfed_papers.judge import verdicts
    from kinfed_papers.publishing import reproduction_folder
    from kinfed_papers.recipe_page import write_reproduction

    recipe = whole if only is None else whole.limited_to(only, scale)
    folder = reproduction_folder(out, recipe.name, scale)
    say(f"{recipe.name}  {recipe.title} ({recipe.paper.name}: {recipe.reproduces})", style="bold")
    total = sum(measure.part_rounds(part, seeds, settings) for part in recipe.parts(scale))
    with StopRequest(console) as stop, display.display(console, total) as shown:
        try:
            done = measure.reproduce(
                recipe, scale, folder, seeds=seeds, settings=settings, observer=shown, should_stop=stop
            )
        except (Interrupted, KeyboardInterrupt):
            _stopped()
    if stand_in := recipe.stand_ins.get(scale):
        say(f"stand-in: {stand_in}", style="yellow")
    for table in result_tables.filled_tables(done):
        console.print(table.console_table())
    console.print(result_tables.console_verdicts(verdicts(recipe, done.results, done.scale, done.gaps)))
    say(f"page     {write_reproduction(measure.read_reproduction(whole, scale, folder))}")


def _all_recipes(
    scale: Scale, seeds: tuple[int, ...] | None, out: Path, settings: dict[str, Any], processes: int
) -> dict[str, str]:
    """Several at a time; what failed, and why."""
    from kinfed.cli import StopRequest
    from kinfed_papers.publishing import reproduction_folder
    from kinfed_papers.recipe_pool import RecipeJob, run_recipes
    from kinfed_papers.recipes import RECIPES

    jobs = [RecipeJob(name, scale, reproduction_folder(out, name, scale), seeds, settings) for name in RECIPES]
    say(f"{len(jobs)} recipes at scale {scale}, {processes} at a time", style="bold")
    with StopRequest(console) as stop:
        state = run_recipes(jobs, processes, AllRecipesLines(processes), stop)
    if stop():
        _stopped()
    return state.failures


def _stopped() -> None:
    say("stopped; what is done is saved. Run the same command again to continue.")
    raise typer.Exit(130) from None


class AllRecipesLines:
    """A line whenever a recipe ends, and now and then: how many are done, what runs, how long the rest may take."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._ended = -1  # the first line comes at once: what is done from before
        self._next = time.monotonic() + SAY_EVERY

    def __call__(self, state: PoolState) -> None:
        ended, now = len(state.done) + len(state.failures), time.monotonic()
        if ended == self._ended and now < self._next:
            return
        self._ended, self._next = ended, now + SAY_EVERY
        parts = [f"{ended} of {len(state.shares)} recipes done"]
        if state.failures:
            parts.append(f"{len(state.failures)} of them failed")
        if state.running:
            parts.append("running: " + ", ".join(f"{name} {state.shares[name]:.0%}" for name in state.running))
            left = state.seconds_left(self._processes)
            parts.append("time left not known yet" if left is None else f"about {duration(left)} left")
        say("; ".join(parts))


def duration(seconds: float) -> str:
    minutes = max(round(seconds / 60), 1)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
