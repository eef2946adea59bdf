"""The tables of a reproduction with what was measured: for the console and the page, as Markdown, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rich.table

from kinfed.analysis import Average, average, interval
from kinfed.report import TableCell, TableColumn, TextTable, csv_text
from kinfed.report.drawing import format_number, plural
from kinfed_papers.judge import NOT_RUN
from kinfed_papers.measure import Reproduction
from kinfed_papers.recipe import PublishedNumber, ResultColumn, Results, ResultTable, difference
from kinfed_papers.verdict import Verdict

ROUNDING = 1e-9  # of sums: differences that are 0 but for it are 0
OF_ANY_RUN = (
    "bytes",
    "bytes_up",
    "seconds",
    "epsilon",
)  # metrics that mean what they say also where a method has diverged


@dataclass(frozen=True)
class ResultCell:
    ours: Average | None
    published: PublishedNumber | None
    reach: float | None = None  # half of the 95 % interval of a difference to another row
    diverged: int = 0  # with this many seeds: there is no figure then


@dataclass(frozen=True)
class FilledTable:
    """A table with what was measured. Rows and columns that this scale did not run are left out."""

    table: ResultTable
    columns: tuple[ResultColumn, ...]
    rows: tuple[tuple[str, tuple[ResultCell, ...]], ...]  # name, cells

    def is_published(self, column: int) -> bool:
        """Whether the paper has numbers for a column, too."""
        return any(cells[column].published is not None for _, cells in self.rows)

    def text_table(self) -> TextTable:
        """For Markdown and LaTeX: the paper's numbers in columns of their own."""
        return self._table([(column.heading, f"{column.heading}, paper") for column in self.columns])

    def console_table(self) -> rich.table.Table:
        return self._table([(column.heading, "paper") for column in self.columns]).console(boxed=False)

    def _table(self, headings: Sequence[tuple[str, str]]) -> TextTable:
        """headings: of every column, ours and the paper's."""
        columns = [TableColumn("", "name")]
        for number, (ours, paper) in enumerate(headings):
            columns.append(TableColumn(ours))
            if self.is_published(number):
                columns.append(TableColumn(paper))
        return TextTable.of(self.table.title, columns, self._cells())

    def page_table(self) -> TextTable:
        """For the page: one heading above ours and the paper's."""
        columns = [TableColumn("Method", "name")]
        for number, column in enumerate(self.columns):
            if self.is_published(number):
                columns += [TableColumn("ours", group=column.heading), TableColumn("paper", group=column.heading)]
            else:
                columns.append(TableColumn(column.heading))
        return TextTable.of(self.table.title, columns, self._cells())

    def _cells(self) -> list[list[TableCell]]:
        rows = []
        for name, cells in self.rows:
            row = [TableCell(name)]
            for number, (cell, column) in enumerate(zip(cells, self.columns, strict=True)):
                row.append(_our_cell(cell, column))
                if self.is_published(number):
                    row.append(TableCell("–" if cell.published is None else str(cell.published), tone="paper"))
            rows.append(row)
        return rows


def _our_cell(cell: ResultCell, column: ResultColumn) -> TableCell:
    ours = cell.ours
    if ours is None:
        return TableCell(f"diverged ({plural(cell.diverged, 'seed')})" if cell.diverged else "–")
    deviation = cell.reach if column.against else ours.sd
    spread = "" if deviation is None else f"{deviation * column.factor:.{column.digits}f}"
    mean = ours.mean * column.factor
    return TableCell(format_number(0.0 if abs(mean) < ROUNDING else mean, column.digits), spread)


def _cell(table: ResultTable, results: Results, row: str, column: ResultColumn) -> ResultCell:
    values, published = results.get(column.part, row, column.metric), table.published.get((row, column.heading))
    diverged = {seed for each in (row, column.against) for seed in results.diverged(column.part, each)}
    if values and diverged and column.metric not in OF_ANY_RUN:
        return ResultCell(None, published, diverged=len(diverged))
    if not column.against:
        return ResultCell(average(values), published)
    values = (
        difference(values, results.get(column.part, column.against, column.metric)) if row != column.against else {}
    )
    likely = interval(values)
    return ResultCell(average(values), published, None if likely is None else likely.high - likely.mean)


def fill(table: ResultTable, results: Results) -> FilledTable | None:
    """None if nothing of the table was measured."""
    columns = tuple(column for column in table.columns if column.part in results)
    rows = []
    for row, name in table.rows.items():
        cells = tuple(_cell(table, results, row, column) for column in columns)
        if any(cell.ours is not None or cell.diverged for cell in cells):
            rows.append((name, cells))
    return FilledTable(table, columns, tuple(rows)) if rows else None


def filled_tables(reproduction: Reproduction) -> list[FilledTable]:
    recipe, results = reproduction.recipe, reproduction.results
    filled = (fill(table, results) for table in recipe.arranged(recipe.tables, results))
    return [table for table in filled if table is not None]


def results_csv(tables: Sequence[FilledTable]) -> str:
    """One line per table, row and column: what was measured, and what the paper says."""
    lines: list[list[object]] = []
    for table in tables:
        for name, cells in table.rows:
            for cell, column in zip(cells, table.columns, strict=True):
                ours, published = cell.ours, cell.published
                mean, sd, seeds = (None, None, 0) if ours is None else (ours.mean, ours.sd, ours.n)
                printed = [None, None] if published is None else [published.value, published.spread]
                figures = [_csv_number(mean, column), _csv_number(sd, column), seeds, *printed]
                lines.append([table.table.title, name, column.heading, column.metric, *figures])
    headings = ["table", "method", "column", "metric", "mean", "sd", "seeds", "paper", "paper_spread"]
    return csv_text(headings, lines)


def _csv_number(value: float | None, column: ResultColumn) -> str:
    return "" if value is None else f"{value * column.factor:.6g}"


def verdict_table(judged: Sequence[Verdict], *, dated: bool = False) -> TextTable:
    """The claims that were judged, or cannot be here; those that the scale does not run are left out. `dated`: those
    whose figures were not kept say so, beside others whose figures were."""
    rows = [
        (_claim_text(verdict), status_cell(verdict), interval_cell(verdict, _evidence(verdict, dated)))
        for verdict in _with_evidence(judged)
    ]
    return TextTable.of("Claims", [TableColumn(name, "text") for name in ("claim", "verdict", "figures")], rows)


def console_verdicts(judged: Sequence[Verdict]) -> rich.table.Table:
    rows = [(status_cell(verdict), f"{verdict.claim}: {verdict.sentence}") for verdict in _with_evidence(judged)]
    table = TextTable.of("claims", [TableColumn("", "text"), TableColumn("", "text")], rows).console(boxed=False)
    table.show_header = False
    if missing := claims_not_run(judged):
        table.caption, table.caption_justify = f"{plural(len(missing), 'more claim')}: {NOT_RUN}", "left"
    return table


def claims_not_run(judged: Sequence[Verdict]) -> list[str]:
    return [verdict.claim for verdict in judged if verdict.sentence == NOT_RUN]


def _with_evidence(judged: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in judged if verdict.sentence != NOT_RUN]


def _claim_text(verdict: Verdict) -> str:
    origin = "our question" if verdict.source == "kinfed" else verdict.place
    return verdict.claim + (f" ({origin})" if origin else "")


def _evidence(verdict: Verdict, dated: bool) -> str:
    is_dated = dated and verdict.earlier and verdict.margin is not None
    return verdict.sentence + (f"; measured {verdict.earlier}, figures not saved" if is_dated else "")


def status_cell(verdict: Verdict) -> TableCell:
    return TableCell(verdict.status, tone={"holds": "yes", "does not hold": "no"}.get(verdict.status, "open"))


def interval_cell(verdict: Verdict, text: str) -> TableCell:
    """The text, above the interval of the margin that decides."""
    margin = verdict.margin
    return TableCell(text, interval=None if margin is None else (margin.low, margin.mean, margin.high))
