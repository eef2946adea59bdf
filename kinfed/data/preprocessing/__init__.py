"""Tables as they are: what each column is, learnt as statistics that sites could send, and what it becomes."""

from __future__ import annotations

from kinfed.data.preprocessing.column_statistics import ColumnStatistics, ReadTable, TableStatistics
from kinfed.data.preprocessing.frames import as_table
from kinfed.data.preprocessing.table_preprocessing import EncodedRows, TablePreprocessing, parse_kinds

__all__ = [
    "ColumnStatistics",
    "EncodedRows",
    "ReadTable",
    "TablePreprocessing",
    "TableStatistics",
    "as_table",
    "parse_kinds",
]
