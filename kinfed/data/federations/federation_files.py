"""Federations in folders: one file of arrays, one record beside it; and the digest that tells two apart."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kinfed.core import storage
from kinfed.data.audit.findings import from_record
from kinfed.data.examples.features import Features
from kinfed.data.examples.packing import Packing
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import SPLITS, Ragged
from kinfed.errors import StorageError

if TYPE_CHECKING:
    from kinfed.data.federations.federation import Federation

_FORMAT, _VERSION = "kinfed-federation", 3
_RECORD = "federation.json"
_RAGGED = ("offsets", "rows")
_OPTIONAL = ("groups", "tags", "public", "weights", "class_weights", "persons", "order")
_PLAIN_FIELDS = ("names", "group_names", "description", "notes", "tag_names")


def digest(data: Federation) -> str:
    """The body of Federation.digest."""
    plain = {name: getattr(data, name) for name in ("names", "group_names", "tag_names")}
    plain["problem"] = data.problem.to_json()
    if data.features.packing is not None:
        plain["packing"] = data.features.packing.to_json()
    return hashlib.sha256(f"{storage.checksum(arrays_of(data))} {storage.to_json(plain)}".encode()).hexdigest()[:32]


def arrays_of(data: Federation) -> dict[str, Tensor]:
    """All tensors by name."""
    arrays = {f"{name}.{array}": getattr(data.split(name), array) for name in SPLITS for array in _RAGGED}
    arrays |= {"raw": data.features.raw, "labels": data.labels}
    optional = {name: getattr(data.features, name) for name in ("mean", "std", "vectors")}
    optional |= {name: getattr(data, name) for name in _OPTIONAL}
    return arrays | {name: tensor.contiguous() for name, tensor in optional.items() if tensor is not None}


def save(data: Federation, folder: Path | str) -> None:
    """The body of Federation.save."""
    folder, arrays = Path(folder), arrays_of(data)
    storage.make_folder(folder)
    with storage.storage_errors("write", folder), storage.draft(folder) as new:
        checksum = storage.draft_tensors(new, arrays)
        file = f"arrays-{checksum[:16]}.safetensors"
        new.commit(folder / file)
    record = {"format": _FORMAT, "version": _VERSION, "arrays": file, "checksum": checksum}
    # The record is renamed into place last: until then a reader finds the old record and its old arrays.
    plain = {name: getattr(data, name) for name in _PLAIN_FIELDS}
    learnt = None if data.preprocessing is None else data.preprocessing.to_json()
    findings = [asdict(finding) for finding in data.findings]
    own = [[asdict(one) for one in columns] for columns in data.own_columns]
    known = {"problem": data.problem.to_json(), "preprocessing": learnt, "findings": findings, "own_columns": own}
    if data.features.packing is not None:
        known["packing"] = data.features.packing.to_json()
    storage.write_json(folder / _RECORD, record | plain | known)
    for old in folder.glob("arrays-*.safetensors"):
        if old.name != file:
            old.unlink()


def load(folder: Path | str) -> dict[str, Any]:
    """Read what `save` wrote, as the fields of a Federation."""
    folder = Path(folder)
    record = storage.read_json(folder / _RECORD, "the record of a saved federation")
    if record.get("format") != _FORMAT or record.get("version") != _VERSION:
        raise StorageError(
            f"{folder / _RECORD} is not a federation saved by this version of kinfed "
            f"(format {record.get('format')!r}, version {record.get('version')!r}); save it again"
        )
    if lacking := [name for name in ("arrays", "checksum", "problem", *_PLAIN_FIELDS) if name not in record]:
        raise StorageError(f"{folder / _RECORD} is damaged: {', '.join(lacking)} missing")
    arrays = storage.read_tensors(folder / record["arrays"])
    if storage.read_metadata(folder / record["arrays"])[storage.CHECKSUM] != record["checksum"]:
        raise StorageError(f"{folder}: arrays and record come from different federations; save it again")
    packing = Packing.from_json(record.get("packing"))
    features = Features(
        arrays["raw"], arrays.get("mean"), arrays.get("std"), vectors=arrays.get("vectors"), packing=packing
    )
    splits: dict[str, Any] = {name: Ragged(*(arrays[f"{name}.{array}"] for array in _RAGGED)) for name in SPLITS}
    plain = {name: record[name] for name in _PLAIN_FIELDS}
    plain["preprocessing"] = None
    if (learnt := record.get("preprocessing")) is not None:
        from kinfed.data.preprocessing.own_columns import read_own
        from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing  # with pyarrow, for tables

        plain["preprocessing"] = TablePreprocessing.from_json(learnt)
        plain["own_columns"] = tuple(tuple(read_own(one)) for one in record.get("own_columns", []))
    plain["findings"] = from_record(record.get("findings", []))
    optional = {name: arrays.get(name) for name in _OPTIONAL}
    problem = Problem.from_json(record["problem"])
    return {"features": features, "labels": arrays["labels"], "problem": problem, **splits, **optional, **plain}
