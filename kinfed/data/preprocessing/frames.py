"""Rows in memory, as one Arrow table: frames, dictionaries of columns, arrays of numbers, and data sets of Hugging
Face's package `datasets`, which is not imported: its objects are told by what they can do.

Arrow is what everything becomes, because it knows categories, dates and missing cells and comes with kinfed. pandas,
polars and every other eager frame that narwhals knows are converted by narwhals; neither needs to be installed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kinfed.errors import DataError

SPLIT_COLUMN = "split of the row"  # of several data sets by split


def as_table(rows: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows as a table.

    Taken are a pyarrow table, a pandas, polars or other frame, a dictionary of columns (or of single values: one row),
    a list of such dictionaries (one each row), and an array [n, d] of numbers whose `columns` are known."""
    if isinstance(rows, pa.Table):
        return rows
    try:
        if isinstance(rows, Mapping):
            return pa.table({str(name): _as_column(values) for name, values in rows.items()})
        if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
            names = list(dict.fromkeys(str(name) for row in rows for name in row))
            return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
        if isinstance(rows, list | tuple | np.ndarray) or hasattr(rows, "detach"):
            return _from_array(np.asarray(rows), columns)
        return _from_frame(rows)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"these rows are not a table: {error}") from error


def _as_column(values: Any) -> pa.Array:
    single = isinstance(values, str | bytes) or not hasattr(values, "__len__")
    return pa.array([values] if single else list(values) if isinstance(values, tuple) else values, from_pandas=True)


def _from_array(array: np.ndarray[Any, Any], columns: Sequence[str] | None) -> pa.Table:
    if columns is None:
        raise DataError("an array has no column names; give a frame, or a dictionary of columns")
    if array.ndim == 1 and len(array) == len(columns):
        array = array[None]
    if array.ndim != 2 or array.shape[1] != len(columns):
        wanted = f"one column for each of {', '.join(columns)} ({len(columns)})"
        raise DataError(f"an array of rows has {wanted}; got shape {tuple(array.shape)}")
    if array.dtype.kind not in "biufO":
        raise DataError(f"an array of rows holds numbers; got {array.dtype}. Give a frame, or a dictionary of columns")
    return pa.table({name: pa.array(array[:, place].tolist()) for place, name in enumerate(columns)})


def _from_frame(rows: Any) -> pa.Table:
    import narwhals

    try:
        # Without pandas' index: rows of a part of a frame keep their old numbers, which are no column.
        return narwhals.maybe_reset_index(narwhals.from_native(rows, eager_only=True)).to_arrow()
    except TypeError:
        raise DataError(
            "rows come as a pandas, polars or pyarrow table, a dictionary of columns, or an array "
            f"of numbers; got {type(rows).__name__}"
        ) from None


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
