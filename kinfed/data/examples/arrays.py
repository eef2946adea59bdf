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
from kinfed.data.examples.features import Features
from kinfed.data.examples.packing import Packing
from kinfed.errors import DataError

LABELS = ("labels", "label")  # names of the target among inputs by name
Array = np.ndarray[Any, Any]


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


def read_features(x: Any, tokens: bool) -> Features:
    """Features of one array, or of several inputs: arrays by name or in a tuple."""
    if not isinstance(x, Mapping | tuple):
        return Features(as_features(x, tokens))
    if isinstance(x, Mapping) and (target := [name for name in LABELS if name in x]):
        raise DataError(f"x holds {target[0]}, which are the target and no input of the model; give them as y")
    packing, raw = Packing.of(x, "x")
    if tokens and raw.is_floating_point():
        raise DataError("tokens are whole numbers; of several inputs each keeps its kind, so leave tokens out")
    return Features(raw, packing=packing)


def split_labels(x: Any) -> tuple[Any, Any]:
    """Inputs by name without the target that stands among them, and that target; None if there is none."""
    named = [name for name in LABELS if name in x] if isinstance(x, Mapping) else []
    if len(named) > 1:
        raise DataError(f"{' and '.join(named)} are both names of the target; keep one")
    if not named:
        return x, None
    return {name: value for name, value in x.items() if name != named[0]}, x[named[0]]


def as_features(x: Any, tokens: bool) -> Tensor:
    if isinstance(x, Mapping | tuple):
        raise DataError(f"x should be one array with a row per example; got a {type(x).__name__} of {len(x)}")
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


def read_datasets(train: Datasets, test: Datasets | None) -> dict[str, Any]:
    """Read all examples of all clients, those for training first: arguments of `Federation.from_arrays`."""
    if not isinstance(train, Mapping):
        raise DataError(
            f"from_datasets takes {{client: dataset}}, which names the clients; got a {type(train).__name__}"
        )
    if not train:
        raise DataError("from_datasets takes a data set of every client, {client: dataset}; got none")
    if test is not None and (strangers := [client for client in test if client not in train]):
        raise DataError(f"client {strangers[0]} has test data and no training data; give it some, or leave it out")
    parts = [(str(client), *_read(dataset, client), False) for client, dataset in train.items()]
    parts += [(str(client), *_read(dataset, client), True) for client, dataset in (test or {}).items()]
    parts = [part for part in parts if len(part[2])]
    if not parts:
        raise DataError("the data sets are empty; a federation needs at least one example")
    names = _same_names([x for _, x, _, _ in parts])
    for name in names:
        _check_shapes({x[name].shape[1:] for _, x, _, _ in parts}, _examples(name))
    sizes = [len(y) for _, _, y, _ in parts]
    marks = {} if test is None else {"test_rows": np.repeat([is_test for *_, is_test in parts], sizes)}
    inputs = {name: np.concatenate([x[name] for _, x, _, _ in parts]) for name in names}
    y = np.concatenate([y for _, _, y, _ in parts])
    return marks | {"x": _as_given(inputs), "y": y, "clients": np.repeat([client for client, *_ in parts], sizes)}


Named = dict[str | int | None, Any]  # inputs by name, by place in a tuple, or under None the only one


def _inputs_of(x: Any) -> Named:
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, tuple) and x and all(isinstance(one, torch.Tensor | np.ndarray) for one in x):
        return dict(enumerate(x))
    return {None: x}


def _as_given(inputs: Named) -> Any:
    """The reverse of `_inputs_of`."""
    if None in inputs:
        return inputs[None]
    return tuple(inputs.values()) if 0 in inputs else inputs


def _same_names(several: list[Named]) -> list[str | int | None]:
    first = list(several[0])
    if other := next((list(x) for x in several if set(x) != set(first)), None):
        raise DataError(f"all examples should have the same inputs; some have {first} and some {other}")
    return first


def _examples(name: str | int | None) -> str:
    return "examples" if name is None else f"inputs {name!r}"


def _read(dataset: Dataset[Any], client: Any) -> tuple[Named, Array]:
    """Inputs [n, ...] by name, and y [n]."""
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) != 2:
            raise DataError(
                f"the data set of client {client} has {len(dataset.tensors)} tensors; give two, x and y, or pairs "
                "((a, b), y) of several inputs"
            )
        x, y = (tensor.detach().cpu().numpy() for tensor in dataset.tensors)
        return {None: x}, y
    items = list(dataset) if isinstance(dataset, IterableDataset) else [dataset[i] for i in range(_size(dataset))]
    if not items:
        return {None: np.zeros(0)}, np.zeros(0)
    pairs = [_pair(item, client) for item in items]
    names = _same_names([x for x, _ in pairs])
    for name in names:
        _check_shapes({x[name].shape for x, _ in pairs}, f"{_examples(name)} of client {client}")
    _check_shapes({np.shape(y) for _, y in pairs}, f"labels of client {client}")
    return {name: np.stack([x[name] for x, _ in pairs]) for name in names}, np.asarray([y for _, y in pairs])


def _check_shapes(shapes: set[tuple[int, ...]], what: str) -> None:
    if len(shapes) > 1:
        first, second, *_ = sorted(shapes, key=str)
        raise DataError(f"{what} should all have one shape; some are {list(first)} and some {list(second)}")


def _size(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise DataError(f"{type(dataset).__name__} does not say how many examples it has (__len__)") from None


def _pair(item: Any, client: Any) -> tuple[Named, Any]:
    if isinstance(item, Mapping):
        x, y = split_labels(item)
        if y is None:
            raise DataError(
                f"the data set of client {client} gives {list(item)} and no target; a dict of inputs has one under "
                f"the name {LABELS[0]}, or is part of a pair (inputs, y)"
            )
    elif not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"the data set of client {client} should give pairs (x, y), or dicts of inputs with {LABELS[0]}; it gives "
            f"{type(item).__name__}. Wrap it in one that does, or use Federation.from_arrays"
        )
    else:
        x, y = item
    inputs = _inputs_of(x)
    for value in inputs.values():
        if not isinstance(value, torch.Tensor | np.ndarray | int | float | list | tuple):
            raise DataError(
                f"examples should be tensors, arrays or numbers; client {client} has {type(value).__name__}. Give its "
                "data set a transform that makes tensors [channels, height, width] of images"
            )
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return arrays, y.item() if hasattr(y, "item") and not getattr(y, "ndim", 0) else np.asarray(y)
