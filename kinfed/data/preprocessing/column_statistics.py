"""Statistics that a site sends of its columns: counts, sums and sets of its training rows, one small message per site.

Merging the messages of all sites gives what all rows in one place would give, whatever the order: counts are added,
moments are combined by the formulas of Chan, Golub and LeVeque (1979), sets of categories are united with their counts.
`collect` computes one message, or at once the merger of those of many sites; a property test holds the two together.

What leaves a site, by column: how many rows and missing cells there are, how many cells are numbers, dates or texts,
the mean of the numbers and their squared distances from it, how many different values there are, and for texts with
few different values these values with their counts. Texts with many different values stay; of them only counts leave.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from kinfed.data.preprocessing.cells import Cells, Codes, Kind, Numbers, read_cells, words
from kinfed.errors import DataError

CATEGORIES = 100  # more different texts than these are not categories
DECLARED_CATEGORIES = 10_000  # more than these even where the user says that a column holds categories
LONGEST_VALUE = 100  # characters; a longer text is no category
MOST_COLUMNS = 100_000
LACKING_SHARE, LACKING_ROWS = 0.15, 20  # a site of this many rows lacks a column if a smaller share have a value
LONGEST_NAME = 200  # characters of a column's name


@dataclass(frozen=True)
class ValueMoments:
    """Count of some numbers, their mean, and the sum of squared distances from it."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0

    def merge(self, other: ValueMoments) -> ValueMoments:
        if not self.count or not other.count:
            return self if self.count else other
        count, distance = self.count + other.count, other.mean - self.mean
        square = self.square + other.square + distance**2 * self.count * other.count / count
        return ValueMoments(count, self.mean + distance * other.count / count, square)

    @property
    def std(self) -> float:
        """1 for numbers that are all the same."""
        std = float(np.sqrt(self.square / max(self.count, 1)))
        return 1.0 if std <= 1e-12 * max(abs(self.mean), 1e-300) else std

    @property
    def constant(self) -> bool:
        return self.count > 0 and self.square <= self.count * (1e-12 * max(abs(self.mean), 1e-300)) ** 2


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of one column, at one site or at several."""

    rows: int = 0
    missing: int = 0
    numbers: int = 0  # cells that the file holds as numbers
    booleans: int = 0
    dates: int = 0
    texts: int = 0
    unreadable: int = 0  # pictures, lists, ...
    numeric_texts: int = 0  # of the texts
    date_texts: int = 0
    different: int = 0  # different values at each site, summed over sites; of texts and numbers
    words: int = 0  # in all texts
    empty_sites: int = 0  # sites without a value
    lacking_sites: int = 0  # sites that lack the column, by their rows: gaps are something else
    whole: bool = True  # all numbers are whole
    has_time: bool = False  # some date has a time of day
    values: ValueMoments = ValueMoments()  # of numbers, booleans and texts that are numbers
    days: ValueMoments = ValueMoments()  # of dates, in days since 1970-01-01
    categories: Mapping[str, int] | None = field(default_factory=dict)  # rows of each text; None: too many

    @property
    def present(self) -> int:
        return self.rows - self.missing

    def merge(self, other: ColumnStatistics, limit: int) -> ColumnStatistics:
        """`limit`: most categories."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return ColumnStatistics(
            **counts, whole=self.whole and other.whole, has_time=self.has_time or other.has_time,
            values=self.values.merge(other.values), days=self.days.merge(other.days),
            categories=_united(self.categories, other.categories, limit),
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Eight for each number, and the characters of categories."""
        return _FIXED_BYTES + sum(map(_category_bytes, self.categories or ()))


_COUNTS = tuple(spec.name for spec in dataclasses.fields(ColumnStatistics) if spec.type == "int")
# Six of moments, two flags, and whether there are categories; that a site lacks a column follows from its gaps.
_FIXED_BYTES = 8 * (len(_COUNTS) + 5) + 3


def lacks(rows: Any, present: Any) -> Any:
    """Whether sites lack a column with values in `present` of their `rows` training rows; numbers or arrays."""
    return (rows >= LACKING_ROWS) & (present < LACKING_SHARE * rows)


def _category_bytes(value: str) -> int:
    return len(value.encode()) + 8


@dataclass(frozen=True)
class TableStatistics:
    """The message of a site: all its columns. `merge` makes one of several."""

    rows: int
    columns: Mapping[str, ColumnStatistics]
    sites: int = 1
    large_sites: int = 0  # with enough rows to tell a column that they lack from gaps

    @classmethod
    def of_table(
        cls, table: pa.Table, names: Iterable[str], columns: Mapping[str, Kind], where: str
    ) -> TableStatistics:
        """Statistics of some columns of a whole table."""
        return ReadTable.read(table, names, columns, where).collect()[0]

    @classmethod
    def led_by_one(cls, table: pa.Table, names: Iterable[str], columns: Mapping[str, Kind], where: str) -> set[str]:
        """Columns of which a single number or day, in one row or in several, makes more than half of all squared
        distances from the mean, so that mean and deviation tell it."""
        cells = ReadTable.read(table, names, columns, where).cells
        return {name for name, one in cells.items() if any(map(_is_led, (one.as_numbers(), one.as_days())))}

    @classmethod
    def merged(cls, messages: Iterable[TableStatistics], columns: Mapping[str, Kind]) -> TableStatistics:
        """`columns`: kinds that the user declared."""
        return functools.reduce(lambda merged, message: merged.merge(message, columns), messages)

    def merge(self, other: TableStatistics, columns: Mapping[str, Kind]) -> TableStatistics:
        """A column that one of them lacks counts as missing in all its rows. `columns`: kinds that were declared."""
        names = dict.fromkeys([*self.columns, *other.columns])
        merged = {name: self._column(name).merge(other._column(name), category_limit(columns, name)) for name in names}
        large = self.large_sites + other.large_sites
        return TableStatistics(self.rows + other.rows, merged, self.sites + other.sites, large)

    def _column(self, name: str) -> ColumnStatistics:
        if (known := self.columns.get(name)) is not None:
            return known
        return ColumnStatistics(self.rows, self.rows, empty_sites=self.sites, lacking_sites=self.large_sites)

    @property
    def nbytes(self) -> int:
        return 8 + sum(len(name.encode()) + column.nbytes for name, column in self.columns.items())

    @property
    def columns_with_categories(self) -> list[str]:
        """Columns of which values leave, and not only counts and sums."""
        return [name for name, column in self.columns.items() if column.categories]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: object) -> TableStatistics:
        """DataError if it is none, or contradicts itself."""
        try:
            statistics = _reader().validate_json(json.dumps(record), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))[:100]
            raise DataError(f"statistics of columns that cannot be read: {place}: {problem['msg']}") from None
        except (RecursionError, TypeError, ValueError) as error:
            raise DataError(f"statistics of columns that cannot be read: {type(error).__name__}") from None
        if statistics.sites != 1 or statistics.rows < 0 or len(statistics.columns) > MOST_COLUMNS:
            raise DataError(f"statistics of one site, with at most {MOST_COLUMNS} columns, were asked for")
        if statistics.large_sites != int(lacks(statistics.rows, 0)):
            raise DataError(f"large_sites is 1 from {LACKING_ROWS} rows on; got {statistics.large_sites}")
        for name, column in statistics.columns.items():
            if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
                raise DataError(f"a column's name has 1 to {LONGEST_NAME} printable characters; got {name[:50]!r}")
            if (problem_text := _contradiction(column, statistics.rows)) is not None:
                raise DataError(f"column {name}: {problem_text}")
        return statistics

    def check_size(self, rows: int, largest_value: float) -> None:
        """Refuse what a site with these training rows and values up to `largest_value` cannot say. DataError."""
        if self.rows != rows:
            raise DataError(f"statistics of {self.rows} rows; the site has said that it has {rows}")
        for name, column in self.columns.items():
            for moments, largest in ((column.values, largest_value), (column.days, 4e6)):  # the year 9999 and more
                if abs(moments.mean) > largest or moments.square > 4 * moments.count * largest**2:
                    raise DataError(
                        f"column {name}: a mean of {moments.mean:.3g} and squares of {moments.square:.3g} cannot be "
                        f"those of {moments.count} values up to {largest:g} (largest_value)"
                    )


@functools.cache
def _reader() -> TypeAdapter[TableStatistics]:
    """Reader of records, made once: making it takes longer than reading with it."""
    return TypeAdapter(TableStatistics)


def _contradiction(column: ColumnStatistics, rows: int) -> str | None:
    """Why these are the statistics of no column; None if they may be."""
    counts = {name: getattr(column, name) for name in _COUNTS}
    if column.rows != rows or any(
        not 0 <= value <= rows
        for name, value in counts.items()
        if name not in ("words", "empty_sites", "lacking_sites")
    ):
        return f"counts must lie between 0 and its {rows} rows"
    if column.empty_sites != (column.missing == rows):
        return f"{column.missing} of {rows} cells are missing, and it is {'' if column.empty_sites else 'not '}empty"
    if column.lacking_sites != int(lacks(rows, rows - column.missing)):
        return f"{column.missing} of {rows} cells are missing: it is wrong whether the site lacks it"
    cells = column.numbers + column.booleans + column.dates + column.texts + column.unreadable
    if column.missing + cells != rows or column.words < 0:
        return f"{column.missing} missing and {cells} other cells are not {rows} rows"
    if column.values.count != column.numbers + column.booleans + column.numeric_texts:
        return f"{column.values.count} values counted of {column.numbers} numbers"
    if column.days.count != column.dates + column.date_texts:
        return f"{column.days.count} days counted of {column.dates} dates"
    for moments in (column.values, column.days):
        if not (np.isfinite(moments.mean) and np.isfinite(moments.square)) or moments.square < 0:
            return "moments must be finite, and squares not negative"
    if column.categories is None:
        return None
    if len(column.categories) > DECLARED_CATEGORIES or sum(column.categories.values()) != column.texts:
        return "rows of categories must be those with a text"
    if any(count < 1 or not 0 < len(value) <= LONGEST_VALUE for value, count in column.categories.items()):
        return f"categories have 1 to {LONGEST_VALUE} characters and a row each"
    return None


def category_limit(columns: Mapping[str, Kind], name: str) -> int:
    """Most different values of a column of categories."""
    return DECLARED_CATEGORIES if columns.get(name) == "category" else CATEGORIES


@dataclass(frozen=True)
class ReadTable:
    """The feature columns of a table, each read once. `columns` are kinds that the user declared; a column to skip is
    not read."""

    cells: Mapping[str, Cells]
    columns: Mapping[str, Kind]
    rows: int

    @classmethod
    def read(cls, table: pa.Table, names: Iterable[str], columns: Mapping[str, Kind], where: str) -> ReadTable:
        cells: dict[str, Cells] = {}
        for name in (name for name in names if columns.get(name) != "skip"):
            cells[name] = read_cells(table[name], f"column {name} of {where}")
            if columns.get(name) in ("category", "text") and cells[name].form in ("number", "boolean", "date"):
                cells[name] = cells[name].as_texts()
        return cls(cells, columns, table.num_rows)

    def take(self, rows: Codes) -> ReadTable:
        """Some rows of it."""
        return ReadTable({name: one.take(rows) for name, one in self.cells.items()}, self.columns, len(rows))

    def collect(
        self, rows: Codes | None = None, site: Codes | None = None, sites: int = 1
    ) -> tuple[TableStatistics, int]:
        """The statistics of some `rows` [m], and the bytes of the messages that they take: of one site, or with `site`
        [m] (numbers 0 .. sites - 1) what merging one message of every site gives."""
        index = np.arange(self.rows) if rows is None else rows
        owner = np.zeros(len(index), np.int64) if site is None else site
        columns: dict[str, ColumnStatistics] = {}
        size = 8 * sites
        for name, cells in self.cells.items():
            columns[name], values_bytes = _collect(cells, index, owner, sites, category_limit(self.columns, name))
            size += values_bytes + sites * (_FIXED_BYTES + len(name.encode()))
        large = int(lacks(np.bincount(owner, minlength=sites), 0).sum())
        return TableStatistics(len(index), columns, sites, large), size


def _is_led(values: Numbers) -> bool:
    known = values[np.isfinite(values)]
    if not len(known):
        return False
    _, value = np.unique(known, return_inverse=True)
    squares = np.bincount(value, weights=np.square(known - known.mean()))
    return bool(squares.max() > squares.sum() / 2)


def _collect(cells: Cells, rows: Codes, owner: Codes, sites: int, limit: int) -> tuple[ColumnStatistics, int]:
    """Statistics of one column, and the bytes of its categories in the messages."""
    present = cells.present()[rows]
    count, missing = int(present.sum()), int((~present).sum())
    here, site = rows[present], owner[present]
    empty = sites - len(np.unique(site))
    lacking = lacks(np.bincount(owner, minlength=sites), np.bincount(site, minlength=sites))
    base = ColumnStatistics(len(rows), missing, empty_sites=empty, lacking_sites=int(lacking.sum()))
    if cells.form == "unreadable":
        return ColumnStatistics(len(rows), unreadable=len(rows)), 0
    if not count:
        return base, 0
    if cells.codes is not None:
        return _collect_texts(cells, cells.codes[here], site, sites, limit, base)
    if cells.form == "date":
        days = cells.numbers[here]
        return replace(base, dates=count, days=_moments(days, site, sites), has_time=_has_time(days)), 0
    numbers = cells.numbers[here]
    values = _moments(_as_fed(numbers), site, sites)
    if cells.form == "boolean":
        return replace(base, booleans=count, values=values), 0
    whole = bool((numbers == np.round(numbers)).all())
    return replace(base, numbers=count, values=values, whole=whole, different=_distinct(numbers, site)), 0


def _collect_texts(
    cells: Cells, codes: Codes, site: Codes, sites: int, limit: int, base: ColumnStatistics
) -> tuple[ColumnStatistics, int]:
    values = cells.values
    pairs = np.unique(site * len(values) + codes)  # (site, value) that occur
    held, value_of_pair = np.divmod(pairs, len(values))
    most = int(np.bincount(held).max())
    counts = np.bincount(codes, minlength=len(values))
    occurring = np.flatnonzero(counts)
    short = all(len(values[code]) <= LONGEST_VALUE for code in occurring.tolist()[: limit + 1])
    categories: dict[str, int] | None = None
    if most <= limit and len(occurring) <= limit and short:
        categories = {values[code]: int(counts[code]) for code in occurring.tolist()}
    bytes_of_value = np.array([_category_bytes(value) for value in values])
    sends = np.bincount(held, minlength=sites) <= limit  # sites with more say nothing but that
    size = int(bytes_of_value[value_of_pair[sends[held]]].sum()) if short else 0
    numbers, days = cells.value_numbers()[codes], cells.value_days()[codes]
    numeric, dated = ~np.isnan(numbers), ~np.isnan(days)
    number_values, day_values = numbers[numeric], days[dated]
    word_counts = np.array([len(words(value)) for value in values])
    statistics = replace(
        base, texts=len(codes), numeric_texts=int(numeric.sum()), date_texts=int(dated.sum()), different=len(pairs),
        words=int(word_counts[codes].sum()), whole=bool((np.round(number_values) == number_values).all()),
        has_time=_has_time(day_values), days=_moments(day_values, site[dated], sites),
        values=_moments(_as_fed(number_values), site[numeric], sites), categories=categories,
    )  # fmt: skip
    return statistics, size


def _has_time(days: Numbers) -> bool:
    return bool((days != np.floor(days)).any())


def _as_fed(numbers: Numbers) -> Numbers:
    """Numbers as models see them, in float32: that is what the moments are of."""
    return numbers.astype(np.float32).astype(np.float64)


def _moments(values: Numbers, site: Codes, sites: int) -> ValueMoments:
    """Those of every site, combined."""
    if not len(values):
        return ValueMoments()
    count = np.bincount(site, minlength=sites)
    mean = np.bincount(site, values, sites) / np.maximum(count, 1)
    # Two passes: the one-pass formula cancels for values far from zero (years, prices).
    square = np.bincount(site, (values - mean[site]) ** 2, sites)
    common = float((count * mean).sum() / len(values))
    return ValueMoments(len(values), common, float(square.sum() + (count * (mean - common) ** 2).sum()))


def _distinct(values: Numbers, site: Codes) -> int:
    """Different values at each site, summed."""
    order = np.lexsort((values, site))
    same = (np.diff(values[order]) == 0) & (np.diff(site[order]) == 0)
    return len(values) - int(same.sum())


def _united(a: Mapping[str, int] | None, b: Mapping[str, int] | None, limit: int) -> Mapping[str, int] | None:
    if a is None or b is None:
        return None
    union = {value: a.get(value, 0) + b.get(value, 0) for value in dict.fromkeys([*a, *b])}
    return union if len(union) <= limit else None
