"""Personal files of a node: one folder per (run, client), written so that no crash can spoil it.

    <vault>/<run>/<client>/state.safetensors     the client's state after its last two rounds
                           model.safetensors     the model to use, as plain PyTorch loads it (kinfed predict)
                           answer-*.safetensors  the last answers of private training, for when one is lost on the way
    <vault>/secrets/<client>.key                 32 random bytes for the noise of private training; never leaves
                   <client>.identity             the key that the client belongs to, where the node names no other
    <vault>/books/<client>.json                  the ledger, over all runs (kinfed.deploy.node.privacy_log)
    <vault>/audit/<client>.jsonl                 every message that left, or was refused (kinfed.deploy.operations)
    <vault>.<client>.count                       the number of its entries, beside the vault

Files are for their owner only (mode 600), and carry checksums of all that is in them. Nothing is pickled.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from kinfed.core import storage
from kinfed.deploy.node.privacy_log import PrivacyLog
from kinfed.deploy.node.vault_entry import MODEL, STATE, Lock, VaultEntry, make_private_folder, read_about
from kinfed.deploy.operations.audit_log import AUDIT_FOLDER, AuditLog
from kinfed.errors import ConfigError, StorageError
from kinfed.privacy import SECRET_BYTES, Secret

_SECRETS, _LOGS = "secrets", "books"


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


class Vault:
    def __init__(self, folder: Path | str, counter: Path | str = "") -> None:
        """`counter`: folder for the numbers of entries of ledgers (default: the one that the vault is in)."""
        self.folder = Path(folder).expanduser()
        self.counter = Path(counter).expanduser() if counter else self.folder.parent

    def entry(self, run: str, client: str) -> VaultEntry:
        if not run or run.casefold() in (_SECRETS, _LOGS, AUDIT_FOLDER):  # some file systems know no capitals
            raise StorageError(f"a run cannot be called {run!r}: the vault has a folder of its own under that name")
        return VaultEntry(self.folder / storage.file_name(run) / storage.file_name(client), run, client)

    def secret(self, client: str) -> Secret:
        """The client's own secret, made at the first use. Only the owner of the files may read it."""
        path = self._secret_path(client)
        with storage.storage_errors("keep the secret", path), Lock(path.parent / ".lock").held():
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
        """Path of the private key that the client belongs to, and the key; made at the first use."""
        from kinfed.deploy.transport.client_keys import new_private_key

        path = self._secret_path(client).with_suffix(".identity")
        with storage.storage_errors("keep the key", path), Lock(path.parent / ".lock").held():
            if not path.exists():
                storage.write_atomically(path, new_private_key(), private=True)
            return path, path.read_bytes()

    def audit_log(self, client: str) -> AuditLog:
        """All that ever left the node of a client, and all that was refused, message by message."""
        make_private_folder(self.folder / AUDIT_FOLDER)
        return AuditLog(self.folder / AUDIT_FOLDER / f"{storage.file_name(client)}.jsonl")

    def privacy_log(self, client: str) -> PrivacyLog:
        """The client's own, begun before its secret is: if there is a secret and no log, the log was lost."""
        make_private_folder(self.folder / _LOGS)
        log = self._log(client)
        if not self._secret_path(client).exists():
            log.open()
            self.secret(client)
        return log

    def privacy_logs(self) -> list[PrivacyLog]:
        """Logs of all clients that have any."""
        files = sorted((self.folder / _LOGS).glob("*.json"))
        return [self._log(str(storage.read_json(path).get("client"))) for path in files]

    def _log(self, client: str) -> PrivacyLog:
        counter = self.counter / f"{self.folder.name}.{storage.file_name(client)}.count"
        return PrivacyLog(self.folder / _LOGS, client, counter)

    def _secret_path(self, client: str) -> Path:
        folder = self.folder / _SECRETS
        make_private_folder(folder)
        return folder / f"{storage.file_name(client)}.key"  # ends in .key, so that with_suffix replaces just that

    def entries(self) -> list[EntryInfo]:
        """Entries of the vault, oldest first. A damaged entry is an error that names it."""
        entries = []
        for path in sorted(self.folder.glob(f"*/*/{STATE}")):
            meta, nbytes = read_about(path), path.stat().st_size
            model = path.parent / MODEL
            entries.append(
                EntryInfo(
                    meta["run"], meta["client"], meta["method"], int(meta["round"]), int(meta["version"]),
                    nbytes + (model.stat().st_size if model.exists() else 0), meta["saved"], model.exists(),
                )
            )  # fmt: skip
        return sorted(entries, key=lambda entry: entry.saved)

    def model_path(self, run: str | None = None, client: str | None = None) -> Path:
        """Path of the personal model of a run (default: the newest) and client."""
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
        path = self.entry(newest.run, newest.client).folder / MODEL
        read_about(path, ("run", "client"))
        storage.read_tensors(path)  # compares the checksum
        return path

    def clear(self, run: str, client: str | None = None) -> list[str]:
        """Remove a run's states, models and answers; returns the clients that had any. Secrets and logs stay."""
        folder = self.folder / storage.file_name(run)
        clients = [entry.client for entry in self.entries() if entry.run == run and client in (None, entry.client)]
        if not clients:
            whose = f", {client}" if client else ""
            raise ConfigError(f"the vault {self.folder} holds nothing of run {run!r}{whose}")
        with storage.storage_errors("remove", folder):
            for name in clients:
                shutil.rmtree(folder / storage.file_name(name))
            if not any(folder.iterdir()):
                folder.rmdir()
            storage.sync_folder(self.folder)
        return clients
