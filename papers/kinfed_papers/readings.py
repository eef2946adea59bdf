"""What becomes of a claim in every reading of its paper: a grid, the evidence for each choice, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kinfed.report import TableCell, TableColumn, TextTable
from kinfed_papers.judge import verdicts
from kinfed_papers.measure import Reproduction
from kinfed_papers.recipe import Readings
from kinfed_papers.result_tables import interval_cell, status_cell
from kinfed_papers.verdict import Verdict, margin_text

LIKELIEST = "●"  # marks the reading that the authors most likely ran


@dataclass(frozen=True)
class ReadingGrid:
    """Readings with a verdict in every cell."""

    readings: Readings
    cells: Mapping[tuple[str, str], Verdict]  # by row and column

    @classmethod
    def of(cls, readings: Readings, reproduction: Reproduction) -> ReadingGrid:
        """Every cell judged by itself, as a question of ours is."""
        places = [(row, column) for row in readings.rows for column in readings.columns]
        recipe = replace(reproduction.recipe, claims=[readings.claim(*place) for place in places])
        judged = verdicts(recipe, reproduction.results, reproduction.scale, reproduction.gaps, reproduction.draws)
        return cls(readings, dict(zip(places, judged, strict=True)))

    @cached_property
    def best(self) -> str | None:
        """The row that is furthest above rivals at its own effective rate; none if none was measured."""
        means = {row: self._mean(row, column) for row, column in self.readings.fair.items()}
        best = max(means, key=lambda row: means[row], default=None)
        return best if best is not None and means[best] > -math.inf else None

    def _mean(self, row: str, column: str) -> float:
        margin = self.cells[row, column].margin
        return -math.inf if margin is None else margin.mean

    def sentence(self) -> str:
        """The outcome as its authors most likely ran it, and in its best reading at the same effective rate."""
        readings = self.readings
        row, column = readings.likeliest
        text = f"{readings.title}. As its authors most likely ran it ({readings.rows[row]}; rivals: {column}), it "
        text += _outcome(self.cells[row, column])
        if self.best is None:
            return f"{text}."
        fair = readings.fair[self.best]
        outcome = _outcome(self.cells[self.best, fair])
        if (self.best, fair) == readings.likeliest:
            return f"{text}; that is also its best reading."
        return f"{text}. In its best reading ({readings.rows[self.best]}; rivals: {fair}), it {outcome}."

    def table(self) -> TextTable:
        """Readings of the method by those of its rivals, the comparison that decides in every cell."""
        columns = [TableColumn("", "name"), *(TableColumn(heading, "text") for heading in self.readings.columns)]
        rows = [
            [TableCell(name), *(self._cell(row, column) for column in self.readings.columns)]
            for row, name in self.readings.rows.items()
        ]
        return TextTable.of(self.readings.title, columns, rows)

    def _cell(self, row: str, column: str) -> TableCell:
        verdict = self.cells[row, column]
        mark = f"{LIKELIEST} " if (row, column) == self.readings.likeliest else ""
        if verdict.margin is None:
            return TableCell(f"{mark}not judged")
        rival = f" against {verdict.rival}" if verdict.rival else ""
        text = f"{mark}{verdict.status}: {margin_text(verdict)}{rival}"
        return replace(interval_cell(verdict, text), tone=status_cell(verdict).tone)


def reading_grids(reproduction: Reproduction) -> list[ReadingGrid]:
    """The grids of a recipe of which a cell was judged."""
    grids = [ReadingGrid.of(readings, reproduction) for readings in reproduction.recipe.readings]
    return [grid for grid in grids if any(verdict.margin is not None for verdict in grid.cells.values())]


def choices_table(grids: Sequence[ReadingGrid]) -> TextTable:
    """Every choice that the paper leaves open, once, with what it says of it."""
    choices = dict.fromkeys(choice for grid in grids for choice in grid.readings.choices)
    columns = [TableColumn(name, "text") for name in ("Choice", "Readings", "What the paper says", "Most likely")]
    rows = [[choice.choice, choice.readings, choice.evidence, choice.likeliest] for choice in choices]
    return TextTable.of("What the paper leaves open", columns, rows)


def _outcome(verdict: Verdict) -> str:
    """What follows "it" in a sentence: holds, +0.49 [+0.17, +0.80] points against FedAvg."""
    if verdict.margin is None:
        return f"was not judged ({verdict.sentence})"
    word = {"unknown": "is unknown", "exact tie": "is an exact tie"}.get(verdict.status, verdict.status)
    rival = f" against {verdict.rival}" if verdict.rival else ""
    outlook = f"; {verdict.outlook}" if verdict.length and verdict.length in verdict.outlook else ""
    return f"{word}: {margin_text(verdict)}{rival}{outlook}"
