"""States of all runs of a search in one entry of a vault: read once for a message, and replaced as a whole after it.

So a message that comes again is answered as before, and 240 runs take one file and not as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kinfed.core import storage
from kinfed.deploy.node.vault_entry import VaultEntry
from kinfed.deploy.settings import FIT
from kinfed.deploy.transport.wire import MessageError

_ROUND = "/round"  # no field of a state is called so: the last round that this run was trained in
MODELS = "search.safetensors"  # outputs and models of all tries, once they are judged


@dataclass
class KeptRuns:
    """States of all runs of a search in one entry of a vault, as a message reads and replaces them."""

    entry: VaultEntry
    round: int
    accepted: int
    before: dict[str, Tensor] | None = None  # None: there is none
    after: dict[str, Tensor] = field(default_factory=dict)
    newest_round: int = 0
    trained: set[str] = field(default_factory=set)  # prefixes of the runs that this message has trained
    again: set[str] = field(default_factory=set)  # of those that it found trained by a message before it

    def open(self) -> None:
        with self.entry.locked():
            self.newest_round = self.entry.newest_round
            self.before = self.entry.state(self.accepted)

    def close(self, results: Mapping[str, Tensor]) -> None:
        with self.entry.locked():
            if self.trained:
                done = tuple(self.trained | self.again)
                others = {name: t for name, t in (self.before or {}).items() if not name.startswith(done)}
                if self.again:
                    newest = (self.entry.state(self.round) or {}).items()
                    others |= {name: t for name, t in newest if name.startswith(tuple(self.again))}
                self.entry.keep(self.round, others | self.after, self.accepted, FIT)
            if results:
                storage.write_tensors(self.entry.folder / MODELS, dict(results), {"run": self.entry.run}, private=True)


@dataclass
class SearchRunEntry:
    """One run's part of these, as an entry of a vault."""

    runs: KeptRuns
    prefix: str

    @property
    def client(self) -> str:
        return self.runs.entry.client

    @property
    def run(self) -> str:
        return self.runs.entry.run

    @property
    def folder(self) -> Path:
        return self.runs.entry.folder

    @property
    def newest_round(self) -> int:
        return self.runs.newest_round

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def state(self, round: int) -> dict[str, Tensor] | None:
        before, mark = self.runs.before, self.prefix + _ROUND
        if before is None or mark not in before or int(before[mark]) != round:
            return None
        own = {name[len(self.prefix) :]: t for name, t in before.items() if name.startswith(self.prefix)}
        del own[_ROUND]
        return own

    def keep(self, round: int, tensors: Mapping[str, Tensor], before: int, method: str) -> None:
        if round != self.runs.round:
            raise MessageError("runs of one message are in one round")
        self.runs.trained.add(self.prefix)
        self.runs.after[self.prefix + _ROUND] = torch.tensor(round)
        self.runs.after |= {self.prefix + name: tensor for name, tensor in tensors.items()}
