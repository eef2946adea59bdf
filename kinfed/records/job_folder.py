"""A folder that a job writes: a run, a search or a fit. One process at a time, and the same job when it is resumed.

config.json      {"kinfed", "versions", "fingerprint", "contents", "config", "seal"}; written first. "contents" are
                 digests of the data and of code that is not kinfed's; "continued" has the versions that resumed
                 the job with others; "files" and "seal": kinfed.records.run_files
.lock            held while a process writes
"""

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from kinfed.core import storage
from kinfed.errors import StorageError
from kinfed.records.compare import differences
from kinfed.records.run_files import JobFiles, file_digest, sealed
from kinfed.version import __version__

_HOLDER = ".lock-holder"  # who has the lock; beside it, because a locked file cannot be read on Windows
_DECISIVE_PACKAGES = ("kinfed", "versions.torch")  # whose version may change results


class FolderInUse(StorageError):
    """Another process writes this folder."""


class JobFolder:
    """Made by `open`, which takes the folder's lock until `close`:

    with JobFolder.open(path, config, fingerprint) as folder:
        storage.write_json(folder.path / "result.json", ...)
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lock: FileLock | None = None
        self._extends = False
        self.version_change = ""  # a sentence, where this job was begun with other versions of kinfed or torch

    @classmethod
    def open(
        cls, path: Path | str, config: Mapping[str, Any], fingerprint: str, *,
        contents: Mapping[str, str] | None = None, resume: bool = False, extend: bool = False,
    ) -> Self:  # fmt: skip
        """Make the folder this job's, or with `resume` take up the job that it holds.

        `fingerprint` is the job's identity; `contents` are digests that it covers besides the configuration, by names
        in which a refusal says what has changed.
        Refused: a folder with files of anything else, with another job, or (without `resume`) with this job.
        `resume` on an empty folder starts the job, so that one that may be restarted needs one command only. With
        `extend` a run may have fewer rounds, seeds or methods so far (kinfed.runs.growth).
        """
        folder = cls(path)
        folder._extends = extend
        folder._begin(config, fingerprint, contents or {}, resume or extend)
        return folder

    def _begin(self, config: Mapping[str, Any], fingerprint: str, contents: Mapping[str, str], resume: bool) -> None:
        self._refuse_unrelated_files()
        storage.make_folder(self.path)
        self._lock = self._take_lock()
        try:
            storage.remove_drafts(self.path)
            if self._config_path.exists():
                self._take_up(config, fingerprint, contents, resume)
            else:
                self._write_manifest(
                    run_versions() | {"fingerprint": fingerprint, "contents": contents, "config": config}
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            (self.path / _HOLDER).unlink(missing_ok=True)
            self._lock.release()
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_unrelated_files(self) -> None:
        if not self.path.exists() or self._config_path.exists():
            return
        with storage.storage_errors("use", self.path):
            names = sorted(path.name for path in self.path.iterdir())
        if other := [name for name in names if name not in (".lock", _HOLDER) and not name.startswith(".draft-")]:
            listed = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
            raise StorageError(
                f"{self.path} holds files but no run of kinfed ({listed}); choose a new or empty folder with --out"
            )

    def seal_files(self, *patterns: str) -> None:
        """Write digests of the files of these names into the manifest: the job has ended. A process that takes it up
        again removes them first."""
        paths = sorted(path for pattern in patterns for path in self.path.glob(pattern))
        files = {path.relative_to(self.path).as_posix(): file_digest(path) for path in paths}
        self._write_manifest(JobFiles(self.path).envelope | {"files": files})

    def _write_manifest(self, envelope: Mapping[str, Any]) -> None:
        # Unsorted: the order of algorithms in the configuration is their order in reports.
        storage.write_json(self._config_path, sealed(envelope), sort_keys=False)

    def _reopen(self) -> None:
        """Write down with what the job goes on, where that is not what it was last run with, and that its files change
        from here on."""
        before, now = JobFiles(self.path).envelope, run_versions()
        envelope = {name: value for name, value in before.items() if name != "files"}
        history = [{name: envelope.get(name) for name in now}, *envelope.get("continued", [])]
        changes = differences(history[-1], now, names=("before", "now"))
        if decisive := [change for change in changes if change.startswith(_DECISIVE_PACKAGES)]:
            self.version_change = (
                f"{self.path} was run with other versions so far ({'; '.join(decisive)}); from here on, results may "
                "differ, in the last digits or more, from those of an uninterrupted run"
            )
        if history[-1] != now:
            envelope["continued"] = [*history[1:], now]
        if envelope != before:
            self._write_manifest(envelope)

    def _take_up(self, config: Mapping[str, Any], fingerprint: str, contents: Mapping[str, str], resume: bool) -> None:
        envelope = JobFiles(self.path).envelope
        if envelope["fingerprint"] == fingerprint:
            if not resume:
                raise StorageError(
                    f"{self.path} already holds this run; add --resume to continue it, or choose another folder "
                    "with --out"
                )
            self._reopen()
            return
        now = storage.plain(config)
        changes = list(differences(envelope["config"], now))
        before = JobFiles(self.path).contents
        # A name on one side only goes with a change of the configuration, such as another seed.
        names = before.keys() & contents.keys() if changes else before.keys() | contents.keys()
        changes += [f"other {name}" for name in sorted(names) if before.get(name) != contents.get(name)]
        listed = listed_changes(changes)
        remedy = "resume it with the configuration it was started with, or choose another folder with --out"
        raise StorageError(
            f"{self.path} holds another run ({listed or 'made from other data or code'}); "
            + (remedy if resume else "choose another folder with --out")
        )

    def _take_lock(self) -> FileLock:
        path = self.path / ".lock"
        lock = FileLock(path, blocking=False, thread_local=False)  # whichever thread closes the folder
        with storage.storage_errors("lock", path):
            try:
                lock.acquire()
            except Timeout:
                raise FolderInUse(
                    f"{self.path} is being written by {self._lock_holder()}; wait until it ends, or choose another "
                    "folder with --out"
                ) from None
            (self.path / _HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        return lock

    def _lock_holder(self) -> str:
        try:
            return (self.path / _HOLDER).read_text(encoding="utf-8") or "another process"
        except OSError:
            return "another process"

    def _require_lock(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path} is not open for writing; use {type(self).__name__}.open")

    @property
    def _config_path(self) -> Path:
        return self.path / "config.json"


def run_versions() -> dict[str, Any]:
    """Versions of kinfed and of packages that may change its results, now."""
    packages = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {"kinfed": __version__, "versions": {"python": platform.python_version(), **packages}}


def listed_changes(changes: Sequence[str]) -> str:
    return "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
