"""One file per table or figure of a paper; the file's name is the recipe's (selffl_mnist.py is selffl-mnist).

A recipe says what is run at each scale, which numbers the paper has, and which claims are to be checked:

    smoke   under 60 seconds on two cores, on data that is always there: does everything work?
    small   under 15 minutes on two cores, on the real data
    paper   the published settings

See kinfed.reproduce for what a recipe is made of. A new one is a file with a RECIPE in it and its name in RECIPES; what
several recipes of a paper share is in common_*.py."""

from __future__ import annotations

import importlib

from kinfed.errors import unknown_name
from kinfed.reproduce.recipe import Recipe

RECIPES: tuple[str, ...] = (
    "selffl-ablation",
    "selffl-algorithms",
    "selffl-cifar10",
    "selffl-femnist",
    "selffl-mnist",
    "selffl-sent140",
    "selffl-steps",
    "selffl-synthetic",
    "selffl-users",
    "selffl-wakeword",
    "fedfomo-exploration",
    "fedfomo-foreign",
    "fedfomo-latent",
    "fedfomo-pathological",
    "fedfomo-privacy",
    "fedfomo-validation",
    "fedfomo-weights",
    "cgpfl-cifar10",
    "cgpfl-contexts",
    "cgpfl-heur",
    "cgpfl-table1",
    "adapters-text",
    "fedbn-features",
)


def load_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    recipe: Recipe = importlib.import_module(f"kinfed.reproduce.recipes.{name.replace('-', '_')}").RECIPE
    return recipe


def summaries() -> dict[str, str]:
    """Every recipe in one line."""
    recipes = map(load_recipe, RECIPES)
    return {recipe.name: f"{recipe.title} ({recipe.paper.name}: {recipe.reproduces})" for recipe in recipes}
