"""One table for every reader: Markdown, LaTeX and CSV as text, HTML by the macro `table` of elements.html, and the
terminal, where rich prints a table as it is (`console.print(table)`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Literal

from kinfed.core import escape_formula
from kinfed.report.drawing.looks import Style

if TYPE_CHECKING:
    from rich.table import Table

DRAWN = 17  # characters of an interval in text
# Of tones, on a terminal; a page has a class of each name.
TONES = {"yes": "green", "no": "red", "open": "dim", "paper": "dim", "baseline": "dim"}


@dataclass(frozen=True)
class TableColumn:
    heading: str
    kind: Literal["figure", "text", "name"] = "figure"  # a name is what its row is about
    group: str = ""  # stands above neighbouring columns that share it
    unit: str = ""  # for headings of tables that stand without a text around them
    definition: str = ""  # for readers who point at the heading of a page
    sortable: bool = False  # by the reader of a page

    @property
    def full_heading(self) -> str:
        group = f"{self.group}: " if self.group else ""
        return group + self.heading + (f" ({self.unit})" if self.unit else "")


@dataclass(frozen=True)
class TableCell:
    text: str
    spread: str = ""  # follows the text after ±
    best: bool = False
    second: bool = False  # the best of those that are not
    tone: str = ""  # one of TONES
    link: str = ""
    sort_value: float | None = None  # what a sortable column is sorted by
    style: Style | None = None  # of the method that the cell is about
    shares: tuple[tuple[str, int], ...] = ()  # a bar of these parts on a page: (class, how many)
    interval: tuple[float, float, float] | None = None  # drawn on a page about zero: low, mean, high
    reach: float = 0.0  # of the drawing to both sides of zero, for cells on one scale; 0: what the interval needs

    @property
    def interval_places(self) -> tuple[float, float, float]:
        """Low, mean and high of the interval as percentages of a line with zero at 50, which has the common reach or
        just holds all of them."""
        assert self.interval is not None
        reach = self.reach or max(abs(value) for value in self.interval) or 1.0
        low, mean, high = (round(50 + 48 * value / reach, 4) for value in self.interval)
        return low, mean, high

    @property
    def interval_text(self) -> str:
        """The interval as DRAWN characters of equal width about zero in the middle. What is not zero is not drawn
        there: an end that has crossed zero, or has not, is seen to."""
        low, mean, high = (_drawn_column(place) for place in self.interval_places)
        marks = ["─" if low < column < high else "·" for column in range(DRAWN)]
        marks[DRAWN // 2] = "┼" if low < DRAWN // 2 < high else "┊"
        marks[low], marks[high] = "├", "┤"
        marks[mean] = "●"
        return "".join(marks)

    def __str__(self) -> str:
        return f"{self.text} ± {self.spread}" if self.spread else self.text


def _drawn_column(place: float) -> int:
    """The one of DRAWN columns for a place in percent of the line."""
    column, middle = round(place / 100 * (DRAWN - 1)), DRAWN // 2
    return column if column != middle or place == 50 else middle + (1 if place > 50 else -1)


@dataclass(frozen=True)
class TextTable:
    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[TableCell, ...], ...]

    @classmethod
    def of(
        cls, title: str, columns: Iterable[TableColumn | str], rows: Iterable[Iterable[TableCell | str]]
    ) -> TextTable:
        """Texts stand for plain columns of figures and for plain cells."""
        heads = (TableColumn(column) if isinstance(column, str) else column for column in columns)
        cells = ((TableCell(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
        return cls(title, tuple(heads), tuple(map(tuple, cells)))

    @property
    def groups(self) -> list[tuple[str, int]]:
        """(group, number of its columns) of the columns after the first; empty if no column has a group."""
        runs = groupby(self.columns[1:], key=lambda column: column.group)
        return [(name, len(list(columns))) for name, columns in runs] if any(c.group for c in self.columns) else []

    @property
    def openings(self) -> set[int]:
        """The columns that open a group."""
        widths = [width for _, width in self.groups]
        return {1 + sum(widths[:i]) for i in range(len(widths))}

    def markdown(self) -> str:
        def entry(cell: TableCell) -> str:
            text = _markdown(str(cell))
            if not text and cell.interval is not None:
                return f"`{cell.interval_text}`"
            text = f"[{text}]({cell.link})" if cell.link else text
            return f"**{text}**" if cell.best else f"<u>{text}</u>" if cell.second else text

        rules = ("---:" if column.kind == "figure" else "---" for column in self.columns)
        lines = [[_markdown(column.full_heading) for column in self.columns], *(map(entry, row) for row in self.rows)]
        head, *body = ("| " + " | ".join(line) + " |" for line in lines)
        return "\n".join([head, "|" + "|".join(rules) + "|", *body, ""])

    def latex(self, notes: Sequence[str] = ()) -> str:
        """A tabular for the package booktabs, with notes below it."""

        def entry(cell: TableCell) -> str:
            text = str(cell).translate(_LATEX)
            return rf"\textbf{{{text}}}" if cell.best else rf"\underline{{{text}}}" if cell.second else text

        columns = "".join("r" if column.kind == "figure" else "l" for column in self.columns)
        groups = self.groups
        names = [replace(c, group="") if groups else c for c in self.columns]  # they stand above their columns
        lines = [[c.full_heading.translate(_LATEX) for c in names], *(map(entry, row) for row in self.rows)]
        head, *body = (" & ".join(line) + r" \\" for line in lines)
        begin = [f"% {' '.join(self.title.split())}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        end = [r"\bottomrule", r"\end{tabular}", *_latex_notes(notes), ""]
        return "\n".join([*begin, *_latex_groups(groups), head, r"\midrule", *body, *end])

    def csv(self) -> str:
        return csv_text([column.full_heading for column in self.columns], (map(str, row) for row in self.rows))

    def text(self, width: int = 120) -> str:
        """The table as a terminal of this width shows it."""
        from rich.console import Console

        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())

    def __rich__(self) -> Table:
        return self.console()

    def console(self, *, boxed: bool = True) -> Table:
        from rich.box import SIMPLE
        from rich.table import Table  # a page has its tables without a terminal's
        from rich.text import Text

        box = SIMPLE if boxed else None
        table = Table(title=Text(self.title), title_justify="left", title_style="dim", box=box)
        for column in self.columns:
            # On a narrow terminal figures wrap: cut ones would be other figures.
            table.add_column(
                Text(column.full_heading), justify="right" if column.kind == "figure" else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(Text(str(cell), style=TONES.get(cell.tone, _emphasis(cell))) for cell in row))
        return table


def _emphasis(cell: TableCell) -> str:
    return "bold" if cell.best else "underline" if cell.second else ""


def csv_text(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Comma-separated values. A text that a spreadsheet would read as a formula is led by an apostrophe."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([escape_formula("" if cell is None else str(cell)) for cell in row] for row in (headings, *rows))
    return file.getvalue()


def _markdown(text: str) -> str:
    return re.sub(r"[ \t\r\n]+", " ", text.replace("\\", "\\\\").replace("|", "\\|")).strip(" ")


def _latex_groups(groups: Sequence[tuple[str, int]]) -> Iterator[str]:
    """The line above the headings, and the rules below its names."""
    if not groups:
        return
    names = (rf"\multicolumn{{{width}}}{{c}}{{{name.translate(_LATEX)}}}" for name, width in groups)
    yield " & ".join(["", *names]) + r" \\"
    ends = list(accumulate((width for _, width in groups), initial=1))
    rules = zip(groups, pairwise(ends), strict=True)
    yield " ".join(rf"\cmidrule(lr){{{first + 1}-{last}}}" for (name, _), (first, last) in rules if name)


def _latex_notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        paragraphs = "\\par\n".join(note.translate(_LATEX) for note in notes)
        yield rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {paragraphs}}}"


_LATEX = str.maketrans(
    {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}",
     "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "–": "--", "−": "$-$", "±": r"$\pm$", "\u202f": r"\,"}
)  # fmt: skip
