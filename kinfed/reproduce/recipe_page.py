"""The page of a reproduction, and the index of a site of such pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kinfed.report import build, figures, write_page
from kinfed.report.chart import Figure, Trace, View, axis, escape, layout, numbers, y_title
from kinfed.report.comparison import Comparison, single_run
from kinfed.report.html import choice, document, download, drawing, esc, fold, notes, scroll
from kinfed.report.palette import HUES, MUTED
from kinfed.report.panels import panels
from kinfed.reproduce.judge import NOT_RUN, Verdict, verdicts
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.result_tables import (
    Filled,
    csv_text,
    latex_table,
    markdown_page,
    ours_text,
    provenance,
    tables_of,
)
from kinfed.runs.reader import load_run


def write_reproduction(reproduction: Reproduction) -> Path:
    """index.html with the figures, results.md, results.csv, results.tex, and the full report of every run."""
    out, tables = reproduction.out, tables_of(reproduction)
    for folder in reproduction.run_folders.values():
        build([folder])
    files = {
        "results.csv": ("every number of the tables", csv_text(tables)),
        "results.tex": ("the tables for LaTeX with booktabs", "\n".join(map(latex_table, tables))),
        "results.md": ("this page as Markdown", markdown_page(reproduction)),
    }
    for name, (_, text) in files.items():
        write_page(out / name, text)
    return write_page(out / "index.html", _page(reproduction, tables, files))


def _page(reproduction: Reproduction, tables: Sequence[Filled], files: Mapping[str, tuple[str, str]]) -> str:
    recipe = reproduction.recipe
    comparisons = _comparisons(reproduction)
    said = verdicts(recipe, reproduction.found, reproduction.scale)
    drawn = recipe.figures(reproduction.found, comparisons)
    sections = {
        ("claims", "Claims"): _claims(said),
        ("tables", "Ours beside theirs"): "".join(_table(table) for table in tables),
        ("figures", "Figures"): "".join(
            (f"<h3>{esc(one.title)}</h3>" if one.title else "")
            + choice(one.figure, "Show")
            + drawing(one.figure, one.caption)
            for one in drawn
        ),
        ("rounds", "Over the rounds"): _curves(comparisons),
        ("inside", "Inside the methods"): _inside(reproduction, comparisons),
        ("differs", "What differs from the paper, and why"): _list(esc(note) for note in recipe.notes),
        ("files", "Files"): _files(reproduction, files),
    }
    present = {key: body for key, body in sections.items() if body}
    stand_in = recipe.stand_ins.get(reproduction.scale)
    return document(
        title=f"{recipe.title} – kinfed",
        kicker=f"kinfed reproduce {recipe.name} --scale {reproduction.scale}",
        heading=recipe.title,
        lead=(notes([f"Stand-in: {stand_in}"]) if stand_in else "")
        + f'<div class="lead"><p>{esc(f"{recipe.paper.citation}: {recipe.shows}.")}</p>'
        f"<p>{esc(recipe.about)}</p></div>",
        links=list(present),
        main="\n".join(
            f'<section id="{name}"><h2>{esc(title)}</h2>{body}</section>' for (name, title), body in present.items()
        ),
        footer=[provenance(reproduction)],
    )


def _comparisons(reproduction: Reproduction) -> dict[str, Comparison]:
    found: dict[str, Comparison] = {}
    start = 0
    for name, folder in reproduction.run_folders.items():
        found[name] = single_run(load_run(folder, name), start)
        start += len(found[name].methods)
    return found


def _claims(every: Sequence[Verdict]) -> str:
    said = [verdict for verdict in every if verdict.sentence != NOT_RUN]
    elsewhere = [verdict.claim for verdict in every if verdict.sentence == NOT_RUN]
    rows = "".join(
        f'<tr><td class="{_class(verdict)}">{esc(verdict.status)}</td><td>{esc(verdict.claim)}'
        + (" <em>(our question)</em>" if verdict.asked_by == "kinfed" else "")
        + f"</td><td>{esc(verdict.sentence)}</td></tr>"
        for verdict in said
    )
    head = '<thead><tr><th scope="col">Verdict</th><th scope="col">Claim</th><th scope="col">Figures</th></tr></thead>'
    told = (
        "<p>A claim counts as reproduced if the 95 % interval of the paired differences over seeds (Student’s t) lies "
        "above zero; differences are ours, from the last round.</p>"
        + scroll(f'<table class="plain claims">{head}<tbody>{rows}</tbody></table>', "Claims")
    )
    rest = fold(f"{len(elsewhere)} more: {NOT_RUN}", _list(map(esc, elsewhere))) if elsewhere else ""
    return (told if said else "") + rest


def _class(verdict: Verdict) -> str:
    return {"reproduced": "yes", "not reproduced": "no"}.get(verdict.status, "open")


def _table(table: Filled) -> str:
    head = '<th scope="col">Method</th>'
    for number, column in enumerate(table.columns):
        span = ' colspan="2"' if table.has_theirs(number) else ""
        head += f'<th scope="col"{span}>{esc(column.heading)}</th>'
    body = ""
    for name, cells in table.rows:
        body += f'<tr><th scope="row">{esc(name)}</th>'
        for number, (cell, column) in enumerate(zip(cells, table.columns, strict=True)):
            body += f'<td class="number">{esc(ours_text(cell, column))}</td>'
            if table.has_theirs(number):
                body += f'<td class="number paper">{"–" if cell.theirs is None else esc(str(cell.theirs))}</td>'
        body += "</tr>"
    caption = f"<p>{esc(table.table.caption)}</p>" if table.table.caption else ""
    beside = _beside(table)
    gray = "<p>Gray figures are the paper’s.</p>" if beside else ""
    return (
        f"<h3>{esc(table.table.title)}</h3>{caption}{gray}"
        + scroll(f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>', table.table.title)
        + beside
    )


def _beside(table: Filled) -> str:
    """A dot for ours and a ring for theirs, row by row; one view for every column that the paper has too."""
    names = [escape(name) for name, _ in table.rows]
    data: list[Trace] = []
    views: list[View] = []
    for number, column in enumerate(table.columns):
        if not table.has_theirs(number):
            continue
        views.append(View(column.heading, column.heading, y_title(escape(column.heading))))
        cells = [row[number] for _, row in table.rows]
        ours = [None if cell.ours is None else cell.ours.mean for cell in cells]
        spread = [None if cell.ours is None else cell.ours.sd or 0.0 for cell in cells]
        common = {"type": "scatter", "mode": "markers", "y": names, "meta": {"view": column.heading}}
        data += [
            {
                **common, "name": "paper", "x": numbers(cell.theirs.value if cell.theirs else None for cell in cells),
                "marker": {"symbol": "circle-open", "color": MUTED, "size": 11, "line": {"width": 2}},
                "hovertemplate": "%{y}, paper: %{x:.4g}<extra></extra>",
            },
            {
                **common, "name": "ours", "x": numbers(ours, column.factor), "marker": {"color": HUES[0], "size": 10},
                "error_x": {"type": "data", "color": HUES[0], "thickness": 1.5, "width": 3,
                            "array": numbers(spread, column.factor)},
                "hovertemplate": "%{y}, ours: %{x:.4g}<extra></extra>",
            },
        ]  # fmt: skip
    if not views:
        return ""
    figure = Figure(
        description="Ours beside the paper's, for every method.",
        data=data,
        layout=layout(axis(), axis(autorange="reversed"), escape(views[0].label)),
        height=90 + 26 * len(names),
        views=tuple(views),
    )
    caption = "● ours, with its spread over seeds; ○ the paper’s"
    return f"<section>{choice(figure, 'Column')}{drawing(figure, caption)}</section>"


def _curves(comparisons: dict[str, Comparison]) -> str:
    out = ""
    for name, comparison in comparisons.items():
        figure = figures.learning_curves(comparison)
        if figure is not None:
            heading = f"<h3>{esc(name)}</h3>" if len(comparisons) > 1 else ""
            out += f"<section>{heading}{choice(figure, 'Model')}{drawing(figure)}</section>"
    return out


def _inside(reproduction: Reproduction, comparisons: dict[str, Comparison]) -> str:
    blocks = []
    for part, algorithm in reproduction.recipe.inside:
        for method in comparisons[part].methods if part in comparisons else ():
            if method.algorithm == algorithm:
                for panel in panels(method):
                    drawn = "".join(drawing(figure) for figure in panel.figures)
                    blocks.append(f"<h4>{esc(panel.title)}</h4><p>{esc(panel.sentence)}</p>{drawn}")
    return fold("Figures of the methods themselves", "".join(blocks)) if blocks else ""


def _files(reproduction: Reproduction, files: Mapping[str, tuple[str, str]]) -> str:
    items = [download(name, what, text) for name, (what, text) in files.items()]
    for name in reproduction.run_folders:
        items.append(f'<a href="parts/{esc(name)}/report.html">full report of {esc(name)}</a>: clients, costs, data')
    return _list(items)


def _list(items: Iterable[str]) -> str:
    entries = "".join(f"<li>{item}</li>" for item in items)
    return f'<ul class="files">{entries}</ul>' if entries else ""


TALLIED = ("Claims reproduced", "Not reproduced", "Not tested", "Our questions: yes", "No")


def tally(one: Reproduction) -> tuple[int, ...]:
    """Verdicts on the paper's claims, then on our questions, in the order of TALLIED."""
    said = verdicts(one.recipe, one.found, one.scale)
    theirs = [verdict.status for verdict in said if verdict.asked_by == "paper"]
    ours = [verdict.status for verdict in said if verdict.asked_by == "kinfed"]
    yes, no = theirs.count("reproduced"), theirs.count("not reproduced")
    return yes, no, len(theirs) - yes - no, ours.count("reproduced"), ours.count("not reproduced")


def write_site(reproductions: Sequence[Reproduction], out: Path) -> Path:
    """The index of several reproductions, each in a folder below `out`."""
    rows = ""
    for one in reproductions:
        cells = "".join(f'<td class="number">{count}</td>' for count in tally(one))
        rows += (
            f'<tr><th scope="row"><a href="{esc(one.out.name)}/index.html">{esc(one.recipe.name)}</a></th>'
            f"<td>{esc(one.recipe.title)}</td><td>{esc(f'{one.recipe.paper.name}: {one.recipe.shows}')}</td>"
            f"{cells}<td>{esc(one.scale)}</td></tr>"
        )
    headings = ("Recipe", "What", "In the paper", *TALLIED, "Scale")
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    table = f'<table class="plain site"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return write_page(
        out / "index.html",
        document(
            title="Benchmark – kinfed",
            kicker="kinfed reproduce",
            heading="Tables and figures of the papers, measured again",
            lead='<div class="lead"><p>Every page has our numbers beside the published ones, and a verdict per claim '
            "from paired differences over seeds.</p></div>",
            links=[],
            main=f'<section id="recipes">{scroll(table, "Recipes")}</section>',
            footer=sorted({one.made for one in reproductions}),
            figures=False,
        ),
    )


def write_markdown(reproductions: Sequence[Reproduction], folder: Path) -> Path:
    """One Markdown page per reproduction, and README.md that lists all pages of the folder's recipes."""
    lines = [
        "# Benchmark",
        "",
        "Tables and figures of the papers, measured again with `kinfed reproduce`: our numbers beside the published "
        "ones, and every claim judged by paired differences over seeds (95 % interval).",
        "",
        "| recipe | in the paper | " + " | ".join(name.lower() for name in TALLIED) + " | scale |",
        "|---|---|" + "---:|" * len(TALLIED) + "---|",
    ]
    for one in reproductions:
        write_page(folder / f"{one.recipe.name}.md", markdown_page(one))
        counts = " | ".join(str(count) for count in tally(one))
        lines.append(
            f"| [{one.recipe.name}]({one.recipe.name}.md) | {one.recipe.paper.name}: {one.recipe.shows} "
            f"| {counts} | {one.scale} |"
        )
    return write_page(folder / "README.md", "\n".join(lines) + "\n")
