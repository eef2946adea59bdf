"""One file per table or figure of a paper; the file's name is the recipe's (selffl_mnist.py is selffl-mnist).

A recipe says what is run at each scale, which numbers the paper has, and which claims are to be checked:

    smoke   under 60 seconds on two cores, on data that is always there: does everything work?
    small   under 15 minutes on two cores, on the real data
    paper   the published settings

See kinfed.reproduce for what a recipe is made of; a new file with a RECIPE in it is all that a new one needs."""

from __future__ import annotations

import importlib
import pkgutil

from kinfed.errors import unknown_name
from kinfed.reproduce.recipe import Recipe

_PAPERS = ("selffl", "fedfomo", "cgpfl")


def _rank(name: str) -> tuple[int, str]:
    return next((i for i, paper in enumerate(_PAPERS) if name.startswith(paper)), len(_PAPERS)), name


RECIPES: tuple[str, ...] = tuple(
    sorted(
        (module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if module.name != "cli"), key=_rank
    )
)


def load_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    recipe: Recipe = importlib.import_module(f"kinfed.reproduce.recipes.{name.replace('-', '_')}").RECIPE
    return recipe


def summaries() -> dict[str, str]:
    """Every recipe in one line."""
    found = map(load_recipe, RECIPES)
    return {recipe.name: f"{recipe.title} ({recipe.paper.name}: {recipe.shows})" for recipe in found}
