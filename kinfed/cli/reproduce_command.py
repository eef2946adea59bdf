"""`kinfed reproduce`: one recipe or all of them, and the site of their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kinfed.cli.parameters import integers
from kinfed.cli.terminal import console, say
from kinfed.errors import ConfigError, unknown_name


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A recipe (kinfed list recipes).")] = None,
    every: Annotated[bool, typer.Option("--all", help="All recipes, one after the other.")] = False,
    scale: Annotated[str, typer.Option(help="smoke (under a minute), small (under 15), or paper.")] = "small",
    only: Annotated[str | None, typer.Option(help="Some parts of the recipe, e.g. mnist-mlr,mnist-dnn.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds instead of the recipe's, e.g. 0,1,2,3,4.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of all reproductions.")] = Path("reproduced"),
    publish: Annotated[
        Path | None, typer.Option(help="Also write the Markdown pages of all finished recipes to this folder.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", envvar="KINFED_DATA", help="Folder with data sets.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker threads (default: all cores).")] = None,
) -> None:
    """Run a table or figure of a paper again: our numbers beside theirs, a verdict per claim, a page with figures.

    Stopped, the same command goes on where it was."""
    from kinfed.cli.display import display
    from kinfed.cli.interrupt import StopRequest
    from kinfed.reproduce import measure, recipe_page, result_tables
    from kinfed.reproduce.judge import verdicts
    from kinfed.reproduce.recipe import SCALES, RunPart
    from kinfed.reproduce.recipes import RECIPES, load_recipe
    from kinfed.runs.method_run import Interrupted

    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    if (name is None) == (not every):
        raise ConfigError("name one recipe (kinfed list recipes), or give --all for every one of them")
    chosen_seeds = None if seeds is None else integers("--seeds", seeds)
    settings: dict[str, Any] = {k: v for k, v in {"data": data, "workers": workers}.items() if v is not None}
    for recipe in map(load_recipe, RECIPES if name is None else [name]):
        if only is not None:
            recipe = recipe.limited_to(only.split(","), scale)
        folder = out / f"{recipe.name}-{scale}"
        say(f"{recipe.name}  {recipe.title} ({recipe.paper.name}: {recipe.reproduces})", style="bold")
        configs = [
            measure.part_config(part, chosen_seeds, settings)
            for part in recipe.parts(scale)
            if isinstance(part, RunPart)
        ]
        total = sum(
            len(c.algorithms) * len(c.seeds) * c.rounds + len(c.seeds) * (c.warm_start + c.pretrain) for c in configs
        )
        with StopRequest(console) as stop, display(console, total) as shown:
            try:
                done = measure.reproduce(
                    recipe, scale, folder, seeds=chosen_seeds, settings=settings, observer=shown, should_stop=stop
                )
            except (Interrupted, KeyboardInterrupt):
                say("stopped; what is done is saved. The same command goes on.")
                raise typer.Exit(130) from None
        if stand_in := recipe.stand_ins.get(scale):
            say(f"stand-in: {stand_in}", style="yellow")
        for table in result_tables.filled_tables(done):
            console.print(table.console_table())
        console.print(result_tables.console_verdicts(verdicts(recipe, done.results, done.scale)))
        say(f"page     {recipe_page.write_reproduction(done)}")
    finished = [
        measure.reproduce(recipe, scale, out / f"{recipe.name}-{scale}", seeds=chosen_seeds, settings=settings)
        for recipe in map(load_recipe, RECIPES)
        if measure.is_done(recipe, scale, out / f"{recipe.name}-{scale}", chosen_seeds, settings)
    ]
    say(f"index    {recipe_page.write_site(finished, out)}")
    if publish is not None:
        say(f"Markdown {recipe_page.write_markdown(finished, publish)}")
