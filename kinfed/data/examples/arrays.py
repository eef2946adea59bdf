"""Arrays, columns and torch data sets as they come from users: checked, and turned into tensors or arrays.

Every example of a data set is asked for once, in order, and kept as it came: what it computes anew at every access
(random crops, say) is fixed from then on. Random changes of training images are the setting `augment` of local
training."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

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
    if isinstance(x, tuple):
        raise DataError(f"x should be one array with a row per example; got a tuple of {len(x)}")
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


Datasets = Mapping[Any, "Dataset[Any]"]


def read_datasets(train: Datasets, test: Datasets | None) -> dict[str, np.ndarray[Any, Any]]:
    """Read all examples of all clients, those for training first: arguments of `Federation.from_arrays`."""
    if not isinstance(train, Mapping):
        raise DataError(
            f"from_datasets takes {{client: dataset}}, which names the clients; got a {type(train).__name__}"
        )
    if not train:
        raise DataError("from_datasets takes a data set of every client, {client: dataset}; got none")
    if test is not None and (strangers := [client for client in test if client not in train]):
        raise DataError(f"client {strangers[0]} has test data and no training data; give it some, or leave it out")
    parts = [(str(client), _read(dataset, client), False) for client, dataset in train.items()]
    parts += [(str(client), _read(dataset, client), True) for client, dataset in (test or {}).items()]
    _check_shapes({x.shape[1:] for _, (x, _), _ in parts if len(x)}, "examples")
    parts = [part for part in parts if len(part[1][0])]
    if not parts:
        raise DataError("the data sets are empty; a federation needs at least one example")
    sizes = [len(x) for _, (x, _), _ in parts]
    marks = {} if test is None else {"test_rows": np.repeat([is_test for _, _, is_test in parts], sizes)}
    x, y = (np.concatenate([pair[place] for _, pair, _ in parts]) for place in (0, 1))
    return marks | {"x": x, "y": y, "clients": np.repeat([client for client, _, _ in parts], sizes)}


def _read(dataset: Dataset[Any], client: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x [n, ...] and y [n]."""
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) != 2:
            raise DataError(f"the data set of client {client} has {len(dataset.tensors)} tensors; give two, x and y")
        x, y = (tensor.detach().cpu().numpy() for tensor in dataset.tensors)
        return x, y
    items = list(dataset) if isinstance(dataset, IterableDataset) else [dataset[i] for i in range(_size(dataset))]
    if not items:
        return np.zeros(0), np.zeros(0)
    pairs = [_pair(item, client) for item in items]
    _check_shapes({x.shape for x, _ in pairs}, f"examples of client {client}")
    return np.stack([x for x, _ in pairs]), np.asarray([y for _, y in pairs])


def _check_shapes(shapes: set[tuple[int, ...]], what: str) -> None:
    if len(shapes) > 1:
        first, second, *_ = sorted(shapes, key=str)
        raise DataError(f"{what} should all have one shape; some are {list(first)} and some {list(second)}")


def _size(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise DataError(f"{type(dataset).__name__} does not say how many examples it has (__len__)") from None


def _pair(item: Any, client: Any) -> tuple[np.ndarray[Any, Any], Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"the data set of client {client} should give pairs (x, y); it gives {type(item).__name__}. Wrap it in one "
            "that does, or use Federation.from_arrays"
        )
    x, y = item
    if not isinstance(x, torch.Tensor | np.ndarray | int | float | list | tuple):
        raise DataError(
            f"examples should be tensors, arrays or numbers; client {client} has {type(x).__name__}. Give its data set "
            "a transform that makes tensors [channels, height, width] of images"
        )
    return np.asarray(x), y.item() if hasattr(y, "item") else y
