"""Arrays and columns as they come from users: checked, and turned into tensors."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.errors import DataError


def encode(values: Any, what: str) -> tuple[Tensor, list[str]]:
    """Distinct values in their natural order (numbers by size, text by alphabet) and the index of every entry."""
    column = column_of(values, what)
    distinct, index = np.unique(column, return_inverse=True)
    return torch.from_numpy(index.astype(np.int64).reshape(-1)), [str(value) for value in distinct.tolist()]


def encode_labels(values: Any, what: str) -> tuple[Tensor, list[str]]:
    """`encode` for class labels: real numbers are refused unless they are whole."""
    column = column_of(values, what)
    if column.dtype.kind == "f":
        whole = np.isfinite(column) & (column == np.round(column))
        if not whole.all():
            row = int(np.flatnonzero(~whole)[0])
            raise DataError(
                f"{what} should hold classes; entry {row} is {column[row]}. To predict a number, --task regression; "
                "otherwise turn real values into classes first"
            )
        column = column.astype(np.int64)
    return encode(column, what)


def name_keys(key: Tensor, names: Sequence[str]) -> Tensor:
    """One key per name, whatever other names there are: a client's draws survive clients coming and going."""
    hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    return rng.fold(key, torch.tensor([int.from_bytes(h, "little", signed=True) for h in hashes]))


def as_features(x: Any, tokens: bool) -> Tensor:
    array = np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise DataError(f"x should hold numbers; got {array.dtype}")
    if array.ndim == 0:
        raise DataError("x should hold one row per example; got a single number")
    if array.ndim == 1:
        array = array[:, None]
    if tokens:
        if array.dtype.kind not in "iu":
            raise DataError(f"tokens are whole numbers; got {array.dtype}")
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array.copy() if array.dtype == np.uint8 else array.astype(np.float32))


def groups_of(names: list[str], groups: Mapping[Any, Any] | None) -> tuple[Tensor | None, list[str] | None]:
    if groups is None:
        return None, None
    by_name = {str(label): group for label, group in groups.items()}
    if lacking := [name for name in names if name not in by_name]:
        which = f"{len(lacking)} of {len(names)} clients (first: {lacking[0]})"
        raise DataError(f"groups lacks {which}; give every client a group")
    return encode([by_name[name] for name in names], "groups")


def column_of(values: Any, what: str) -> np.ndarray:
    """[N] text, numbers or booleans, one value per example; gaps among objects are refused."""
    column = np.asarray(values)
    if column.ndim != 1:
        raise DataError(f"{what} should be one value per example; got an array of shape {column.shape}")
    if column.dtype.kind == "O":
        if missing := [row for row, value in enumerate(column) if value is None or value != value]:
            raise DataError(f"{what} has {len(missing)} missing value(s), the first in entry {missing[0]}")
        column = column.astype(str)
    if column.dtype.kind not in "biufUS":
        raise DataError(f"{what} should hold text or numbers; got {column.dtype}")
    return column.astype(str) if column.dtype.kind == "S" else column
