"""The cells of a column, read once: numbers, dates as days, or texts by their number in a list of different ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kinfed.errors import DataError

Kind = Literal["number", "category", "date", "text", "skip"]
KINDS: tuple[Kind, ...] = ("number", "category", "date", "text", "skip")
# What a file or frame says that its cells are; "empty": nothing, as all of them are missing; "absent": it has no such
# column.
Form = Literal["number", "boolean", "date", "text", "empty", "absent", "unreadable"]
Numbers = np.ndarray[Any, np.dtype[np.float64]]
Codes = np.ndarray[Any, np.dtype[np.int64]]

DAY = 86_400_000_000  # microseconds
LARGEST = float(np.finfo(np.float32).max)  # models compute in float32
_WORD = re.compile(r"\w+")
_DAY_FIRST = re.compile(r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})(?P<time>.*)$")
_YEAR_FIRST = re.compile(r"(?P<year>\d{4})/(?P<month>\d{1,2})/(?P<day>\d{1,2})(?P<time>.*)$")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Cells:
    """One column. `numbers` [n] are values, or days since 1970-01-01; NaN is a missing cell. Texts have `codes` [n]
    into `values` instead, -1 where one is missing."""

    form: Form
    numbers: Numbers
    codes: Codes | None = None
    values: list[str] = field(default_factory=list)
    type: str = ""  # as the file calls it

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Codes) -> Cells:
        """Some rows."""
        codes = None if self.codes is None else self.codes[rows]
        return replace(self, numbers=self.numbers[rows], codes=codes)

    def present(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool [n]: cells that are not missing."""
        return ~np.isnan(self.numbers) if self.codes is None else self.codes >= 0

    def value_numbers(self) -> Numbers:
        """[V] the number that each different text is; NaN for other texts."""
        return np.array([_number(value) for value in self.values], np.float64)

    def value_days(self) -> Numbers:
        """[V] the day that each different text names (2024-02-29, 2024-02-29 08:30, 2024/2/29, 29.2.2024); NaN for
        other texts: 1/2/2024 may mean January or February."""
        return np.array([_day(value) for value in self.values], np.float64)

    def as_numbers(self) -> Numbers:
        """[n] with texts that are numbers; NaN for all others."""
        return self.numbers if self.codes is None else _lookup(self.value_numbers(), self.codes)

    def as_days(self) -> Numbers:
        return self.numbers if self.codes is None else _lookup(self.value_days(), self.codes)

    def as_texts(self) -> Cells:
        """Numbers as texts: 3 and 3.0 are "3"; false and true are "false" and "true"."""
        if self.codes is not None:
            return self
        present = self.present()
        different, inverse = np.unique(self.numbers[present], return_inverse=True)
        codes = np.full(len(self), -1, np.int64)
        codes[present] = inverse
        return Cells("text", self.numbers, codes=codes, values=[self._text(v) for v in different.tolist()])

    def _text(self, value: float) -> str:
        if self.form == "boolean":
            return "true" if value else "false"
        if self.form == "date":
            return datetime.fromtimestamp(value * DAY / 1e6, UTC).date().isoformat()
        return str(int(value)) if value == int(value) else repr(value)


def read_cells(column: pa.ChunkedArray, where: str) -> Cells:
    """The cells of an Arrow column; `where` names it in errors."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind, rows = column.type, len(column)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view":
        return _texts(column)
    if column.null_count == rows:
        return Cells("empty", np.full(rows, np.nan), type=str(kind))
    if pa.types.is_boolean(kind):
        return Cells("boolean", _float64(column), type=str(kind))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _numbers(column, where)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        stamps = _float64(column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()))
        return Cells("date", stamps / DAY, type=str(kind))
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        unit = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
        return Cells("number", _float64(column.cast(unit, safe=False).cast(pa.int64())) / 1e6, type=str(kind))
    return Cells("unreadable", np.full(rows, np.nan), type=str(kind))


def _numbers(column: pa.ChunkedArray, where: str) -> Cells:
    values = _float64(column)
    wrong = np.abs(values) > LARGEST
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"{where} has {int(wrong.sum())} value(s) that are infinite or too large, the first in row {row + 1} "
            f"({values[row]:g}); fix them, empty their cells, or leave the column out"
        )
    return Cells("empty" if np.isnan(values).all() else "number", values, type=str(column.type))


def _texts(column: pa.ChunkedArray) -> Cells:
    trimmed = pc.utf8_trim_whitespace(column.cast(pa.large_string())).combine_chunks()
    encoded = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.large_string()), trimmed).dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    codes = np.asarray(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)
    values = encoded.dictionary.to_pylist()
    return Cells("text" if values else "empty", np.full(len(codes), np.nan), codes=codes, values=values, type="text")


def _float64(column: pa.ChunkedArray) -> Numbers:
    # Unsafe: integers beyond 2^53 lose their last digits; float32 keeps fewer anyway.
    array: Numbers = column.cast(pa.float64(), safe=False).to_numpy()
    return np.array(array, np.float64)


def _lookup(values: Numbers, codes: Codes) -> Numbers:
    return np.append(values, np.nan)[codes]  # -1 is the last


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return np.nan
    return value if abs(value) <= LARGEST and "_" not in text else np.nan


def _day(text: str) -> float:
    if match := _DAY_FIRST.match(text) or _YEAR_FIRST.match(text):
        parts = match.groupdict()
        text = f"{parts['year']}-{parts['month']:0>2}-{parts['day']:0>2}{parts['time']}"
    if len(text) < 8 or "-" not in text[1:]:
        return np.nan
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return np.nan
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return moment.timestamp() * 1e6 / DAY


SAMPLE = 1000  # different values of a column that are looked at
_MONTHS = "jan|feb|mar|apr|may|mai|jun|jul|aug|sep|oct|okt|nov|dec|dez"
_LIKE_DATE = re.compile(
    rf"\d{{1,4}}([./-])\d{{1,2}}\1\d{{2,4}}\b|(\d{{1,2}}[. -]+)?({_MONTHS})[a-z]*[. -]+\d|\d{{1,2}}[. -]*({_MONTHS})",
    re.IGNORECASE,
)
_LIKE_NUMBER = re.compile(r"[+-]?\d+([.,']\d+)+ ?[%€$£]?$|[€$£] ?[+-]?\d|[+-]?\d+([.,]\d+)? ?[%€$£]$")


def format_hint(name: str, cells: Cells) -> str:
    """A sentence about a column of texts that look like dates or numbers in a form that is not read as such; "" for all
    others. 1/2/2024 is January to some and February to others: said aloud, never guessed."""
    values = cells.values[:SAMPLE]
    if cells.codes is None or not values:
        return ""
    for pattern, what, remedy in (
        (_LIKE_DATE, "dates", "write all of them as 2024-02-29"),
        (_LIKE_NUMBER, "numbers", "write them as 1234.5, without other signs"),
    ):
        alike = [place for place, value in enumerate(values) if pattern.match(value)]
        read = cells.value_days() if what == "dates" else cells.value_numbers()
        unread = [values[place] for place in alike if np.isnan(read[place])]
        if 2 * len(alike) > len(values):
            return f"column {name} looks like {what} ({unread[0]!r}) but is taken as text; {remedy}" if unread else ""
    return ""
