"""Durable snapshots of a run's state: a killed run continues bit for bit from the newest one.

    checkpoints/<label>/00000012.json                      round, fingerprint, checksums, small values
                        00000012-<sha256>.safetensors      all tensors

The JSON file makes a snapshot exist: it is written last and deleted first, each file by an atomic rename, and the
tensor file's name holds its checksum, so saving a round again cannot touch the tensors that an existing JSON file
speaks of. Hence a crash at any byte leaves the old snapshots, or the old ones and the new one. Nothing is pickled.

One process writes at a time; the lock of the run folder (kinfed.records.run_folder) sees to that.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.core import storage
from kinfed.errors import CheckpointError, StorageError
from kinfed.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
_SNAPSHOT = re.compile(r"(\d{8,})\.json")
_TENSORS = re.compile(r"(\d{8,})-([0-9a-f]{16})\.safetensors")
_NON_FINITE = "$float"


@dataclass(frozen=True)
class Snapshot:
    """A saved state, on the CPU and in memory of its own. `extra` is as given, tuples as lists."""

    round: int
    tensors: dict[str, Tensor]
    extra: dict[str, Any]


class Checkpoints:
    def __init__(self, folder: Path, fingerprint: str, keep: int = 2, *, earlier: Collection[str] = ()):
        """`earlier` are fingerprints of the run before it grew (kinfed.runs.growth): their snapshots are its own."""
        if keep < 1:
            raise ValueError(f"at least one snapshot must be kept; got keep={keep}")
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self.keep = keep
        self.earlier = frozenset(earlier)

    def save(self, label: str, round: int, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Store the state after `round`; afterwards the newest `keep` snapshots of this label exist."""
        folder = self._folder_of(label)
        if round < 0:
            raise ValueError(f"a round to save is 0 or more; got {round}")
        if (stored := _rounds(folder)) and stored[-1] > round:
            raise CheckpointError(
                f"cannot save round {round} of {label}: {folder} already holds round {stored[-1]}; "
                "resume from it, or remove the folder to start again"
            )
        packed = _pack(extra, "extra")
        storage.make_folder(folder)
        try:
            with storage.storage_errors(f"save round {round} in", folder):
                with storage.draft(folder) as new:
                    digest, size = storage.draft_tensors(new, tensors), new.size
                    new.commit(_tensor_path(folder, round, digest))
                document = {
                    "format": FORMAT, "kinfed": __version__, "fingerprint": self.fingerprint, "label": label,
                    "round": round, "tensors": {"checksum": digest, "bytes": size}, "extra": packed,
                }  # fmt: skip
                text = json.dumps(document | {"sha256": storage.record_digest(document)}, indent=1)
                storage.write_atomically(_snapshot_path(folder, round), text.encode())
                for old in _rounds(folder)[: -self.keep]:
                    _snapshot_path(folder, old).unlink()
        except StorageError:
            # A tensor file whose JSON did not fit would only fill the disk further.
            with contextlib.suppress(StorageError):
                _sweep(folder)
            raise
        _sweep(folder, saved=(round, digest))

    def newest_round(self, label: str) -> int:
        """Round of the newest snapshot; 0 before the first."""
        return max(_rounds(self._folder_of(label)), default=0)

    def latest(self, label: str) -> Snapshot | None:
        """The newest snapshot; None before the first. A damaged or foreign one is an error, never skipped silently:
        falling back to an older round is for the user to decide, who is told how."""
        folder = self._folder_of(label)
        rounds = _rounds(folder)
        if not rounds:
            return None
        newest = rounds.pop()
        try:
            document, tensors = self._verified(label, newest)
            return Snapshot(newest, tensors, _unpack(document["extra"]))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._recovery_hint(label, newest, rounds)}") from None

    def _folder_of(self, label: str) -> Path:
        return self.folder / storage.file_name(label)

    def _verified(self, label: str, round: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The JSON document and the tensors, both known to be what was written, by this configuration."""
        folder = self._folder_of(label)
        path = _snapshot_path(folder, round)
        with storage.storage_errors("read", path):
            text = path.read_bytes()
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise CheckpointError(
                    f"checkpoint {path} has format {document['format']} (kinfed {document['kinfed']}), "
                    f"and this version of kinfed reads format {FORMAT}"
                )
            if document.pop("sha256") != storage.record_digest(document):
                raise CheckpointError(f"checkpoint {path} is damaged: its content does not match its checksum")
            for field, expected in (("label", label), ("round", round)):
                if document[field] != expected:
                    raise CheckpointError(
                        f"checkpoint {path} is of {field} {document[field]}, but is stored as {expected}: "
                        "it was copied or renamed"
                    )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {path} is damaged: not a complete JSON document ({error})") from None
        if document["fingerprint"] != self.fingerprint and document["fingerprint"] not in self.earlier:
            raise CheckpointError(
                f"checkpoint {path} belongs to another configuration (fingerprint {document['fingerprint']}; "
                f"this run has {self.fingerprint})"
            )
        stored = document["tensors"]
        file = _tensor_path(folder, round, stored["checksum"])
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: its tensor file {file.name} is missing")
        if (size := file.stat().st_size) != stored["bytes"]:
            raise CheckpointError(f"checkpoint {file} is damaged: it has {size} bytes instead of {stored['bytes']}")
        try:
            tensors = storage.read_tensors(file)
        except StorageError as error:
            raise CheckpointError(f"checkpoint {error}") from None
        if storage.read_metadata(file)[storage.CHECKSUM] != stored["checksum"]:
            raise CheckpointError(f"checkpoint {file} holds the tensors of another snapshot than {path} names")
        return document, tensors

    def _recovery_hint(self, label: str, newest: int, older: list[int]) -> str:
        folder, doomed = self._folder_of(label), [newest]
        for round in reversed(older):
            try:
                self._verified(label, round)
            except (CheckpointError, StorageError):
                doomed.append(round)
                continue
            paths = " and ".join(str(_snapshot_path(folder, r)) for r in doomed)
            return f"round {round} is intact: delete {paths}, then resume to continue from round {round}"
        return (
            f"no older snapshot of this run is intact: delete {folder} to compute it again from the start, "
            "or use another --out"
        )


def _snapshot_path(folder: Path, round: int) -> Path:
    return folder / f"{round:08d}.json"


def _tensor_path(folder: Path, round: int, digest: str) -> Path:
    return folder / f"{round:08d}-{digest[:16]}.safetensors"


def _rounds(folder: Path) -> list[int]:
    """Rounds with a snapshot, ascending."""
    return sorted(int(match[1]) for match in _matching(folder, _SNAPSHOT))


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    if not folder.is_dir():
        return
    with storage.storage_errors("list", folder):
        names = [path.name for path in folder.iterdir()]
    for name in names:
        if match := pattern.fullmatch(name):
            yield match


def _sweep(folder: Path, saved: tuple[int, str] | None = None) -> None:
    """Remove what no snapshot speaks of: drafts, tensors of rounds without JSON, older tensors of the saved round."""
    storage.remove_drafts(folder)
    rounds = set(_rounds(folder))
    with storage.storage_errors("clean", folder):
        storage.sync_folder(folder)  # deleted JSON files must not come back after their tensors are gone
        for match in _matching(folder, _TENSORS):
            round, digest = int(match[1]), match[2]
            replaced = saved is not None and round == saved[0] and digest != saved[1][:16]
            if round not in rounds or replaced:
                (folder / match[0]).unlink()


def _pack(value: Any, where: str) -> Any:
    """JSON that gives the value back exactly; unlike in the journal, a NaN must stay one."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_NON_FINITE: repr(float(value))}
    if isinstance(value, list | tuple):
        return [_pack(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str) or key == _NON_FINITE]:
            raise TypeError(f"{where} has the key {bad[0]!r}; keys are strings, and {_NON_FINITE!r} is taken")
        return {key: _pack(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}; only JSON values go there, tensors go in `tensors`")


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if isinstance(value, dict):
        if _NON_FINITE in value:
            return float(value[_NON_FINITE])
        return {key: _unpack(item) for key, item in value.items()}
    return value
