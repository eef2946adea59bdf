"""Memory of a client between the requests of a secure sum, in its vault.

<vault>/<run>/<client>/sum.json                its secrets and the answers of the sum under way (mode 600)
                       sum-update.safetensors  the update as whole numbers, until the next one takes its place
                       sum-peers.json          the keys that other clients had when they were first seen
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from kinfed.core import storage
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.errors import StorageError

FORMAT = 1
_FILE, _UPDATE, _PEERS = "sum.json", "sum-update.safetensors", "sum-peers.json"


@dataclass(frozen=True)
class SumState:
    """Memory of one sum. Bytes are hexadecimal."""

    round: int
    sealing: str = ""  # private keys
    masking: str = ""
    seed: str = ""  # b
    record: str = ""
    clients: list[list[Any]] = field(default_factory=list)  # [number, name, key] of all
    records: list[str] = field(default_factory=list)
    kept: str = ""  # the client's own pair of shares
    pairs: dict[str, str] = field(default_factory=dict)  # by place: the pairs of others
    senders: list[int] = field(default_factory=list)  # U1, as places
    survivors: list[int] = field(default_factory=list)  # U2, which this client has signed
    questions: dict[str, str] = field(default_factory=dict)  # digests of requests, by kind; the file calls them so
    sealed: list[str] = field(default_factory=list)  # the answer to `share`
    masked_round: int = 0  # the last one in which an update was masked


class SumMemory:
    """Hold the entry's lock from reading until writing."""

    def __init__(self, entry: VaultEntry, client: str) -> None:
        self._entry, self._about = entry, {"format": FORMAT, "run": entry.run, "client": client}
        self._path = entry.folder / _FILE

    @property
    def peers_path(self) -> Path:
        return self._entry.folder / _PEERS

    def read(self) -> SumState:
        if not self._path.exists():
            return SumState(0)
        record = storage.read_json(self._path, "the memory of a secure sum")
        if {name: record.pop(name, None) for name in self._about} != self._about:
            raise StorageError(
                f"{self._path} is of another run, client or version of kinfed. Move it away: the round is lost"
            )
        return SumState(**record)

    def write(self, state: SumState) -> None:
        storage.write_json(self._path, asdict(state) | self._about, private=True)

    def update(self) -> Tensor:
        """The update, int64 [W + 1], as it was kept."""
        return storage.read_tensors(self._entry.folder / _UPDATE)["update"]

    def keep_update(self, round: int, vector: Tensor) -> None:
        storage.write_tensors(self._entry.folder / _UPDATE, {"update": vector}, {"round": str(round)}, private=True)

    def peers(self) -> dict[str, Any]:
        """Public keys by client, of all that were seen."""
        return storage.read_json(self.peers_path) if self.peers_path.exists() else {}

    def keep_peers(self, keys: Mapping[str, str]) -> None:
        storage.write_json(self.peers_path, keys, private=True)
