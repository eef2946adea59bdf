"""Columns of labels and names as they come from users, turned into numbers 0..n-1."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed import rng
from kinfed.errors import DataError


def encode(values: Any, what: str) -> tuple[Tensor, list[str]]:
    """Distinct values in their natural order (numbers by size, text by alphabet) and the index of every entry."""
    column = _column(values, what)
    distinct, index = np.unique(column, return_inverse=True)
    return torch.from_numpy(index.astype(np.int64).reshape(-1)), [str(value) for value in distinct.tolist()]


def encode_labels(values: Any, what: str) -> tuple[Tensor, list[str]]:
    """`encode` for class labels: real numbers are refused unless they are whole."""
    column = _column(values, what)
    if column.dtype.kind == "f":
        whole = np.isfinite(column) & (column == np.round(column))
        if not whole.all():
            row = int(np.flatnonzero(~whole)[0])
            raise DataError(
                f"{what} should hold classes; entry {row} is {column[row]}. "
                "kinfed classifies: turn real values into classes first"
            )
        column = column.astype(np.int64)
    return encode(column, what)


def name_keys(key: Tensor, names: Sequence[str]) -> Tensor:
    """One key per name, whatever other names there are: a client's draws survive clients coming and going."""
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return rng.fold(key, torch.tensor([int.from_bytes(h, "little", signed=True) for h in hashes]))


def _column(values: Any, what: str) -> np.ndarray:
    column = np.asarray(values)
    if column.ndim != 1:
        raise DataError(f"{what} should be one value per example; got an array of shape {column.shape}")
    if column.dtype.kind == "O":
        missing = [row for row, value in enumerate(column) if value is None or value != value]
        if missing:
            raise DataError(f"{what} has {len(missing)} missing value(s), the first in entry {missing[0]}")
        column = column.astype(str)
    if column.dtype.kind not in "biufUS":
        raise DataError(f"{what} should hold text or numbers; got {column.dtype}")
    return column.astype(str) if column.dtype.kind == "S" else column
