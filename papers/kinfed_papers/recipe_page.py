"""The page of a reproduction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kinfed.analysis import Comparison, single_run
from kinfed.records import load_run
from kinfed.report import Download, Panel, build, learning_curves, method_panels, render, write_page
from kinfed.report.drawing import Figure
from kinfed_papers.benchmark_index import PACKAGE
from kinfed_papers.judge import NOT_RUN, verdicts
from kinfed_papers.markdown_page import commands, markdown_page, provenance_text
from kinfed_papers.measure import Reproduction
from kinfed_papers.readings import choices_table, reading_grids
from kinfed_papers.recipe_figures import beside_published
from kinfed_papers.result_tables import FilledTable, claims_not_run, filled_tables, results_csv, verdict_table
from kinfed_papers.verdict import Verdict

PAGE = "index.html"

# Sections of the page, those that have something to show.
SECTIONS = {
    "readings": "In every reading of the paper",
    "claims": "Claims",
    "tables": "Ours beside theirs",
    "figures": "Figures",
    "rounds": "Over the rounds",
    "inside": "Inside the methods",
    "differs": "What differs from the paper, and why",
    "files": "Files",
}


def write_reproduction(reproduction: Reproduction) -> Path:
    """index.html with the figures, results.md, results.csv, results.tex, and the full report of every run."""
    out, tables = reproduction.out, filled_tables(reproduction)
    assert out is not None, "the page of a reproduction lies beside its runs"
    judged = verdicts(reproduction.recipe, reproduction.results, reproduction.scale, reproduction.gaps)
    for folder in reproduction.run_folders.values():
        build([folder])
    latex = "\n".join(table.text_table().latex() for table in tables)
    files = [
        Download("results.csv", "every number of the tables", results_csv(tables)),
        Download("results.tex", "the tables for LaTeX with booktabs", latex),
        Download("results.md", "this page as Markdown", markdown_page(reproduction, judged)),
    ]
    for file in files:
        write_page(out / file.name, file.text)
    return write_page(out / PAGE, _page(reproduction, judged, tables, files))


def _page(
    reproduction: Reproduction, judged: Sequence[Verdict], tables: Sequence[FilledTable], files: Sequence[Download]
) -> str:
    recipe, scale = reproduction.recipe, reproduction.scale
    comparisons, grids = _comparisons(reproduction), reading_grids(reproduction)
    contents: dict[str, Any] = {
        "readings": [(grid.sentence(), grid.table()) for grid in grids],
        "claims": judged,
        "tables": [(table.table, table.page_table(), beside_published(table)) for table in tables],
        "figures": recipe.figures(reproduction.results, comparisons),
        "rounds": _learning_curves(comparisons),
        "inside": _method_panels(reproduction, comparisons),
        "differs": recipe.notes,
        "files": files,
    }
    return render(
        "recipe.html",
        PACKAGE,
        title=f"{recipe.title} – kinfed",
        kicker=" · ".join(commands(reproduction)),
        heading=recipe.title,
        links=[(name, title) for name, title in SECTIONS.items() if contents[name]],
        footer=[provenance_text(reproduction)],
        figures=True,
        recipe=recipe,
        stand_in=recipe.stand_ins.get(scale),
        missing=reproduction.gaps_in_words,
        contents=contents,
        verdict_table=verdict_table(judged),
        choices=choices_table(grids),
        not_run=claims_not_run(judged),
        reason=NOT_RUN,
        runs=list(reproduction.run_folders),
    )


def _comparisons(reproduction: Reproduction) -> dict[str, Comparison]:
    """Compare the methods of every run by itself. Methods are numbered through, so that a legend switches those of its
    own run only."""
    comparisons: dict[str, Comparison] = {}
    first = 0
    for name, folder in reproduction.run_folders.items():
        comparisons[name] = single_run(load_run(folder, name), first)
        first += len(comparisons[name].methods)
    return comparisons


def _learning_curves(comparisons: dict[str, Comparison]) -> list[tuple[str, Figure]]:
    curves = ((name, learning_curves(comparison)) for name, comparison in comparisons.items())
    return [(name, figure) for name, figure in curves if figure is not None]


def _method_panels(reproduction: Reproduction, comparisons: dict[str, Comparison]) -> list[tuple[str, list[Panel]]]:
    """Panels of every method that the recipe shows from inside: its name and run, and its panels."""
    by_method = [
        (f"{method.label}, {part}" if len(comparisons) > 1 else method.label, method_panels(method))
        for part, algorithm in reproduction.recipe.method_figures
        if part in comparisons
        for method in comparisons[part].methods
        if method.algorithm == algorithm
    ]
    return [(heading, panels) for heading, panels in by_method if panels]
