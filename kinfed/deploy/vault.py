"""Where a node keeps what is personal: one folder per (run, client), written so that no crash can spoil it.

    <vault>/<run>/<client>/state.safetensors     the client's state after its last two rounds
                           model.safetensors     the model to use, as plain PyTorch loads it (kinfed predict)
                           answer-*.safetensors  the last answers of private training, for when one is lost on the way
    <vault>/secrets/<client>.key                 32 random bytes for the noise of private training; never leaves
                   <client>.identity             the key that the client belongs to, where the node names no other
    <vault>/books/<client>.json                  what private training was asked, over all runs (kinfed.deploy.books)

A round that a node has trained need not have counted: the reply may have come too late, or the server may have stopped
and resumed from its last checkpoint. So the state *before* the last round stays in the file until the server, in its
next message, says which round it went on from. The two are replaced together, in one rename: at every moment the file
holds a round and the one before it, complete. `version` counts the writes.

A file names the run and the client that it belongs to, and is refused for any other. Files are for their owner only
(mode 600), and carry checksums of all that is in them. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from torch import Tensor

from kinfed.core import storage
from kinfed.deploy.books import Books
from kinfed.deploy.wire import Packet
from kinfed.errors import ConfigError, StorageError
from kinfed.privacy.noise import SECRET_BYTES, Secret
from kinfed.version import __version__

FORMAT = "kinfed-vault-2"
_STATE, _MODEL = "state.safetensors", "model.safetensors"
_SECRETS, _BOOKS = "secrets", "books"
_ABOUT = "about"  # the checksum of the metadata beside it
_NOW, _BEFORE = "now.", "before."


@dataclass(frozen=True)
class EntryInfo:
    """One line of `kinfed vault list`."""

    run: str
    client: str
    method: str
    round: int
    version: int
    nbytes: int
    saved: str
    has_model: bool


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


class Vault:
    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).expanduser()

    def entry(self, run: str, client: str) -> VaultEntry:
        if not run or run in (_SECRETS, _BOOKS):
            raise StorageError(f"a run cannot be called {run!r}: the vault has a folder of its own under that name")
        return VaultEntry(self.folder / storage.file_name(run) / storage.file_name(client), run, client)

    def secret(self, client: str) -> Secret:
        """The client's own, made at the first use. Only the owner of the files may read it."""
        path = self._secret_path(client)
        with storage.storage_errors("keep the secret", path), _lock(path.parent / ".lock"):
            if not path.exists():
                storage.write_atomically(path, Secret.new().key, private=True)
            key = path.read_bytes()
        if len(key) != SECRET_BYTES:
            raise StorageError(
                f"{path} is damaged: {len(key)} bytes instead of {SECRET_BYTES}. Restore it from a copy, or remove it: "
                "a new one is made"
            )
        return Secret(key)

    def identity(self, client: str) -> tuple[Path, bytes]:
        """Where the private key is that the client belongs to, and the key; made at the first use."""
        from kinfed.deploy.client_keys import new_private_key

        path = self._secret_path(client).with_suffix(".identity")
        with storage.storage_errors("keep the key", path), _lock(path.parent / ".lock"):
            if not path.exists():
                storage.write_atomically(path, new_private_key(), private=True)
            return path, path.read_bytes()

    def books(self, client: str) -> Books:
        """The client's own, begun before its secret is: where there is a secret and no books, they were lost."""
        folder = self.folder / _BOOKS
        _private_folder(folder)
        books = Books(folder, client)
        if not self._secret_path(client).exists():
            books.open()
            self.secret(client)
        return books

    def booked_clients(self) -> list[Books]:
        """The books of all clients that have any."""
        folder = self.folder / _BOOKS
        return [Books(folder, str(storage.read_json(path).get("client"))) for path in sorted(folder.glob("*.json"))]

    def _secret_path(self, client: str) -> Path:
        folder = self.folder / _SECRETS
        _private_folder(folder)
        return folder / f"{storage.file_name(client)}.key"  # ends in .key, so that with_suffix replaces just that

    def entries(self) -> list[EntryInfo]:
        """What is in the vault, oldest first. A damaged entry is an error that names it."""
        entries = []
        for path in sorted(self.folder.glob(f"*/*/{_STATE}")):
            meta, nbytes = _metadata(path), path.stat().st_size
            model = path.parent / _MODEL
            entries.append(
                EntryInfo(
                    meta["run"], meta["client"], meta["method"], int(meta["round"]), int(meta["version"]),
                    nbytes + (model.stat().st_size if model.exists() else 0), meta["saved"], model.exists(),
                )
            )  # fmt: skip
        return sorted(entries, key=lambda entry: entry.saved)

    def model_path(self, run: str | None = None, client: str | None = None) -> Path:
        """The personal model of a run and client; of the newest run where none is named."""
        matching = [entry for entry in self.entries() if run in (None, entry.run) and client in (None, entry.client)]
        with_model = [entry for entry in matching if entry.has_model]
        if not with_model:
            wanted = f"run {run or 'any'}, client {client or 'any'}"
            more = "; models come with the first evaluation" if matching else ""
            raise ConfigError(f"the vault {self.folder} holds no model of {wanted}{more}")
        if len({entry.client for entry in with_model}) > 1:
            names = ", ".join(sorted({entry.client for entry in with_model}))
            raise ConfigError(f"the vault holds models of several clients; choose one with --client: {names}")
        newest = with_model[-1]
        path = self.entry(newest.run, newest.client).folder / _MODEL
        _metadata(path, ("run", "client"))
        storage.read_tensors(path)  # compares the checksum
        return path

    def clear(self, run: str, client: str | None = None) -> list[str]:
        """Remove a run's states, models and answers; the names of the clients that had any. Secrets and books stay:
        what was answered has been answered."""
        folder = self.folder / storage.file_name(run)
        gone = [entry.client for entry in self.entries() if entry.run == run and client in (None, entry.client)]
        if not gone:
            raise ConfigError(
                f"the vault {self.folder} holds nothing of run {run!r}" + (f", {client}" if client else "")
            )
        with storage.storage_errors("remove", folder):
            for name in gone:
                shutil.rmtree(folder / storage.file_name(name))
            if not any(folder.iterdir()):
                folder.rmdir()
            storage.sync_folder(self.folder)
        return gone


class VaultEntry:
    """What one client keeps of one run."""

    def __init__(self, folder: Path, run: str, client: str) -> None:
        self.folder, self.run, self.client = folder, run, client

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with this entry: a process that outlived its supernode may still be writing."""
        _private_folder(self.folder)
        with _lock(self.folder / ".lock"):
            storage.remove_drafts(self.folder)
            yield

    def state(self, round: int) -> dict[str, Tensor] | None:
        """The state after that round; None where it is not here (or `round` is 0: there was none)."""
        state = self._read()
        return None if state is None else state.after(round)

    @property
    def newest_round(self) -> int:
        """Of the state; 0 where there is none."""
        path = self.folder / _STATE
        return int(_metadata(path)["round"]) if path.exists() else 0

    @property
    def model_round(self) -> int:
        """After which the model was made; 0 where there is none."""
        path = self.folder / _MODEL
        return int(_metadata(path, ("round",))["round"]) if path.exists() else 0

    def keep(self, round: int, tensors: Mapping[str, Tensor], before: int, method: str) -> int:
        """Store the state after `round`, beside the one that it was made from (that after round `before`)."""
        last = self._read()
        older = None if last is None else last.after(before)
        content = {_NOW + name: t for name, t in tensors.items()} | {
            _BEFORE + name: t for name, t in (older or {}).items()
        }
        number = 1 if last is None else last.version + 1
        metadata = {
            "format": FORMAT, "kinfed": __version__, "run": self.run, "client": self.client,
            "method": method, "round": str(round), "before": str(0 if older is None else before),
            "version": str(number), "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        storage.write_tensors(self.folder / _STATE, content, _sealed(metadata), private=True)
        return number

    def keep_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        about = {"format": FORMAT, "run": self.run, "client": self.client} | dict(metadata)
        storage.write_tensors(self.folder / _MODEL, tensors, _sealed(about), private=True)

    def answer(self, kind: str, question: str) -> Packet | None:
        """The answer to this question, if it is the last one of its kind."""
        path = self._answer_path(kind)
        if not path.exists() or _metadata(path, ("question", "header"))["question"] != question:
            return None
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in storage.read_tensors(path).items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = tensor
        return Packet(json.loads(_metadata(path, ("header",))["header"]), groups)

    def keep_answer(self, kind: str, question: str, answer: Packet) -> None:
        """In place of the last one of its kind."""
        tensors = {f"{group}/{key}": t for group, some in answer.groups.items() for key, t in some.items()}
        about = {"format": FORMAT, "run": self.run, "client": self.client, "question": question}
        storage.write_tensors(
            self._answer_path(kind), tensors, _sealed(about | {"header": json.dumps(answer.header)}), private=True
        )

    def _answer_path(self, kind: str) -> Path:
        return self.folder / f"answer-{kind}.safetensors"

    def _read(self) -> _State | None:
        path = self.folder / _STATE
        if not path.exists():
            return None
        meta = _metadata(path)
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


_WAY_OUT = "Restore it from a copy, or remove it: the client then begins anew from the server's model"


_OF_A_STATE = ("run", "client", "method", "round", "before", "version", "saved")


def _sealed(metadata: Mapping[str, str]) -> dict[str, str]:
    """With a checksum of its own: that of a file of tensors is of the tensors alone, and the scaling of a model is
    metadata."""
    return {**metadata, _ABOUT: _seal(metadata)}


def _seal(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode()).hexdigest()[:32]


def _metadata(path: Path, wanted: Sequence[str] = _OF_A_STATE) -> dict[str, Any]:
    try:
        meta = storage.read_metadata(path)
    except StorageError as error:
        raise StorageError(f"{error}. {_WAY_OUT}") from None
    if meta.get("format") != FORMAT or any(name not in meta for name in wanted):
        raise StorageError(f"{path} is no file of this version of kinfed (format {meta.get('format')}). {_WAY_OUT}")
    if meta.get(_ABOUT) != _seal({name: text for name, text in meta.items() if name not in (_ABOUT, storage.CHECKSUM)}):
        raise StorageError(f"{path} is damaged: what it says of itself does not match its checksum. {_WAY_OUT}")
    return meta


def _private_folder(path: Path) -> None:
    """For this user's eyes only, as are all folders made on the way to it."""
    with storage.storage_errors("create the folder", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                storage.sync_folder(folder.parent)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    lock = FileLock(path, mode=0o600)
    with storage.storage_errors("lock", path):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
