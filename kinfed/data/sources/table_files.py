"""Tables in files: CSV and Parquet, as Arrow tables."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from kinfed.data.sources import hub
from kinfed.errors import DataError

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".parquet")
# In a column of a CSV file whose other cells are all numbers, these words stand for an empty cell.
MISSING_WORDS = ("na", "n/a", "nan", "null", "none", "?", "-", ".", "unknown", "missing")


def is_table(name: str) -> bool:
    """Whether a name is meant as the path of a table."""
    return name.lower().endswith(SUFFIXES)


def read_table(path: Path) -> pa.Table:
    """A CSV or Parquet file. Column names differ."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give the path of a {', '.join(SUFFIXES)} file")
    table = hub.read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    try:
        names = table.column_names
    except UnicodeDecodeError as error:
        raise DataError(f"the names of the columns of {path} are not UTF-8: {error}; save the file as UTF-8") from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has several columns named {', '.join(twice)}; rename them")
    return table


def _read_csv(path: Path) -> pa.Table:
    separator = pa.csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    # Only an empty cell is missing: "NA" can be a country or a client.
    missing = pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True)
    try:
        table = pa.csv.read_csv(path, parse_options=separator, convert_options=missing)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path} as CSV: {error}") from error
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(place, field.name, _numbers_with_words(table.column(place)))
    return table


def _numbers_with_words(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A text column as numbers where all its cells are numbers or words for a missing one; else as it is."""
    try:
        trimmed = pc.utf8_trim_whitespace(column)
        is_word = pc.is_in(pc.utf8_lower(trimmed), value_set=pa.array(MISSING_WORDS))
        numbers = pc.if_else(is_word, pa.scalar(None, pa.string()), trimmed).cast(pa.float64())
    except pa.ArrowException:
        return column
    return column if numbers.null_count == len(numbers) else numbers
