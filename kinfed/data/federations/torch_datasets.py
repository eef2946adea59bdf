"""Torch data sets, one of each client, as arrays.

Every example is asked for once, in order, and kept as it came: what a data set computes anew at every access (random
crops, say) is fixed from then on. Random changes of training images are the setting `augment` of local training.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from kinfed.errors import DataError

Datasets = Mapping[Any, "Dataset[Any]"]


def read_datasets(train: Datasets, test: Datasets | None) -> dict[str, np.ndarray[Any, Any]]:
    """Read all examples of all clients, those for training first: arguments of `Federation.from_arrays`."""
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
    return marks | {
        "x": np.concatenate([x for _, (x, _), _ in parts]),
        "y": np.concatenate([y for _, (_, y), _ in parts]),
        "clients": np.repeat([client for client, _, _ in parts], sizes),
    }


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
