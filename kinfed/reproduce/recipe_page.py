"""The page of a reproduction, and the index of a site of such pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kinfed.report import build, figures, write_page
from kinfed.report.chart import Figure
from kinfed.report.comparison import Comparison, single_run
from kinfed.report.formats import plural
from kinfed.report.html import Download, render
from kinfed.report.panels import Panel, panels
from kinfed.report.tables import TableCell, TableColumn, TextTable
from kinfed.reproduce.judge import DECIDED, NOT_RUN, Status, Verdict, by_chance, verdicts
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.recipe_figures import beside_published
from kinfed.reproduce.result_tables import (
    FilledTable,
    claims_not_run,
    filled_tables,
    interval_cell,
    markdown_page,
    provenance_text,
    results_csv,
    status_cell,
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


# Columns of the index: of the papers' claims, then of our questions, how many have which verdict.
CLAIM_STATUSES: tuple[Status, ...] = ("reproduced", "contradicted", "undecided", "tied")
QUESTION_STATUSES: tuple[Status, ...] = ("reproduced", "contradicted", "undecided")
TALLY = (
    *(status.capitalize() for status in CLAIM_STATUSES),
    "Not tested",
    *(f"Our questions: {answer}" for answer in ("yes", "no", "open")),
)


def tally(judged: Sequence[Verdict]) -> tuple[int, ...]:
    """Verdicts on the paper's claims, then on our questions, in the order of TALLY. Ties among our questions are
    open."""
    claims = [verdict.status for verdict in judged if verdict.source == "paper"]
    questions = [verdict.status for verdict in judged if verdict.source == "kinfed"]
    counts = [claims.count(status) for status in CLAIM_STATUSES]
    answers = [questions.count(status) for status in QUESTION_STATUSES]
    answers[-1] += questions.count("tied")
    return *counts, len(claims) - sum(counts), *answers


def _judged(reproduction: Reproduction) -> list[Verdict]:
    return verdicts(reproduction.recipe, reproduction.results, reproduction.scale)


def summary_sentences(judged: Sequence[Verdict]) -> list[str]:
    """What holds, what does not, what is unknown, and what chance alone would give."""
    claims = [verdict for verdict in judged if verdict.source == "paper"]
    counts = {status: sum(verdict.status == status for verdict in claims) for status in DECIDED}
    decided = [verdict for verdict in claims if verdict.status in DECIDED]
    above, below = by_chance(claims)
    return [
        f"Of {plural(len(claims), 'claim')} of the papers, {counts['reproduced']} are reproduced, "
        f"{counts['contradicted']} contradicted, {counts['undecided']} undecided (an interval contains zero), "
        f"{counts['tied']} exact ties; {len(claims) - len(decided)} were not tested here.",
        f"Every interval is judged by itself at 95 %. If no method differed from any other, chance alone would call at "
        f"most {above:.1f} of the {len(decided)} judged claims reproduced and {below:.1f} contradicted.",
    ]


def write_site(reproductions: Sequence[Reproduction], out: Path) -> Path:
    """The index of several reproductions, each in a folder below `out`: what holds, and every claim in a line."""
    by_recipe = [(one, _judged(one)) for one in reproductions]
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
            *map(str, tally(judged)),
            one.scale,
        ]
        for one, judged in by_recipe
    ]
    page = render(
        "site.html",
        PACKAGE,
        title="Benchmark – kinfed",
        kicker="kinfed reproduce",
        heading="Tables and figures of the papers, measured again",
        links=[("recipes", "Recipes"), ("claims", "Claims")],
        footer=sorted({one.provenance for one in reproductions}),
        figures=False,
        table=TextTable.of("Recipes", columns, rows),
        summary=summary_sentences([verdict for _, judged in by_recipe for verdict in judged]),
        claims=[(one.recipe, claim_lines(judged)) for one, judged in by_recipe if claim_lines(judged).rows],
    )
    return write_page(out / "index.html", page)


def claim_lines(judged: Sequence[Verdict]) -> TextTable:
    """A line for every claim that was judged: the verdict, where the paper says it, the interval and its seeds."""
    columns = [TableColumn(name, "text") for name in ("Verdict", "Claim", "In the paper", "Interval")]
    rows: list[list[TableCell | str]] = [
        [
            status_cell(verdict),
            verdict.claim,
            "our question" if verdict.source == "kinfed" else verdict.place or "–",
            interval_cell(verdict, f"{verdict.seeds} seeds"),
        ]
        for verdict in judged
        if verdict.margin is not None
    ]
    return TextTable.of("Claims", [*columns], rows)


def write_markdown(reproductions: Sequence[Reproduction], folder: Path) -> Path:
    """One Markdown page per reproduction, and README.md that lists all pages of the folder's recipes."""
    by_recipe = [(one, _judged(one)) for one in reproductions]
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
            *map(str, tally(judged)),
            one.scale,
        ]
        for one, judged in by_recipe
    ]
    text = (
        "# Benchmark\n\n"
        "Tables and figures of the papers, measured again with `kinfed reproduce`: our numbers beside the published "
        "ones, and every claim judged by paired differences over seeds (95 % interval): reproduced if all of them lie "
        "above zero, contradicted if one lies below, undecided otherwise.\n\n"
        + "\n".join(summary_sentences([verdict for _, judged in by_recipe for verdict in judged]))
        + "\n\n"
    )
    return write_page(folder / "README.md", text + TextTable.of("Benchmark", columns, rows).markdown())
