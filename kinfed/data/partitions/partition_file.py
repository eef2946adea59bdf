"""Partition files: who holds which rows of a data set, without the data. A file is shared and cited by its digest, and
is refused where the data are not those that it was made for.

    {"format": "kinfed-partition", "version": 1, "digest": "...",
     "data": {"name": "mnist", "options": {...}, "examples": 70000, "digest": "..."},
     "origin": {"partition": "dirichlet", "options": {"alpha": 0.1, ...}, "seed": 0},
     "clients": [{"name": "client-00", "train": [3, 17, ...], "val": [], "test": [5, ...]}, ...]}

Rows are numbered as kinfed reads the data set. `partition.pkl` of FL-bench is read as well; it does not say which data
it was made for, so only its row numbers can be checked, and a note says so."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.core import option, storage
from kinfed.data.examples.ragged import SPLITS, Ragged
from kinfed.data.partitions.base import Assignment, Partition
from kinfed.data.sources.plain_pickle import read_plain_pickle
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError, DataError

_FORMAT, _VERSION = "kinfed-partition", 1


@dataclass(frozen=True)
class PartitionFile(Partition):
    """The clients of a partition file; its train, validation and test rows are as the file has them."""

    path: str = option("", "the file, written by `kinfed describe --save-partition`, or FL-bench's partition.pkl")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ConfigError("partition file needs its path: --set partition.path=FILE")

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        assignment = self._read(source)
        clients = len(assignment.train)
        if num_clients is not None and num_clients != clients:
            raise ConfigError(f"{self.path} has {clients} clients; got clients = {num_clients}; leave it out")
        for name in SPLITS:
            split: Ragged | None = getattr(assignment, name)
            if (
                split is not None
                and len(split.rows)
                and not 0 <= int(split.rows.min()) <= int(split.rows.max()) < len(source)
            ):
                raise DataError(
                    f"{self.path} names rows that {source.name} with {len(source):,} examples does not have"
                )
        return assignment

    def train_and_test_rows(self, source: Source) -> tuple[Tensor, Tensor | None]:
        """All rows, and the test rows that the file names."""
        return torch.arange(len(source)), self._read(source).test.rows

    def _read(self, source: Source) -> Assignment:
        path = Path(self.path)
        return _read_flbench(path) if path.suffix == ".pkl" else _read(path, source)


def save_partition(path: Path, source: Source, assignment: Assignment, description: Mapping[str, Any]) -> None:
    """Write who holds which rows of `source`, clients that have names, replacing a file that is there. `description` is
    the federation's."""
    if assignment.features is not None or assignment.labels is not None:
        raise ConfigError(
            f"partition {description['partition']} changes the examples of its clients, which row numbers cannot say; "
            "save the federation instead (kinfed describe --save)"
        )
    clients: list[dict[str, Any]] = [{"name": name} for name in assignment.names or ()]
    for split in SPLITS:
        ragged: Ragged = getattr(assignment, split) or Ragged.empty(len(clients))
        for client, rows in zip(clients, ragged.lists(), strict=True):
            client[split] = rows.tolist()
    if assignment.groups is not None and assignment.group_names is not None:
        for client, group in zip(clients, assignment.groups.tolist(), strict=True):
            client["group"] = assignment.group_names[group]
    data = {"name": source.name, "options": source.options, "examples": len(source), "digest": source_digest(source)}
    origin = {name: description[name] for name in ("partition", "options", "seed")}
    content = {"data": data, "origin": origin, "clients": clients}
    storage.write_json(path, {"format": _FORMAT, "version": _VERSION, "digest": _digest(content), **content})


def source_digest(source: Source) -> str:
    """Digest of the examples of a data set: features as they are stored, labels, cells of a table."""
    arrays, columns = {"raw": source.features.raw, "labels": source.labels}, {}
    for name, cells in source.table.cells.items() if source.table is not None else ():
        arrays[f"numbers {name}"] = torch.from_numpy(cells.numbers)
        columns[name] = [cells.form, cells.values]
        if cells.codes is not None:
            arrays[f"codes {name}"] = torch.from_numpy(cells.codes)
    return _digest([storage.checksum(arrays), columns])


def _digest(content: Any) -> str:
    return hashlib.sha256(storage.to_json(content).encode()).hexdigest()[:32]


def _read(path: Path, source: Source) -> Assignment:
    record = storage.read_json(path, "a partition file")
    if record.get("format") != _FORMAT or record.get("version") != _VERSION:
        raise DataError(
            f"{path} is no partition file of this version of kinfed (format {record.get('format')!r}, "
            f"version {record.get('version')!r})"
        )
    content = {name: record.get(name) for name in ("data", "origin", "clients")}
    if _digest(content) != record.get("digest"):
        raise DataError(f"{path} was changed after it was written: its digest does not fit; get the original file")
    data, clients, digest = record["data"], record["clients"], source_digest(source)
    if data["digest"] != digest:
        options = "".join(f", {name} = {value}" for name, value in data["options"].items() if value is not None)
        raise DataError(
            f"{path} was made for {data['name']}{options} with {data['examples']:,} examples, digest {data['digest']}; "
            f"this is {source.name} with {len(source):,} examples, digest {digest}. Row numbers of other data mean "
            "nothing here: take the data set that the file names"
        )
    train, val, test = (Ragged.of([client[split] for client in clients]) for split in SPLITS)
    groups, group_names = None, None
    if all("group" in client for client in clients):
        group_names = list(dict.fromkeys(client["group"] for client in clients))
        groups = torch.tensor([group_names.index(client["group"]) for client in clients])
    notes = [f"clients of {path.name}, digest {record['digest']}"]
    return Assignment(train, test, val, [client["name"] for client in clients], groups, group_names, notes)


def _read_flbench(path: Path) -> Assignment:
    """FL-bench's partition.pkl: {"data_indices": {client: {"train", "val", "test"}}, ...}."""
    record = read_plain_pickle(path.read_bytes(), path)
    try:
        indices = record["data_indices"]
        clients = [indices[k] for k in range(len(indices))]
        train, val, test = (Ragged.of([client.get(split, []) for client in clients]).ascending() for split in SPLITS)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} is no partition of FL-bench: {error!r}") from error
    note = (
        f"clients of {path.name} (FL-bench), which does not say which data it was made for: rows are taken as those of "
        "training examples, then test examples"
    )
    return Assignment(train, test, val, notes=[note])
