"""Reproducing tables and figures: what a recipe is, how it is run, judged and shown.

A recipe (recipes) is one file that says: these runs, these tables with the published numbers, these claims. Everything
else is here, the same for all:

    recipe          what a recipe is made of; recipe_file reads one from TOML
    part_records    what was measured of a part, and whether the recipe still asks for just that
    measure         runs its parts and collects their measurements, resumably
    recipe_pool     many recipes, each in a process with one core
    judge           claims against paired differences over seeds
    result_tables   tables for the console and as Markdown, CSV, LaTeX
    recipe_figures  figures of what was measured
    recipe_page     the page of a reproduction with its figures; markdown_page, without
    publishing      a folder of pages: benchmark_records are what it keeps, benchmark_index is how it begins
    recipes         one file per table or figure of a paper
    studies         what single recipes measure beyond the figures of a run
    data            the data set wakeword
    bench           `kinfed bench`: rounds beside a plain loop and the limits of a machine
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinfed_papers.recipe import (
        Claim,
        Question,
        Recipe,
        ResultColumn,
        Results,
        ResultTable,
        RunPart,
        Study,
        Untestable,
        difference,
        parse_published,
    )

__all__ = [
    "Claim",
    "Question",
    "Recipe",
    "ResultColumn",
    "ResultTable",
    "Results",
    "RunPart",
    "Study",
    "Untestable",
    "difference",
    "parse_published",
]


def __getattr__(name: str) -> Any:
    # Names are fetched on first use, so that `kinfed list recipes` does not wait for what recipes are made of.
    if name not in __all__:
        raise AttributeError(f"module 'kinfed_papers' has no attribute {name!r}")
    return getattr(importlib.import_module("kinfed_papers.recipe"), name)
