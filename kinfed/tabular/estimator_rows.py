"""Rows as the scikit-learn estimators take them (kinfed.sklearn): whose they are, and how much they count."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_sample_weight

Array = npt.NDArray[Any]
ONLY = "all rows"  # the client of rows without one


def client_names(client: Any, rows: int) -> list[str]:
    """[rows] the client of every row as text; one and the same where none are given."""
    if client is None:
        return [ONLY] * rows
    names = [str(name) for name in np.asarray(client).ravel().tolist()]
    if len(names) != rows:
        raise ValueError(f"client names the owner of every row: {rows} rows, {len(names)} names")
    return names


def apart(X: Any, column: str, client: Any) -> tuple[Any, list[str]]:
    """A frame without its column of clients, and that column. Empty cells are no client: "" stands for them."""
    import narwhals

    if client is not None:
        raise ValueError(f"clients are named by the column {column!r} of X; leave the argument client out")
    try:
        frame = narwhals.from_native(X, eager_only=True)
    except TypeError:
        raise ValueError(f"client_column={column!r} is a column of a frame; X is of type {type(X).__name__}") from None
    if column not in frame.columns:
        raise ValueError(f"X has no column {column!r}, which names clients; it has {', '.join(frame.columns[:8])}")
    values = frame.get_column(column)
    missing = values.is_null().to_list()
    names = ["" if gap else str(value) for value, gap in zip(values.to_list(), missing, strict=True)]
    return frame.drop(column).to_native(), names


def rows_that_count(sample_weight: Any, X: Any, y: Array, client: Any) -> tuple[Any, Array, Any, Array | None]:
    """X, y, client and weights of rows with a weight above 0; no weights where all are equal."""
    if sample_weight is None:
        return X, y, client, None
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    some = np.flatnonzero(weights > 0)
    weights = None if len(np.unique(weights[some])) == 1 else weights[some]
    if len(some) == len(y):
        return X, y, client, weights
    client = None if client is None else np.asarray(client).ravel()[some]
    return _safe_indexing(X, some), y[some], client, weights
