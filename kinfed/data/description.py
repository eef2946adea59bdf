"""Who holds what in plain values: the content of federation-<seed>.json. Needs no torch; describe.py computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kinfed.errors import StorageError


@dataclass(frozen=True)
class Description:
    """Plain values only: `to_json` is the content of federation-<seed>.json, `from_json` reads it back."""

    names: list[str]
    num_classes: int
    class_names: list[str] | None
    train: list[list[int]]  # [K][C] examples of every class at every client
    val: list[list[int]]
    test: list[list[int]]
    groups: list[int] | None
    group_names: list[str] | None
    emd: list[float]  # [K]
    emd_code: list[float]  # [K]
    description: dict[str, Any]  # data set, partition and their options
    notes: list[str]
    inputs: dict[str, Any]  # what models are fed: shape of an example, and (x - mean) / std; for clients who join later

    @property
    def num_clients(self) -> int:
        return len(self.names)

    @property
    def class_labels(self) -> list[str]:
        """[C] names of the classes; their numbers where they have no names."""
        return self.class_names or [str(number) for number in range(self.num_classes)]

    def sizes(self, split: str = "train") -> list[int]:
        """[K] examples of every client."""
        return [sum(counts) for counts in getattr(self, split)]

    @property
    def classes_held(self) -> list[int]:
        """How many classes occur in every client's training data."""
        return [sum(count > 0 for count in counts) for counts in self.train]

    @property
    def mean_emd(self) -> float:
        return sum(self.emd) / len(self.emd)

    @property
    def mean_emd_code(self) -> float:
        return sum(self.emd_code) / len(self.emd_code)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"mean_emd": self.mean_emd, "mean_emd_code": self.mean_emd_code}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> Description:
        """A description from what `to_json` gave; StorageError, with `where` as the name of the file, for all else."""
        fields = {field.name: record[field.name] for field in dataclasses.fields(cls) if field.name in record}
        try:
            description = TypeAdapter(cls).validate_python(fields)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise StorageError(f"{where} does not describe a federation: {place}: {problem['msg']}") from None
        clients, classes = description.num_clients, description.num_classes
        splits = {"train": description.train, "val": description.val, "test": description.test}
        for split, counts in splits.items():
            widths = {len(row) for row in counts}
            if len(counts) != clients or widths - {classes}:
                raise StorageError(
                    f"{where}: {split} should hold {clients} clients with {classes} counts each, "
                    f"got {len(counts)} clients with {sorted(widths)} counts"
                )
        lists = {"groups": description.groups, "emd": description.emd, "emd_code": description.emd_code}
        for name, values in lists.items():
            if values is not None and len(values) != clients:
                raise StorageError(f"{where}: {len(values)} {name} given for {clients} clients")
        if description.class_names is not None and len(description.class_names) != classes:
            raise StorageError(f"{where}: {len(description.class_names)} class names given for {classes} classes")
        return description
