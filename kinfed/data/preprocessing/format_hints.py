"""Texts that look like dates or numbers in a form that is not read as such: said aloud, never guessed.

1/2/2024 is January to some and February to others, and 1,234 is one and a bit or a thousand: a column of these is taken
as text, and whoever reads the notes of a run is told.
"""

from __future__ import annotations

import re

import numpy as np

from kinfed.data.preprocessing.cells import Cells

SAMPLE = 1000  # different values of a column that are looked at
_MONTHS = "jan|feb|mar|apr|may|mai|jun|jul|aug|sep|oct|okt|nov|dec|dez"
_DATE = re.compile(
    rf"\d{{1,4}}([./-])\d{{1,2}}\1\d{{2,4}}\b|(\d{{1,2}}[. -]+)?({_MONTHS})[a-z]*[. -]+\d|\d{{1,2}}[. -]*({_MONTHS})",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?\d+([.,']\d+)+ ?[%€$£]?$|[€$£] ?[+-]?\d|[+-]?\d+([.,]\d+)? ?[%€$£]$")


def format_hint(name: str, cells: Cells) -> str:
    """A sentence about a column of texts, most of which look like something else; "" for all others."""
    values = cells.values[:SAMPLE]
    if cells.codes is None or not values:
        return ""
    for pattern, what, remedy in (
        (_DATE, "dates", "write all of them as 2024-02-29"),
        (_NUMBER, "numbers", "write them as 1234.5, without other signs"),
    ):
        alike = [place for place, value in enumerate(values) if pattern.match(value)]
        read = cells.value_days() if what == "dates" else cells.value_numbers()
        unread = [values[place] for place in alike if np.isnan(read[place])]
        if 2 * len(alike) > len(values):
            return f"column {name} looks like {what} ({unread[0]!r}) but is taken as text; {remedy}" if unread else ""
    return ""
