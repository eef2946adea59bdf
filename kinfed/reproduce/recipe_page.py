"""The page of a reproduction, and the index of a site of such pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kinfed.report import build, figures, write_page
from kinfed.report.chart import Figure
from kinfed.report.comparison import Comparison, single_run
from kinfed.report.html import Download, render
from kinfed.report.panels import Panel, panels
from kinfed.report.tables import TableCell, TableColumn, TextTable
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

PACKAGE = "kinfed.reproduce"

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
        kicker=f"kinfed reproduce {recipe.name} --scale {scale}",
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


TALLY = ("Claims reproduced", "Not reproduced", "Not tested", "Our questions: yes", "No")


def tally(reproduction: Reproduction) -> tuple[int, ...]:
    """Verdicts on the paper's claims, then on our questions, in the order of TALLY."""
    judged = verdicts(reproduction.recipe, reproduction.results, reproduction.scale)
    claims = [verdict.status for verdict in judged if verdict.source == "paper"]
    questions = [verdict.status for verdict in judged if verdict.source == "kinfed"]
    yes, no = claims.count("reproduced"), claims.count("not reproduced")
    return yes, no, len(claims) - yes - no, questions.count("reproduced"), questions.count("not reproduced")


def write_site(reproductions: Sequence[Reproduction], out: Path) -> Path:
    """The index of several reproductions, each in a folder below `out`."""
    columns = [
        TableColumn("Recipe", "name"),
        TableColumn("What", "text"),
        TableColumn("In the paper", "text"),
        *map(TableColumn, TALLY),
        TableColumn("Scale", "text"),
    ]
    rows = [
        [
            TableCell(one.recipe.name, link=f"{one.out.name}/index.html"),
            one.recipe.title,
            f"{one.recipe.paper.name}: {one.recipe.reproduces}",
            *map(str, tally(one)),
            one.scale,
        ]
        for one in reproductions
    ]
    page = render(
        "site.html",
        PACKAGE,
        title="Benchmark – kinfed",
        kicker="kinfed reproduce",
        heading="Tables and figures of the papers, measured again",
        links=[],
        footer=sorted({one.provenance for one in reproductions}),
        figures=False,
        table=TextTable.of("Recipes", columns, rows),
    )
    return write_page(out / "index.html", page)


def write_markdown(reproductions: Sequence[Reproduction], folder: Path) -> Path:
    """One Markdown page per reproduction, and README.md that lists all pages of the folder's recipes."""
    for one in reproductions:
        write_page(folder / f"{one.recipe.name}.md", markdown_page(one))
    columns = [
        TableColumn("recipe", "name"),
        TableColumn("in the paper", "text"),
        *(TableColumn(name.lower()) for name in TALLY),
        TableColumn("scale", "text"),
    ]
    rows = [
        [
            TableCell(one.recipe.name, link=f"{one.recipe.name}.md"),
            f"{one.recipe.paper.name}: {one.recipe.reproduces}",
            *map(str, tally(one)),
            one.scale,
        ]
        for one in reproductions
    ]
    text = (
        "# Benchmark\n\n"
        "Tables and figures of the papers, measured again with `kinfed reproduce`: our numbers beside the published "
        "ones, and every claim judged by paired differences over seeds (95 % interval).\n\n"
    )
    return write_page(folder / "README.md", text + TextTable.of("Benchmark", columns, rows).markdown())
