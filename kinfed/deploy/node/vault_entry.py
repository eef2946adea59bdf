"""A client's files of one run in a vault: its state after the last two rounds, its model, its last answers.

A round that a node has trained need not have counted: the reply may have come too late, or the server may have stopped
and resumed from its last checkpoint. So the state *before* the last round stays in the file until the server, in its
next message, says which round it went on from. The two are replaced together, in one rename: at every moment the file
holds a round and the one before it, complete. `version` counts the writes.

A file names the run and the client that it belongs to, and is refused for any other.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import Tensor

from kinfed.core import storage
from kinfed.deploy.transport.wire import Packet
from kinfed.errors import StorageError
from kinfed.version import __version__

FORMAT = "kinfed-vault-2"
STATE, MODEL = "state.safetensors", "model.safetensors"
_ABOUT = "about"  # the checksum of the metadata beside it
_NOW, _BEFORE = "now.", "before."
_OF_A_STATE = ("run", "client", "method", "round", "before", "version", "saved")
_WAY_OUT = "Restore it from a copy, or remove it: the client then begins anew from the server's model"


@dataclass(frozen=True)
class _State:
    round: int
    before: int  # round of the older state; 0: there is none
    version: int
    tensors: dict[str, Tensor]

    def after(self, round: int) -> dict[str, Tensor] | None:
        prefix = _NOW if round == self.round else _BEFORE if round == self.before else None
        if prefix is None or round == 0:
            return None
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


class VaultEntry:
    def __init__(self, folder: Path, run: str, client: str) -> None:
        self.folder, self.run, self.client = folder, run, client

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this entry: a process that outlived its supernode may still be writing."""
        make_private_folder(self.folder)
        with Lock(self.folder / ".lock").held():
            storage.remove_drafts(self.folder)
            yield

    def state(self, round: int) -> dict[str, Tensor] | None:
        """The state after that round; None if it is not here (or `round` is 0: there was none)."""
        state = self._read()
        return None if state is None else state.after(round)

    @property
    def newest_round(self) -> int:
        """Round of the state; 0 if there is none."""
        path = self.folder / STATE
        return int(read_about(path)["round"]) if path.exists() else 0

    @property
    def model_round(self) -> int:
        """Round after which the model was made; 0 if there is none."""
        path = self.folder / MODEL
        return int(read_about(path, ("round",))["round"]) if path.exists() else 0

    def keep(self, round: int, tensors: Mapping[str, Tensor], before: int, method: str) -> int:
        """Store the state after `round`, beside the one that it was made from (that after round `before`)."""
        last = self._read()
        older = None if last is None else last.after(before)
        content = {_NOW + name: t for name, t in tensors.items()}
        content |= {_BEFORE + name: t for name, t in (older or {}).items()}
        number = 1 if last is None else last.version + 1
        metadata = {
            "kinfed": __version__, "method": method, "round": str(round), "version": str(number), "saved": now(),
            "before": str(0 if older is None else before),
        }  # fmt: skip
        self._write(self.folder / STATE, content, metadata)
        return number

    def keep_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._write(self.folder / MODEL, tensors, metadata)

    def answer(self, kind: str, request: str) -> Packet | None:
        """The answer to the request with this digest, if it is the last one of its kind."""
        path = self._answer_path(kind)
        if not path.exists() or read_about(path, ("question", "header"))["question"] != request:
            return None
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in storage.read_tensors(path).items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = tensor
        return Packet(json.loads(read_about(path, ("header",))["header"]), groups)

    def keep_answer(self, kind: str, request: str, answer: Packet) -> None:
        """Store an answer in place of the last one of its kind."""
        tensors = {f"{group}/{key}": t for group, some in answer.groups.items() for key, t in some.items()}
        self._write(self._answer_path(kind), tensors, {"question": request, "header": json.dumps(answer.header)})

    def check_room(self, nbytes: int) -> None:
        """Refuse to go on where the disk has no room for this number of bytes; called before an answer is paid for."""
        with storage.storage_errors("find room to answer in", self.folder), storage.draft(self.folder, True) as new:
            new.reserve(nbytes)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write a file whose metadata have a checksum of their own: the one in a tensor file covers tensors only, and a
        model's scaling is among the metadata."""
        about = {"format": FORMAT, "run": self.run, "client": self.client, **metadata}
        storage.write_tensors(path, tensors, about | {_ABOUT: _seal(about)}, private=True)

    def _answer_path(self, kind: str) -> Path:
        return self.folder / f"answer-{kind}.safetensors"

    def _read(self) -> _State | None:
        path = self.folder / STATE
        if not path.exists():
            return None
        meta = read_about(path)
        if (meta["run"], meta["client"]) != (self.run, self.client):
            raise StorageError(
                f"{path} belongs to run {meta['run']}, client {meta['client']}; this is run {self.run}, client "
                f"{self.client}. Move the file away: state of another run is never used"
            )
        try:
            tensors = storage.read_tensors(path)
        except StorageError as error:
            raise StorageError(f"{error}. {_WAY_OUT}") from None
        return _State(int(meta["round"]), int(meta["before"]), int(meta["version"]), tensors)


def _seal(metadata: Mapping[str, str]) -> str:
    return storage.record_digest(dict(metadata))[:32]


def read_about(path: Path, wanted: Sequence[str] = _OF_A_STATE) -> dict[str, Any]:
    try:
        meta = storage.read_metadata(path)
    except StorageError as error:
        raise StorageError(f"{error}. {_WAY_OUT}") from None
    if meta.get("format") != FORMAT or any(name not in meta for name in wanted):
        raise StorageError(f"{path} is no file of this version of kinfed (format {meta.get('format')}). {_WAY_OUT}")
    if meta.get(_ABOUT) != _seal({name: text for name, text in meta.items() if name not in (_ABOUT, storage.CHECKSUM)}):
        raise StorageError(f"{path} is damaged: what it says of itself does not match its checksum. {_WAY_OUT}")
    return meta


def make_private_folder(path: Path) -> None:
    """Make a folder for this user only, and so all folders on the way to it."""
    with storage.storage_errors("create the folder", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                storage.sync_folder(folder.parent)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Lock:
    """A lock between processes; its holder may take it again."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, FileLock(path, mode=0o600)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with storage.storage_errors("lock", self.path):
            self._file.acquire()
        try:
            yield
        finally:
            self._file.release()
