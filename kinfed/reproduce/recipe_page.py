"""The page of a reproduction, and what is published of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kinfed.report import build, figures, write_page
from kinfed.report.chart import Figure
from kinfed.report.comparison import Comparison, single_run
from kinfed.report.html import Download, render
from kinfed.report.panels import Panel, panels
from kinfed.reproduce.benchmark_index import PACKAGE, write_index, write_readme
from kinfed.reproduce.benchmark_records import BenchmarkRecord, page_name, published_records
from kinfed.reproduce.judge import NOT_RUN, verdicts
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.recipe_figures import beside_published
from kinfed.reproduce.result_tables import (
    FilledTable,
    claims_not_run,
    filled_tables,
    markdown_page,
    provenance_text,
    results_csv,
    verdict_table,
)
from kinfed.runs.reader import load_run

# Sections of the page, those that have something to show.
SECTIONS = {
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
    for folder in reproduction.run_folders.values():
        build([folder])
    latex = "\n".join(table.text_table().latex() for table in tables)
    files = [
        Download("results.csv", "every number of the tables", results_csv(tables)),
        Download("results.tex", "the tables for LaTeX with booktabs", latex),
        Download("results.md", "this page as Markdown", markdown_page(reproduction)),
    ]
    for file in files:
        write_page(out / file.name, file.text)
    return write_page(out / "index.html", _page(reproduction, tables, files))


def _page(reproduction: Reproduction, tables: Sequence[FilledTable], files: Sequence[Download]) -> str:
    recipe, scale = reproduction.recipe, reproduction.scale
    comparisons = _comparisons(reproduction)
    contents: dict[str, Any] = {
        "claims": verdicts(recipe, reproduction.results, scale),
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
        kicker=recipe.command(scale),
        heading=recipe.title,
        links=[(name, title) for name, title in SECTIONS.items() if contents[name]],
        footer=[provenance_text(reproduction)],
        figures=True,
        recipe=recipe,
        stand_in=recipe.stand_ins.get(scale),
        contents=contents,
        verdict_table=verdict_table(contents["claims"]),
        not_run=claims_not_run(contents["claims"]),
        reason=NOT_RUN,
        runs=list(reproduction.run_folders),
    )


def _comparisons(reproduction: Reproduction) -> dict[str, Comparison]:
    """Of every run by itself. Methods are numbered through, so that a legend switches those of its own run only."""
    comparisons: dict[str, Comparison] = {}
    first = 0
    for name, folder in reproduction.run_folders.items():
        comparisons[name] = single_run(load_run(folder, name), first)
        first += len(comparisons[name].methods)
    return comparisons


def _learning_curves(comparisons: dict[str, Comparison]) -> list[tuple[str, Figure]]:
    curves = ((name, figures.learning_curves(comparison)) for name, comparison in comparisons.items())
    return [(name, figure) for name, figure in curves if figure is not None]


def _method_panels(reproduction: Reproduction, comparisons: dict[str, Comparison]) -> list[tuple[str, list[Panel]]]:
    """Of every method that the recipe shows from inside: its name and run, and its panels."""
    by_method = [
        (f"{method.label}, {part}" if len(comparisons) > 1 else method.label, panels(method))
        for part, algorithm in reproduction.recipe.method_figures
        if part in comparisons
        for method in comparisons[part].methods
        if method.algorithm == algorithm
    ]
    return [(heading, method_panels) for heading, method_panels in by_method if method_panels]


def write_markdown(reproductions: Sequence[Reproduction], folder: Path, order: Iterable[str]) -> Path:
    """One Markdown page and one record per reproduction; README.md and claims.html, the index of all pages of the
    folder, those of recipes in this order first."""
    for one in reproductions:
        write_page(folder / f"{page_name(one.recipe.name, one.scale)}.md", markdown_page(one))
        BenchmarkRecord.of(one).write(folder)
    names = list(order)
    records = published_records(folder, names)
    missing = [name for name in names if all(record.recipe != name for record in records)]
    write_index(records, folder / "claims.html", "{page}.html", missing)
    return write_readme(records, folder, missing)
