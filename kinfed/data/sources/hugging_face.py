"""Data sets of the package `datasets` (Hugging Face) as tables. Their rows are Arrow already, and the package is not
imported: its objects are told by what they can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from kinfed.errors import DataError

SPLIT_COLUMN = "split of the row"  # of several data sets by split


def is_hub_dataset(rows: Any) -> bool:
    """Whether this is a Dataset, or a DatasetDict of several by split."""
    if isinstance(rows, Mapping):
        return bool(rows) and all(is_hub_dataset(part) for part in rows.values())
    return hasattr(rows, "with_format") and hasattr(rows, "features") and hasattr(rows, "column_names")


def hub_table(rows: Any, options: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """The rows as a table, and its options: several data sets by split (train, validation, test) become one with a
    column that says which. Classes that have names get them."""
    if not isinstance(rows, Mapping):
        return _with_class_names(rows), dict(options)
    if options.get("split_column") is not None:
        raise DataError("the data set is in splits already; leave split_column out, or give one of its splits")
    parts = []
    for split, part in rows.items():
        table = _with_class_names(part)
        if SPLIT_COLUMN in table.column_names:
            raise DataError(f"a column of the data set is called {SPLIT_COLUMN!r}; rename it")
        parts.append(table.append_column(SPLIT_COLUMN, pa.array([str(split)] * table.num_rows)))
    return pa.concat_tables(parts, promote_options="default"), {**options, "split_column": SPLIT_COLUMN}


def _with_class_names(rows: Any) -> pa.Table:
    table: pa.Table = rows.with_format("arrow")[:]
    for name, feature in rows.features.items():
        names = getattr(feature, "names", None)
        if isinstance(names, list):  # a ClassLabel, stored as numbers
            values = [None if number is None or number < 0 else names[number] for number in table[name].to_pylist()]
            table = table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))
    return table
