"""The files of a run folder: how they are written and kept consistent. How they are read: kinfed.records.run_files.

    config.json, .lock       kinfed.records.job_folder; "grown_from" has the fingerprints of the run before it got more
                             rounds, seeds or methods
    rounds.jsonl             one line per (algorithm, seed, round), and fold in a cross-validation
    clients.csv              one line per (algorithm, seed, client)
    summary.json             final results; written last
    federation-<seed>.json   who holds what
    baseline-<seed>.json     what clients reach without a model (kinfed.runs.baseline)
    audit.json               doubts about the data (kinfed.data.audit)
    curves/<algorithm>-<seed>.json    ROC and calibration of every client (kinfed.records.curves)
    models/<algorithm>-<seed>.safetensors
    checkpoints/             kinfed.records.checkpoint

Two equal runs write equal bytes, except for wall-clock times (fields named seconds, or ..._seconds) and versions.
The journal is appended to; every other file is replaced as a whole. To stay in step with checkpoints:

    run.append_round(record); ...; run.sync(); checkpoints.save(..., run.journal_mark(...))    while running
    snapshot = checkpoints.latest(label); run.rewind(algorithm, seed, round, mark)             when resuming

A mark is the number and the checksum of an algorithm's lines: lines that vanished or changed since are noticed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kinfed.algorithms import ServerModels
from kinfed.config import run_fingerprint
from kinfed.core import escape_formula, storage
from kinfed.errors import StorageError
from kinfed.records.checkpoint import Checkpoints
from kinfed.records.compare import growth_differences
from kinfed.records.job_folder import JobFolder, listed_changes
from kinfed.records.run_files import (
    SEAL,
    SEALED_FILES,
    JobFiles,
    RunFiles,
    models_path,
    read_journal,
    trial_key,
)
from kinfed.records.run_record import TrialKey

CLIENT_COLUMNS = (
    *("algorithm", "seed", "client", "n_train", "n_test", "took_part"),
    *("personal_accuracy", "server_accuracy", "personal_loss", "server_loss"),
)


@dataclass
class JournalMark:
    """How many lines the journal has about one algorithm and seed, and the checksum of all of them in order."""

    lines: int = 0
    checksum: str = ""

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> JournalMark:
        mark = cls()
        for line in lines:
            mark.add(line)
        return mark

    def add(self, line: bytes) -> None:
        """Each checksum covers the one before: a chain, in which no line can change, vanish or move."""
        self.lines += 1
        self.checksum = hashlib.sha256(self.checksum.encode() + line).hexdigest()


class RunFolder(JobFolder):
    """The folder of a run, opened as any other."""

    def __init__(self, path: Path | str):
        super().__init__(path)
        self._checkpoints: Checkpoints | None = None
        self._client_columns: list[str] | None = None  # of clients.csv, once this process has begun it
        self._rounds: int | None = None  # rounds.jsonl, open for appending
        self._marks: dict[TrialKey, JournalMark] = {}
        self.has_grown = False  # since it was begun: its journal is not in the order of a run in one go

    def _begin(self, config: Mapping[str, Any], fingerprint: str, contents: Mapping[str, str], resume: bool) -> None:
        super()._begin(config, fingerprint, contents, resume)
        earlier = RunFiles(self.path).earlier_fingerprints
        self._checkpoints = Checkpoints(self.path / "checkpoints", fingerprint, earlier=earlier)
        self.has_grown = bool(earlier)

    def close(self) -> None:
        self._close_journal()
        super().close()

    def _take_up(self, config: Mapping[str, Any], fingerprint: str, contents: Mapping[str, str], resume: bool) -> None:
        if self._extends:
            self._grow(config, fingerprint, contents)
        super()._take_up(config, fingerprint, contents, resume)

    def _grow(self, config: Mapping[str, Any], fingerprint: str, contents: Mapping[str, str]) -> None:
        """Make the run that is here one of more rounds, seeds or methods, which is unfinished from then on. What would
        keep it from having been that from the start is refused before anything changes."""
        files = RunFiles(self.path)
        envelope = files.envelope
        if envelope["fingerprint"] == fingerprint:
            return
        now = storage.plain(config)
        if SEAL not in envelope and run_fingerprint(envelope["config"], files.contents) != envelope["fingerprint"]:
            raise StorageError(
                f"{self.path / 'config.json'} does not hold the configuration that the run was started with, or is of "
                "a run with plugins by an earlier version; restore the file, or choose another folder with --out"
            )
        backend = files.layout().get("backend") if (self.path / "model.json").exists() else None
        if changes := growth_differences(envelope, now, contents, backend):
            raise StorageError(
                f"{self.path} cannot grow into this run ({listed_changes(changes)}); more rounds, seeds and methods "
                "may be added, all else must be as it is there, or choose another folder with --out"
            )
        self._reopen()
        with storage.storage_errors("clear results in", self.path):
            for name in ("summary.json", "clients.csv"):  # of the smaller run; written again at the end
                (self.path / name).unlink(missing_ok=True)
        identity = {"fingerprint": fingerprint, "contents": dict(contents), "config": config}
        grown_from = [*files.earlier_fingerprints, envelope["fingerprint"]]
        self._write_manifest(JobFiles(self.path).envelope | identity | {"grown_from": grown_from})

    @property
    def checkpoints(self) -> Checkpoints:
        self._require_lock()
        assert self._checkpoints is not None  # made with the lock
        return self._checkpoints

    # The journal

    def append_round(self, record: Mapping[str, Any]) -> None:
        """One line, handed to the system at once, so that it survives the end of this process; see `sync`."""
        self._require_lock()
        for field in ("algorithm", "seed", "round"):
            if field not in record:
                raise ValueError(f"a round needs algorithm, seed and round; {field} is missing")
        line = storage.to_json(record).encode()
        path = self._rounds_path
        with storage.storage_errors("append to", path):
            if self._rounds is None:
                self._rewrite_rounds(lambda _: True)  # a line cut by a crash must not get this one glued to it
                self._rounds = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            _append(self._rounds, line + b"\n")
        self._marks.setdefault(trial_key(record), JournalMark()).add(line)

    def journal_mark(self, algorithm: str, seed: int, fold: int | None = None) -> dict[str, Any]:
        """Mark of the lines that a checkpoint relies on, which `rewind` compares."""
        return asdict(self._marks.get((algorithm, seed, fold), JournalMark()))

    def sync(self) -> None:
        """Make the journal survive a power failure; due before each checkpoint, which relies on its lines."""
        self._require_lock()
        if self._rounds is not None:
            with storage.storage_errors("write", self._rounds_path):
                os.fsync(self._rounds)
                storage.sync_folder(self.path)

    def rewind(
        self, algorithm: str, seed: int, round: int | None, mark: Mapping[str, Any] | None = None, *,
        fold: int | None = None, other_mark: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Forget what the journal says about this algorithm, seed and fold after `round`, the checkpoint's.

        None forgets all of it (there is no checkpoint). A last line that a crash cut is dropped as well. What remains
        must be what the checkpoint's `mark` says, or its `other_mark`, where it has one.
        """
        self._require_lock()
        ours = (algorithm, seed, fold)

        def keep(record: dict[str, Any]) -> bool:
            return trial_key(record) != ours or (round is not None and record["round"] <= round)

        self._close_journal()
        journal = read_journal(self._rounds_path)
        remaining = JournalMark.of(line for line, record in journal if trial_key(record) == ours and keep(record))
        expected = JournalMark(**(mark or {}))
        if remaining != expected and (other_mark is None or remaining != JournalMark(**other_mark)):
            change = "lines that are not as they were written"
            if remaining.lines != expected.lines:
                change = f"{remaining.lines} lines of {expected.lines}"
            raise StorageError(
                f"{self._rounds_path} was changed after the checkpoint of round {round} of {algorithm} with seed "
                f"{seed}: it has {change}; restore the file, or choose another folder with --out"
            )
        self._rewrite_rounds(keep)
        self._marks[ours] = remaining

    def lines_of(self, algorithm: str, seed: int, fold: int | None = None) -> list[dict[str, Any]]:
        """Lines of the journal about an algorithm, seed and fold."""
        return [record for _, record in read_journal(self._rounds_path) if trial_key(record) == (algorithm, seed, fold)]

    def mark_with_last(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Value of `journal_mark` if this were the last line about its algorithm, seed and fold."""
        *before, _ = (line for line, one in read_journal(self._rounds_path) if trial_key(one) == trial_key(record))
        return asdict(JournalMark.of((*before, storage.to_json(record).encode())))

    def replace_last(self, record: Mapping[str, Any]) -> None:
        """Put this line in the place of the last one about its algorithm, seed and fold."""
        self._require_lock()
        entries = read_journal(self._rounds_path)
        place = max(index for index, (_, one) in enumerate(entries) if trial_key(one) == trial_key(record))
        lines = [line for line, _ in entries]
        lines[place] = storage.to_json(record).encode()
        self._marks[trial_key(record)] = JournalMark(**self.mark_with_last(record))
        self._replace_rounds(lines)

    def sort_rounds(self, labels: Sequence[str], seeds: Sequence[int]) -> None:
        """Bring the journal into the order of a run in one go: by seed, algorithm, fold and round."""
        self._require_lock()

        def place(entry: tuple[bytes, dict[str, Any]]) -> tuple[int, int, int, int]:
            algorithm, seed, fold = trial_key(entry[1])
            return seeds.index(seed), labels.index(algorithm), fold or 0, entry[1]["round"]

        self._replace_rounds([line for line, _ in sorted(read_journal(self._rounds_path), key=place)])

    def _replace_rounds(self, lines: Sequence[bytes]) -> None:
        self._close_journal()
        storage.write_atomically(self._rounds_path, b"".join(line + b"\n" for line in lines))

    def _close_journal(self) -> None:
        if self._rounds is not None:
            os.close(self._rounds)
        self._rounds = None

    @property
    def _rounds_path(self) -> Path:
        return self.path / "rounds.jsonl"

    def _rewrite_rounds(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Keep some lines, byte for byte, and end with a line break; the file is left alone if that is its state."""
        path = self._rounds_path
        text = b"".join(line + b"\n" for line, record in read_journal(path) if keep(record))
        if path.exists() and path.read_bytes() != text:
            storage.write_atomically(path, text)

    # Files written as a whole

    def append_clients(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Lines of clients.csv: the fixed columns, then all others, by name. What is None or not finite is left empty;
        names that a spreadsheet would run as formulas are led by an apostrophe.

        The first call after `open` begins the file anew: a run that is resumed makes all its lines again."""
        self._require_lock()
        names = [*CLIENT_COLUMNS, *sorted(columns.keys() - set(CLIENT_COLUMNS))]
        length = len(columns["client"])
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._client_columns is None:
            writer.writerow(names)
        elif self._client_columns != names:
            raise ValueError(f"clients.csv has the columns {self._client_columns}; got {names}")
        cells = [map(_cell, columns[name]) if name in columns else [""] * length for name in names]
        writer.writerows(zip(*cells, strict=True))
        path = self.path / "clients.csv"
        if self._client_columns is None:
            storage.write_atomically(path, text.getvalue().encode())
        else:
            with storage.storage_errors("append to", path):
                file = os.open(path, os.O_WRONLY | os.O_APPEND)
                try:
                    _append(file, text.getvalue().encode(), durably=True)
                finally:
                    os.close(file)
        self._client_columns = names

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the last file of a run, and seal them all."""
        self._write("summary.json", summary, indent=2)
        self._close_journal()
        self.seal_files(*SEALED_FILES)

    def write_federation(self, seed: int, federation: Mapping[str, Any]) -> None:
        self._write(f"federation-{seed}.json", federation)

    def write_audit(self, audit: Mapping[str, Any]) -> None:
        self._write("audit.json", audit, indent=2)

    def write_baseline(self, seed: int, baseline: Mapping[str, Any]) -> None:
        self._write(f"baseline-{seed}.json", baseline)

    def write_curves(self, algorithm: str, seed: int, curves: Mapping[str, Any]) -> None:
        name = storage.file_name(f"{algorithm}-{seed}")
        self._write(f"curves/{name}.json", {"algorithm": algorithm, "seed": seed, **curves})

    def _write(self, name: str, value: Mapping[str, Any], indent: int | None = None) -> None:
        self._require_lock()
        path = self.path / name
        storage.make_folder(path.parent)
        storage.write_json(path, value, indent=indent)

    def write_client_round(self, algorithm: str, seed: int, round: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Every client's metrics after a round, one row each: client-rounds/, which readers of Parquet take as one
        table."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._require_lock()
        path = client_round_path(self.path, algorithm, seed, round)
        storage.make_folder(path.parent)
        buffer = io.BytesIO()
        pq.write_table(pa.table(dict(columns)), buffer)
        storage.write_atomically(path, buffer.getvalue())

    def forget_client_round(self, algorithm: str, seed: int, round: int) -> None:
        """Remove what `write_client_round` wrote of a round, if anything."""
        self._require_lock()
        client_round_path(self.path, algorithm, seed, round).unlink(missing_ok=True)

    def write_models(
        self, algorithm: str, seed: int, personal: Tensor, server: ServerModels | None, took_part: Tensor
    ) -> None:
        """personal [K, P], the server's models if there are any, and bool [K]: has the client taken part in a round?"""
        self._require_lock()
        if personal.dim() != 2:
            raise ValueError(f"personal models are [K, P]; got {list(personal.shape)}")
        tensors = {"personal": personal, "took_part": took_part}
        if server is not None:
            tensors["server"] = server.models[0] if server.assignment is None else server.models
            if server.assignment is not None:
                tensors["assignment"] = server.assignment
        path = models_path(self.path, algorithm, seed)
        storage.make_folder(path.parent)
        storage.remove_drafts(path.parent)
        storage.write_tensors(path, tensors, {"algorithm": algorithm, "seed": str(seed)})


def client_round_path(folder: Path, algorithm: str, seed: int, round: int) -> Path:
    return folder / "client-rounds" / f"{storage.file_name(f'{algorithm}-{seed}')}-{round:06d}.parquet"


def _append(file: int, data: bytes, durably: bool = False) -> None:
    """All of the data, or none of it where the disk is full."""
    size = os.fstat(file).st_size
    try:
        storage.write_all(file, data)
        if durably:
            os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return escape_formula(value)
    if value is None or isinstance(value, int):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise ValueError(f"a cell of clients.csv is one value; got {value}")
