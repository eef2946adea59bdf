"""The tables of a reproduction as text: for the console, as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import rich.table

from kinfed.report.formats import format_number
from kinfed.report.statistics import Average, average
from kinfed.report.tables import TableColumn, TextTable
from kinfed.reproduce.judge import NOT_RUN, Verdict, verdicts
from kinfed.reproduce.measure import Reproduction
from kinfed.reproduce.recipe import Column, Found, Published, Table


@dataclass(frozen=True)
class Cell:
    ours: Average | None
    theirs: Published | None


@dataclass(frozen=True)
class Filled:
    """A table with what was measured. Rows and columns that this scale did not run are left out."""

    table: Table
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]  # name, cells

    def has_theirs(self, column: int) -> bool:
        return any(cells[column].theirs is not None for _, cells in self.rows)


def filled(table: Table, found: Found) -> Filled | None:
    columns = tuple(column for column in table.columns if column.part in found)
    rows = []
    for row, name in table.rows.items():
        cells = tuple(
            Cell(average(found.of(column.part, row, column.metric)), table.theirs.get((row, column.heading)))
            for column in columns
        )
        if any(cell.ours is not None for cell in cells):
            rows.append((name, cells))
    return Filled(table, columns, tuple(rows)) if rows else None


def tables_of(reproduction: Reproduction) -> list[Filled]:
    every = (filled(table, reproduction.found) for table in reproduction.recipe.tables)
    return [table for table in every if table is not None]


def ours_text(cell: Cell, column: Column, plus_minus: str = "±") -> str:
    if cell.ours is None:
        return "–"
    mean = format_number(cell.ours.mean * column.factor, column.digits)
    if cell.ours.sd is None:
        return mean
    return f"{mean} {plus_minus} {cell.ours.sd * column.factor:.{column.digits}f}"


def _headings(table: Filled) -> list[str]:
    out = []
    for number, column in enumerate(table.columns):
        out.append(column.heading)
        if table.has_theirs(number):
            out.append(f"{column.heading}, paper")
    return out


def _texts(table: Filled) -> list[list[str]]:
    rows = []
    for name, cells in table.rows:
        row = [name]
        for number, (cell, column) in enumerate(zip(cells, table.columns, strict=True)):
            row.append(ours_text(cell, column))
            if table.has_theirs(number):
                row.append("–" if cell.theirs is None else str(cell.theirs))
        rows.append(row)
    return rows


def console_table(table: Filled) -> rich.table.Table:
    out = rich.table.Table(title=table.table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    out.add_column("")
    for heading in _headings(table):
        theirs = heading.endswith(", paper")
        out.add_column("paper" if theirs else heading, justify="right", style="dim" if theirs else None)
    for row in _texts(table):
        out.add_row(*row)
    return out


def console_verdicts(found: Sequence[Verdict]) -> rich.table.Table:
    out = rich.table.Table(title="claims", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    style = {"reproduced": "green", "not reproduced": "red"}
    judged = [verdict for verdict in found if verdict.sentence != NOT_RUN]
    if len(judged) < len(found):
        out.caption, out.caption_justify = f"{len(found) - len(judged)} more claims: {NOT_RUN}", "left"
    for verdict in judged:
        out.add_row(f"[{style.get(verdict.status, 'dim')}]{verdict.status}[/]", f"{verdict.claim}: {verdict.sentence}")
    return out


def markdown_table(table: Filled) -> str:
    headings = ["", *_headings(table)]
    lines = [_line(headings), "|---|" + "---:|" * (len(headings) - 1), *(_line(row) for row in _texts(table))]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def csv_text(tables: Sequence[Filled]) -> str:
    """One line per table, row and column: what was measured, and what the paper says."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "method", "column", "metric", "mean", "sd", "seeds", "paper", "paper_spread"])
    for table in tables:
        for name, cells in table.rows:
            for cell, column in zip(cells, table.columns, strict=True):
                ours, theirs = cell.ours, cell.theirs
                mean, sd = (None, None) if ours is None else (ours.mean, ours.sd)
                measured = [_number(mean, column), _number(sd, column), 0 if ours is None else ours.n]
                printed = ["", ""] if theirs is None else [theirs.value, theirs.spread]
                writer.writerow([table.table.title, name, column.heading, column.metric, *measured, *printed])
    return text.getvalue()


def _number(value: float | None, column: Column) -> str:
    return "" if value is None else f"{value * column.factor:.6g}"


def latex_table(table: Filled) -> str:
    return TextTable.of(table.table.title, [TableColumn("", "name"), *_headings(table)], _texts(table)).latex()


def markdown_page(reproduction: Reproduction) -> str:
    """What docs/benchmark keeps of a reproduction."""
    recipe = reproduction.recipe
    lines = [f"# {recipe.title}", "", f"{recipe.paper.citation}: {recipe.shows}. {recipe.about}", ""]
    lines += [provenance(reproduction), ""]
    if stand_in := recipe.stand_ins.get(reproduction.scale):
        lines += [f"**Stand-in:** {stand_in}", ""]
    for table in tables_of(reproduction):
        lines += [f"## {table.table.title}", ""]
        lines += [table.table.caption, ""] if table.table.caption else []
        lines += [markdown_table(table)]
    if found := verdicts(recipe, reproduction.found, reproduction.scale):
        lines += ["## Claims", "", "| claim | verdict | figures |", "|---|---|---|"]
        for verdict in (verdict for verdict in found if verdict.sentence != NOT_RUN):
            asked = " (our question)" if verdict.asked_by == "kinfed" else ""
            lines.append(_line([verdict.claim + asked, verdict.status, verdict.sentence]))
        lines.append("")
        if elsewhere := [verdict.claim for verdict in found if verdict.sentence == NOT_RUN]:
            lines += [f"{len(elsewhere)} more claims are not judged: {NOT_RUN}.", ""]
    if recipe.notes:
        lines += ["## What differs from the paper, and why", "", *(f"* {note}" for note in recipe.notes), ""]
    lines += [f"Again: `kinfed reproduce {recipe.name} --scale {reproduction.scale}`", ""]
    return "\n".join(lines)


def provenance(reproduction: Reproduction) -> str:
    seeds, minutes = len(reproduction.seeds), reproduction.seconds / 60
    took = f"{minutes:.1f} minutes" if minutes >= 1 else f"{reproduction.seconds:.0f} seconds"
    return (
        f"Scale {reproduction.scale}, {seeds} {'seed' if seeds == 1 else 'seeds'}: mean ± standard deviation over "
        f"seeds, figures of the last round. Measured {reproduction.made}; training took {took}."
    )
