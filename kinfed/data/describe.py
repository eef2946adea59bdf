"""Who holds what: class counts, sizes and how far clients are from the whole, for people and for run folders.

`emd` is the distance sum_y |p_k(y) - p(y)| between a client's class distribution and that of all training data,
in [0, 2]. `emd_code` is what FedFomo's released function computes: classes that both distributions contain count
twice, so one class of ten is 2.70 instead of 1.80. Published tables use `emd_code` (P-11); compare like with like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from kinfed.data.features import Features
from kinfed.data.federation import SPLITS, Federation
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
        for split in SPLITS:
            counts = getattr(description, split)
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


def describe(federation: Federation) -> Description:
    counts = {split: federation.class_counts(split) for split in SPLITS}
    return Description(
        names=list(federation.names),
        num_classes=federation.num_classes,
        class_names=federation.class_names,
        train=counts["train"].tolist(),
        val=counts["val"].tolist(),
        test=counts["test"].tolist(),
        groups=None if federation.groups is None else federation.groups.tolist(),
        group_names=federation.group_names,
        emd=emd(counts["train"]).tolist(),
        emd_code=emd_code(counts["train"]).tolist(),
        description=federation.description,
        notes=list(federation.notes),
        inputs=_inputs(federation.features),
    )


def _inputs(features: Features) -> dict[str, Any]:
    scale = {"mean": features.mean, "std": features.std}
    plain = {name: None if value is None else value.tolist() for name, value in scale.items()}
    return {"shape": list(features.shape), "tokens": features.is_tokens} | plain


def emd(counts: Tensor) -> Tensor:
    """[K] distance of every client's class distribution from that of all clients together; counts [K, C]."""
    own, whole = _distributions(counts)
    return (own - whole).abs().sum(1)


def emd_code(counts: Tensor) -> Tensor:
    """[K] the same with classes in both supports counted twice, as FedFomo's released code does."""
    own, whole = _distributions(counts)
    times = (own > 0).to(torch.float64) + (whole > 0).to(torch.float64)
    return ((own - whole).abs() * times).sum(1)


def _distributions(counts: Tensor) -> tuple[Tensor, Tensor]:
    exact = counts.to(torch.float64)
    whole = exact.sum(0)
    return exact / exact.sum(1, keepdim=True).clamp_min(1), whole / whole.sum().clamp_min(1)
