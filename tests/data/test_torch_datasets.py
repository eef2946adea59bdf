"""Federations from torch data sets and from those of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from kinfed.data.federations.federation import Federation
from kinfed.errors import DataError


class Pairs(Dataset[Any]):
    def __init__(self, pairs: list[Any]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter([(torch.full((2,), 9.0), 1)] * 4)


def pairs(count: int, value: float) -> Pairs:
    return Pairs([(torch.full((2,), value), i % 2) for i in range(count)])


def test_every_client_has_its_own_examples() -> None:
    tensors = TensorDataset(torch.full((6, 2), 7.0), torch.arange(6) % 2)
    data = Federation.from_datasets({"a": pairs(8, 1.0), "b": tensors, 3: Stream()})
    assert data.names == ["3", "a", "b"]
    values = {"3": 9.0, "a": 1.0, "b": 7.0}
    for split in (data.train, data.test):
        for client, rows in zip(data.names, split.lists(), strict=True):
            assert (data.features.raw[rows] == values[client]).all()
    assert (data.train.count + data.test.count).tolist() == [4, 8, 6]
    assert data.num_classes == 2


def test_test_data_sets_are_tested_on() -> None:
    data = Federation.from_datasets({"a": pairs(3, 1.0), "b": pairs(4, 2.0)}, {"a": pairs(2, 5.0)})
    assert data.train.count.tolist() == [3, 4]
    assert data.test.count.tolist() == [2, 0]
    assert (data.features.raw[data.test.rows] == 5.0).all()


def test_examples_of_several_inputs() -> None:
    """As dicts with labels, which data sets of Hugging Face give, and as pairs of a tuple and y."""
    rows = [{"input_ids": [i, 2], "attention_mask": [1, 0], "labels": i % 2} for i in range(8)]
    data = Federation.from_datasets({"a": Pairs(rows), "b": Pairs(rows[:4])})
    assert data.features.shape_in_words == "input_ids [2], attention_mask [2]"
    assert data.labels.tolist() == [i % 2 for i in (*range(8), *range(4))]
    inputs = data.features.packing.unpack(data.features.raw)  # type: ignore[union-attr]
    assert inputs["input_ids"][:8, 0].tolist() == list(range(8))
    several = Pairs([((torch.full((3,), 0.5), torch.tensor(i)), i % 2) for i in range(4)])
    assert Federation.from_datasets({"a": several}).features.shape_in_words == "0 [3], 1 []"
    plain = Pairs([((0.5, 1.0), i % 2) for i in range(4)])  # numbers, not arrays: one input
    assert Federation.from_datasets({"a": plain}).features.shape == (2,)


def test_images_keep_their_bytes() -> None:
    images = Pairs([(torch.zeros(1, 4, 4, dtype=torch.uint8), torch.tensor(i % 2)) for i in range(8)])
    data = Federation.from_datasets({"a": images})
    assert data.features.raw.dtype == torch.uint8
    assert data.features.shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ({}, None, "got none"),
        ({"a": pairs(2, 1.0)}, {"b": pairs(2, 1.0)}, "client b has test data and no training data"),
        ({"a": pairs(0, 1.0)}, None, "data sets are empty"),
        ({"a": pairs(2, 1.0), "b": Pairs([(torch.zeros(3), 0)])}, None, r"some are \[2\] and some \[3\]"),
        ({"a": Pairs([(torch.zeros(3), 0), (torch.zeros(2), 0)])}, None, "examples of client a should all have one"),
        ({"a": Pairs([{"x": 1, "y": 0}])}, None, r"gives \['x', 'y'\] and no target; .* under the name labels"),
        ({"a": Pairs([5])}, None, r"should give pairs \(x, y\), or dicts of inputs with labels; it gives int"),
        ({"a": Pairs([{"x": [1], "label": 0}, {"z": [1], "label": 0}])}, None, r"some have \['x'\] and some \['z'\]"),
        ({"a": Pairs([{"x": [1], "label": 0}, {"x": [1, 2], "label": 0}])}, None, "inputs 'x' of client a should all"),
        (
            {"a": Pairs([{"x": [1], "labels": [0]}, {"x": [1], "labels": [0, 1]}])},
            None,
            "labels of client a should all",
        ),
        ({"a": Pairs([{"x": [1], "label": 0, "labels": 0}])}, None, "label are both names of the target"),
        ({"a": Pairs([(object(), 0)])}, None, "client a has object"),
        ({"a": TensorDataset(torch.zeros(3, 2))}, None, "has 1 tensors; give two, x and y"),
    ],
)
def test_what_is_no_data_set_of_examples(train: Any, test: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Federation.from_datasets(train, test)


# Hugging Face


def columns(rows: int, shift: int = 0) -> dict[str, list[Any]]:
    return {
        "site": [f"s{i % 2}" for i in range(rows)],
        "age": [float(i + shift) for i in range(rows)],
        "outcome": [i % 3 // 2 for i in range(rows)],
    }


def test_data_sets_of_hugging_face_are_tables() -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    kinds = datasets.Features(
        {
            "site": datasets.Value("string"),
            "age": datasets.Value("float64"),
            "outcome": datasets.ClassLabel(names=["well", "sick"]),
        }
    )
    roles = {"client_column": "site", "label_column": "outcome"}
    one = datasets.Dataset.from_dict(columns(40), features=kinds)
    data = Federation.from_table(one, **roles)
    assert data.class_names == ["sick", "well"]
    assert data.names == ["s0", "s1"]
    by_hand = columns(40)
    by_hand["outcome"] = ["sick" if value else "well" for value in by_hand["outcome"]]
    assert data.digest() == Federation.from_table(pa.table(by_hand), **roles).digest()
    shuffled = one.select(np.arange(39, -1, -1))  # by an index over the same rows
    assert Federation.from_table(shuffled, **roles).features.raw[0] == data.features.raw[39]
    split = datasets.DatasetDict({"train": one, "test": datasets.Dataset.from_dict(columns(6, 90), features=kinds)})
    data = Federation.from_table(split, **roles)
    assert data.train.count.tolist() == [20, 20]
    assert data.test.count.tolist() == [3, 3]
    with pytest.raises(DataError, match="in splits already"):
        Federation.from_table(split, split_column="age", **roles)


def test_what_is_no_mapping_of_clients_is_refused_in_words():
    with pytest.raises(DataError, match="which names the clients; got a list"):
        Federation.from_datasets([[(1.0, 0)]])
    with pytest.raises(DataError, match="their labels and the client of each; y and clients are missing"):
        Federation.from_arrays(([[1.0]], [0]))
