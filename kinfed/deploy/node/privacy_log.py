"""A client's privacy log: all that its training examples were asked under differential privacy, over all runs and
servers, and its cost.

    <vault>/books/<client>.json    one entry per answer; written and synced before the answer leaves

The server keeps a ledger too (kinfed.privacy.budget), of its own run. This one is the client's own: it needs to trust
nobody, and a second run or a second server begins where the first one ended. An entry counts, whether or not its
answer arrived.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.node.vault_entry import locked_by
from kinfed.errors import StorageError
from kinfed.privacy import Event, Events, merge

FORMAT = "kinfed-books-1"
_WAY_OUT = "Restore it from a copy; without its privacy log a client answers nothing private"

ByNoise = tuple[tuple[float, Events], ...]


@dataclass(frozen=True)
class Answered:
    """One answer that was computed from training examples."""

    question: str  # digest of all that the answer depends on; the file calls it so
    run: str
    kind: str
    round: int
    noise: float
    events: Events
    time: str

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Answered:
        return cls(**dict(record) | {"events": tuple(Event(*event) for event in record["events"])})


@dataclass(frozen=True)
class Page:
    answers: tuple[Answered, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)  # of the owner, as of the last request
    roles: str = ""  # which rows are for training, validation and test, where the node does not name them; a digest

    def spent(self, run: str | None = None, kind: str | None = None) -> ByNoise:
        """Cost of all answers, or of those of one run and kind."""
        total: dict[float, Events] = {}
        for answer in self.answers:
            if run in (None, answer.run) and kind in (None, answer.kind):
                total[answer.noise] = merge(total.get(answer.noise, ()), answer.events)
        return tuple(sorted(total.items()))

    def knows(self, request: str) -> bool:
        return any(answer.question == request for answer in self.answers)


class PrivacyLog:
    def __init__(self, folder: Path, client: str) -> None:
        self.folder, self.client = folder, client
        self.path = folder / f"{storage.file_name(client)}.json"

    def locked(self) -> AbstractContextManager[None]:
        """Lock the log, from the look at the rest of the budget until the answer is entered."""
        return locked_by(self.folder / f".{storage.file_name(self.client)}.lock")

    def open(self) -> None:
        """Begin an empty log, if there is none yet."""
        with self.locked():
            if not self.path.exists():
                self._write(Page())

    def read(self) -> Page:
        if not self.path.exists():
            raise StorageError(f"the privacy log {self.path} is gone. {_WAY_OUT}")
        record = storage.read_json(self.path, "the privacy log of a client")
        digest = record.pop("digest", None)
        if record.get("format") != FORMAT or record.get("client") != self.client or digest != _digest(record):
            raise StorageError(f"{self.path} is damaged, or another client's. {_WAY_OUT}")
        return Page(tuple(Answered.read(answer) for answer in record["answers"]), record["rules"], record["roles"])

    def note(self, rules: Mapping[str, Any], roles: str) -> Page:
        """Enter the owner's present rules, if they have changed."""
        page = self.read()
        new = replace(page, rules=dict(rules), roles=roles)
        if new != page:
            self._write(new)
        return new

    def enter(self, answer: Answered) -> None:
        page = self.read()
        self._write(replace(page, answers=(*page.answers, answer)))

    def _write(self, page: Page) -> None:
        answers = [asdict(a) | {"events": [[e.q, e.gradients, e.batches] for e in a.events]} for a in page.answers]
        content = {"rules": dict(page.rules), "roles": page.roles, "answers": answers}
        record = {"format": FORMAT, "client": self.client, **content}
        storage.write_json(self.path, record | {"digest": _digest(record)}, private=True)


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
