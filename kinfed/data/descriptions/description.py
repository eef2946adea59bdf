"""A federation in plain values: the content of federation-<seed>.json. Needs no torch; describe.py computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kinfed.data.examples.problem import HasProblem, Problem
from kinfed.errors import DataError, StorageError


@dataclass(frozen=True, repr=False)
class Description(HasProblem):
    """Plain values only: `to_json` is the content of federation-<seed>.json, `from_json` reads it back."""

    names: list[str]
    problem: Problem
    train: list[list[int]]  # [K][C] examples of every class at every client; [K][1] where there are no classes
    val: list[list[int]]
    test: list[list[int]]
    groups: list[int] | None
    group_names: list[str] | None
    emd: list[float] | None  # [K]; None where there are no classes
    emd_code: list[float] | None  # [K]
    description: dict[str, Any]  # data set, partition and their options
    notes: list[str]
    inputs: dict[str, Any]  # what models are fed: shape of an example, and what columns became, or (x - mean) / std
    targets: list[tuple[float, float]] | None = None  # [K] mean and deviation of the training target of a regression
    listed: list[int] | None = None  # numbers of the clients that the lists above are of; None: all of them
    clients: int | None = None  # how many there are in all, where not all are listed

    def __repr__(self) -> str:
        return f"<Description {self.in_words()}>"

    def _repr_html_(self) -> str:
        from kinfed.data.descriptions.description_html import description_html

        return description_html(self)

    def in_words(self) -> str:
        dataset, partition = self.description.get("dataset", "data"), self.description.get("partition", "given")
        sizes = ((split, sum(self.sizes(split))) for split in ("train", "val", "test"))
        counts = " + ".join(f"{total:,} {split}" for split, total in sizes if total)
        clients = f"{self.num_clients:,} clients, {self.problem.in_words()}"
        return f"{dataset}, partition {partition}: {clients}, {counts} examples"

    @property
    def num_clients(self) -> int:
        """Number of all clients, listed or not."""
        return len(self.names) if self.clients is None else self.clients

    @property
    def class_labels(self) -> list[str]:
        """[C] names of the classes; their numbers where they have no names."""
        return self.problem.class_labels

    def sizes(self, split: str = "train") -> list[int]:
        """[K] examples of every client."""
        return [sum(counts) for counts in getattr(self, split)]

    @property
    def classes_held(self) -> list[int]:
        """[K] number of classes that occur in a client's training data."""
        return [sum(count > 0 for count in counts) for counts in self.train]

    @property
    def mean_emd(self) -> float | None:
        return None if self.emd is None else sum(self.emd) / len(self.emd)

    @property
    def mean_emd_code(self) -> float | None:
        return None if self.emd_code is None else sum(self.emd_code) / len(self.emd_code)

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # asdict would copy all
        means = {"mean_emd": self.mean_emd, "mean_emd_code": self.mean_emd_code}
        return fields | {"problem": dataclasses.asdict(self.problem)} | means

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> Description:
        """A description from what `to_json` gave; StorageError, with `where` as the name of the file, for all else."""
        fields = {field.name: record[field.name] for field in dataclasses.fields(cls) if field.name in record}
        try:
            if "problem" not in fields and "num_classes" in record:  # written before there were regressions
                fields["problem"] = Problem.of_classes(record["num_classes"], record.get("class_names"))
            description = TypeAdapter(cls).validate_python(fields)
        except (DataError, TypeError) as error:
            raise StorageError(f"{where} does not describe a federation: problem: {error}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise StorageError(f"{where} does not describe a federation: {place}: {problem['msg']}") from None
        clients, classes = len(description.names), max(description.num_classes, 1)
        for split in ("train", "val", "test"):
            counts = getattr(description, split)
            widths = {len(row) for row in counts}
            if len(counts) != clients or widths - {classes}:
                raise StorageError(
                    f"{where}: {split} should hold {clients} clients with {classes} counts each, "
                    f"got {len(counts)} clients with {sorted(widths)} counts"
                )
        for name in ("listed", "groups", "emd", "emd_code"):
            values = getattr(description, name)
            if values is not None and len(values) != clients:
                raise StorageError(f"{where}: {len(values)} {name} given for {clients} clients")
        return description
