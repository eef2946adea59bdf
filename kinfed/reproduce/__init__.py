"""Reproducing tables and figures: what a recipe is, how it is run, judged and shown.

A recipe (reproduce.recipes) is one file that says: these runs, these tables with the published numbers, these claims.
Everything else is here, the same for all:

    recipe     what a recipe is made of
    measure    runs its parts and collects what they found, resumably
    judge      claims against paired differences over seeds
    written    tables as text: console, Markdown, CSV, LaTeX
    page       the page with the figures; the index of a site of pages
"""

from __future__ import annotations

from kinfed.reproduce.recipe import Claim, Column, Found, Part, Recipe, Study, Table, Untestable, published

__all__ = ["Claim", "Column", "Found", "Part", "Recipe", "Study", "Table", "Untestable", "published"]
