"""Description of a site's table before any model: rows, gaps, moments and categories, without small counts.

A count below the owner's `smallest_count` does not leave, nor anything that it follows from. Rows of a column are
divided into cells: its categories and its gaps, or what is there and what is not. Small cells are told together, with
the next larger one where they would still be few. Means and deviations leave of at least as many values, to four
digits: of more of them a row that was added between two descriptions could be computed. Numbers and days of few
different values are told as categories, for their mean and the number of rows would tell how many have which. Of a
column that one value leads (an income of a million) neither mean nor deviation leaves: together they are that value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from kinfed.data import TableStatistics

MISSING = ""  # the cell of gaps; no category is called so
DIGITS = 4
FEW_VALUES = 12  # different numbers that are told as categories


def codes_of(table: pa.Table, names: list[str]) -> list[str]:
    """Columns with so few different values, numbers and days too, that they are told as categories."""
    plain = [name for name in names if not pa.types.is_nested(table[name].type)]
    return [name for name in plain if len(table[name].drop_null().unique()) <= FEW_VALUES]


def described(statistics: TableStatistics, smallest: int, led: Collection[str]) -> dict[str, Any]:
    """The description of a table whose rows are at least `smallest`, as JSON; `led`: columns that one value leads."""
    return {
        "rows": statistics.rows,
        "columns": {name: _column(column, smallest, name in led) for name, column in statistics.columns.items()},
    }


def _column(column: Any, smallest: int, is_led: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": kind_of(column)}
    cells = (
        dict(column.categories) if column.categories and record["kind"] == "category" else {"values": column.present}
    )
    shown, others = large_cells({**cells, MISSING: column.missing}, smallest)
    record["missing"] = shown.pop(MISSING, None)
    if record["kind"] == "category":
        record |= {"categories": shown, "others": list(others)}
    moments = column.days if record["kind"] == "date" else column.values
    if record["kind"] in ("number", "date") and moments.count >= smallest and not is_led:
        record |= {"mean": _short(moments.mean), "deviation": _short(math.sqrt(moments.square / moments.count))}
    return record


def large_cells(cells: Mapping[str, int], smallest: int) -> tuple[dict[str, int], tuple[int, int]]:
    """Cells whose counts may leave, and how many others hold how many rows together. Empty ones are no secret unless
    they would be told apart from small ones."""
    order = sorted(cells, key=lambda name: (cells[name], name))
    hidden = [name for name in order if 0 < cells[name] < smallest]
    for name in order:
        if not hidden or sum(cells[one] for one in hidden) >= smallest:
            break
        if cells[name] >= smallest:
            hidden.append(name)
    if hidden and MISSING in cells and cells[MISSING] == 0:
        hidden.append(MISSING)  # else the others would be known not to be gaps
    shown = {name: count for name, count in cells.items() if name not in hidden}
    return shown, (len(hidden), sum(cells[name] for name in hidden))


def kind_of(column: Any) -> str:
    """The kind of most of a column's values; codes that are told as categories are these."""
    if column.texts and column.categories and len(column.categories) <= FEW_VALUES:
        return "category"
    kinds = {
        "number": column.numbers + column.numeric_texts, "boolean": column.booleans,
        "date": column.dates + column.date_texts, "unreadable": column.unreadable,
        "category" if column.categories else "text": column.texts - column.numeric_texts - column.date_texts,
    }  # fmt: skip
    largest = max(kinds, key=lambda name: kinds[name])
    return largest if kinds[largest] else "empty"


def _short(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
