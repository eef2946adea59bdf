"""Tables in files: CSV and Parquet, as Arrow tables.

CSV files are in UTF-8, with or without a byte order mark, or in an encoding that was named. Cells are separated by what
separates the names in the first line: comma, semicolon, tab or bar. A column whose cells are all numbers but for words
that stand for an empty one (`MISSING_WORDS`) holds numbers. Numbers may have decimal commas, throughout their column;
where commas separate cells, 1,234 may as well be a thousand and some, and a column of such numbers stays text.
"""

import codecs
import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from kinfed.data.sources import hub
from kinfed.errors import ConfigError, DataError

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".parquet")
# In a column of a CSV file whose other cells are all numbers, these words stand for an empty cell.
MISSING_WORDS = ("na", "n/a", "nan", "null", "none", "?", "-", ".", "unknown", "missing")
SEPARATORS = (",", ";", "\t", "|")
WORKBOOKS = (".xlsx", ".xls", ".ods", ".numbers")
_OTHER_ENCODING = "say which it is in with --encoding (latin-1, cp1252), or save the file as UTF-8"
_THOUSANDS = r"^[+-]?\d{1,3}(,\d{3})+$"


def is_table(name: str) -> bool:
    """Whether a name is meant as the path of a table."""
    return name.lower().endswith(SUFFIXES)


def read_table(path: Path, encoding: str = "utf-8") -> pa.Table:
    """A CSV file in this encoding, or a Parquet file. Column names differ."""
    if not path.exists():
        raise DataError(f"{path} does not exist; give the path of a {', '.join(SUFFIXES)} file")
    if path.suffix.lower() in WORKBOOKS:
        raise DataError(f"{path} is a workbook, and tables are CSV or Parquet files; save its sheet as CSV in UTF-8")
    table = hub.read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path, encoding)
    try:
        names = table.column_names
    except UnicodeDecodeError as error:
        raise DataError(f"the names of the columns of {path} are not UTF-8: {error}; {_OTHER_ENCODING}") from None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path} has several columns named {', '.join(twice)}; rename them")
    return table


def _read_csv(path: Path, encoding: str) -> pa.Table:
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ConfigError(f"encoding: Python knows no encoding {encoding!r}; such are utf-8, latin-1, cp1252") from None
    # Only an empty cell is missing: "NA" can be a country or a client.
    missing = pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True)
    try:
        separator = _separator(path, encoding)
        table = pa.csv.read_csv(
            path, pa.csv.ReadOptions(encoding=encoding), pa.csv.ParseOptions(delimiter=separator), missing
        )
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in the encoding {encoding}: {error}; {_OTHER_ENCODING}") from None
    except (OSError, pa.ArrowException) as error:
        remedy = ". Every line needs as many cells as the first; put texts that contain the separator in quotes"
        raise DataError(f"cannot read {path} as CSV: {error}{remedy if 'Expected' in str(error) else ''}") from error
    for place, field in enumerate(table.schema):
        if pa.types.is_binary(field.type):
            raise DataError(f"column {field.name} of {path} holds texts that are not UTF-8; {_OTHER_ENCODING}")
        if pa.types.is_string(field.type):
            table = table.set_column(place, field.name, _numbers_with_words(table.column(place), separator))
    return table


def _separator(path: Path, encoding: str) -> str:
    """Separator of the names in the first line; of several the most frequent."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        names = re.sub(r'"[^"]*"', "", file.readline(1_000_000).decode(encoding, "replace"))
    return max(SEPARATORS, key=names.count)  # the first of equals


def _numbers_with_words(column: pa.ChunkedArray, separator: str) -> pa.ChunkedArray:
    """A text column as numbers where all its cells are numbers or words for a missing one; else as it is."""
    try:
        trimmed = pc.utf8_trim_whitespace(column)
        is_word = pc.is_in(pc.utf8_lower(trimmed), value_set=pa.array(MISSING_WORDS))
        cells = pc.if_else(is_word, pa.scalar(None, pa.string()), trimmed)
        numbers = _with_points(cells, separator).cast(pa.float64())
    except pa.ArrowException:
        return column
    return column if numbers.null_count == len(numbers) else numbers


def _with_points(cells: pa.ChunkedArray, separator: str) -> pa.ChunkedArray:
    """Decimal commas as points, where they can be nothing else."""
    commas = cells.filter(pc.match_substring(cells, ","))
    if not len(commas) or pc.any(pc.match_substring(cells, ".")).as_py():
        return cells
    if separator == "," and pc.all(pc.match_substring_regex(commas, _THOUSANDS)).as_py():
        return cells
    return pc.replace_substring(cells, ",", ".")
