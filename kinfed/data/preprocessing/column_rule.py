"""The rule by which a column becomes a number, categories, a date, a text, or is left out. In this order:

  1. what the user declared (`--columns age=number,zip=category,note=skip`)
  2. pictures, lists and the like, columns without a value in any training row, and the index that pandas writes
     into Parquet files, are left out
  3. a column with one value in all training rows is left out
  4. numbers stay numbers, false and true become 0 and 1, dates stay dates (texts such as 2024-02-29 too)
  5. texts with more than 100 different values, of which 99 % but not all are numbers, are numbers, with the others
     missing; so are columns with numbers at some sites and texts that are numbers at others
  6. identifiers are left out: texts of less than three words that all differ at every site, and whole numbers that all
     differ and are called id, nr, number, index, row, patient, case, ..., from 20 rows; by any name, whole numbers that
     all differ and run on (1001, 1002, ...), from 100 rows
  7. texts with at most 100 different values (over all sites) of at most 100 characters are categories. Rare ones are
     pooled as "other": in fewer than 5 training rows and in fewer than 1 % of them
  8. all other texts become scores of their words, where rows and labels are in one place (text_scores.py)

Everything is decided by statistics that sites can send (column_statistics.py).
"""

import re

from kinfed.data.preprocessing import encodings
from kinfed.data.preprocessing.cells import Kind
from kinfed.data.preprocessing.column_statistics import CATEGORIES, DECLARED_CATEGORIES, ColumnStatistics
from kinfed.data.preprocessing.encodings import DECLARED, Encoding, SkippedColumn
from kinfed.data.preprocessing.text_scores import TextScores
from kinfed.errors import DataError

RARE_ROWS, RARE_SHARE = 5, 0.01
IDENTIFIER_ROWS = 20
RUNNING_ROWS = 100
RUNNING_DENSITY = 0.5, 1.05  # rows per whole number in the range of a running number; some are test rows
CODES_AT_SITE = 10  # different whole numbers up to which they may be codes
CODES_ROWS = 50  # in fewer rows nothing is said of codes
CODES = "whole numbers, few of them different"
LONG_TEXTS = (
    "scores of long texts are learnt for classes, numbers and counts where all rows are in one place; elsewhere a "
    "model that reads texts takes them (text_column)"
)
_IDENTIFIER_NAME = re.compile(
    r"(^|[_\W])(id|ids|nr|nbr|no|num|number|nummer|numero|index|idx|key|uuid|guid|mrn|row|record|case|patient|subject"
    r"|encounter)$|(?-i:[a-z](ID|Id|Nr|No|Num|Number|Nummer|Index|Key)$)|^$|^unnamed: ?\d+$",
    re.IGNORECASE,
)

_PANDAS_INDEX = re.compile(r"__index_level_\d+__$")


def choose_encoding(
    name: str, column: ColumnStatistics, declared: Kind | None, standardize: bool, sites: int = 1,
    texts: TextScores | None = None,
) -> Encoding | SkippedColumn:  # fmt: skip
    """Choose what a column becomes, and why. Without scaling nothing is kept of numbers that have no gaps; without
    `texts`, which learns scores of long texts, these are left out."""
    if declared == "skip":
        return SkippedColumn(name, DECLARED)
    if column.unreadable:
        return SkippedColumn(name, "holds images, lists or the like (a column of images is chosen with image_column)")
    if not column.present:
        return SkippedColumn(name, "has no value in any training row")
    if declared is None and _PANDAS_INDEX.match(name):
        return SkippedColumn(name, "is the index of a pandas frame")
    kind, reason = _kind(name, column, sites) if declared is None else (declared, DECLARED)
    if kind == "number":
        return _number(name, column, reason, standardize)
    if kind == "text":
        scores = None if texts is None else texts.learn(name, reason, column.empty_sites)
        return SkippedColumn(name, f"{reason}; {LONG_TEXTS}") if scores is None else scores
    if kind == "skip":
        return SkippedColumn(name, reason)
    return (_date if kind == "date" else _category)(name, column, reason)


def _kind(name: str, column: ColumnStatistics, sites: int) -> tuple[Kind, str]:
    present = column.present
    all_differ = column.different == present >= IDENTIFIER_ROWS
    if not column.texts:
        if column.dates:
            if column.dates == present:
                return "date", "dates"
            return "skip", "holds dates at some sites, numbers at others"
        if column.booleans == present:
            return "number", "false and true"
        if all_differ and column.whole and _IDENTIFIER_NAME.search(name):
            return "skip", f"all {present:,} values differ, and the name says so: an identifier"
        if all_differ and column.whole and _runs_on(column):
            return "skip", (
                f"all {present:,} values differ and are consecutive: a running number (if not, declare {name}=number)"
            )
        return "number", CODES if _may_be_codes(column, sites) else "numbers"
    if column.dates + column.date_texts == present:
        return "date", "texts that are dates"
    if column.dates:
        return "skip", "holds dates at some sites, other values at others"
    numeric = column.numbers + column.booleans + column.numeric_texts
    mostly_numbers = numeric >= (1 - encodings.STRAY_TEXTS) * present
    if column.numbers and mostly_numbers:
        return "number", "numbers at some sites, texts that are numbers at others"
    if column.numbers or column.booleans:
        return "skip", (
            f"holds numbers at some sites and texts at others; make them alike, or declare it: {name}=number or "
            f"{name}=category"
        )
    if column.categories is None and mostly_numbers and numeric < present:
        # Texts that are all numbers are meant as texts: postal codes.
        others = f"{present - numeric} others count as missing"
        return "number", f"{numeric / present:.1%} of its texts are numbers; {others}"
    if all_differ and column.words < 3 * present:
        return "skip", f"all {present:,} texts differ: an identifier"
    if column.categories is not None:
        return "category", f"texts with {len(column.categories)} different values"
    hint = f"; {numeric / present:.0%} of them are numbers: {name}=number takes the others as missing"
    return "text", f"texts with more than {CATEGORIES} different values" + (hint if numeric > present / 2 else "")


def _runs_on(column: ColumnStatistics) -> bool:
    """Whether whole numbers that differ at every site fill most of their range. Running numbers have the deviation
    range / √12; with more rows than numbers in the range, sites share values, and these are no identifiers."""
    least, most = RUNNING_DENSITY
    return column.present >= RUNNING_ROWS and least <= column.present / (12**0.5 * column.values.std) <= most


def _may_be_codes(column: ColumnStatistics, sites: int) -> bool:
    """Whether numbers could stand for categories: whole, and only a few different ones at a site, but more than two."""
    filled = sites - column.empty_sites
    few = 2 * filled < column.different <= CODES_AT_SITE * filled
    return few and column.whole and column.present >= max(CODES_ROWS, 2 * column.different)


def _number(
    name: str, column: ColumnStatistics, reason: str, standardize: bool
) -> encodings.NumberEncoding | SkippedColumn:
    values = column.values
    gaps = values.count < column.rows
    if not values.count:
        raise DataError(f"column {name} is declared a number, and no training row holds one; declare {name}=skip")
    if values.constant and not gaps:
        return SkippedColumn(name, f"has the same value in all training rows ({values.mean:g})")
    if not standardize and not gaps:
        return encodings.NumberEncoding(name, reason, None, 1.0, False)
    return encodings.NumberEncoding(
        name, reason, values.mean, values.std, gaps, values.constant, values.count < column.present, column.empty_sites
    )


def _date(name: str, column: ColumnStatistics, reason: str) -> encodings.DateEncoding | SkippedColumn:
    days = column.days
    if days.count < column.present:
        raise DataError(
            f"column {name} is declared a date, and {column.present - days.count} of its {column.present} cells are "
            "none; write dates as 2024-02-29, or leave cells empty"
        )
    gaps = column.missing > 0
    if days.constant and not gaps:
        return SkippedColumn(name, "has the same date in all training rows")
    return encodings.DateEncoding(name, reason, days.mean, days.std, gaps, column.has_time, column.empty_sites)


def _category(name: str, column: ColumnStatistics, reason: str) -> encodings.CategoryEncoding | SkippedColumn:
    if column.categories is None:
        raise DataError(
            f"column {name} is declared a category, and has more than {DECLARED_CATEGORIES:,} different values, or "
            f"some of more than 100 characters; declare {name}=text"
        )
    gaps = column.missing > 0
    if len(column.categories) == 1 and not gaps:
        return SkippedColumn(name, f"has the same value in all training rows ({next(iter(column.categories))!r})")
    is_rare = {value: n < RARE_ROWS and n < RARE_SHARE * column.rows for value, n in column.categories.items()}
    frequent = sorted(value for value, rare in is_rare.items() if not rare)
    pooled = sum(is_rare.values())
    most_frequent = min(column.categories, key=lambda value: (-column.categories[value], value))  # type: ignore[index]
    if pooled:
        reason += f", {pooled} of them rare"
    return encodings.CategoryEncoding(
        name, reason, tuple(frequent), pooled > 0, gaps, most_frequent, column.empty_sites
    )
