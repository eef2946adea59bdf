"""A client's ledger: all that ever left its node, over all runs and servers, with its price or the rule it left by.

    <vault>/books/<client>.json    one entry per answer with a price, and counts of all others by run, kind and rule;
                                   written and synced before anything leaves (kinfed.deploy.node.gate)
    <vault>.<client>.count         how many entries with a price there were: beside the vault, not in it

The server keeps a ledger too (kinfed.privacy.budget), of its own run. This one is the client's own: it needs to trust
no one, and a second run or a second server begins where the first one ended. An entry counts, whether or not its
answer arrived. A vault that is restored from a backup brings an older ledger, which has forgotten what was spent since:
it has fewer entries than the count beside the vault, and nothing leaves with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.deploy.node.vault_entry import Lock
from kinfed.deploy.transport.wire import EVALUATE, TRAIN
from kinfed.errors import StorageError
from kinfed.privacy import Event, Events, merge

FORMAT = "kinfed-books-1"
SCORES = "scores"  # kind of an entry: noised figures of an evaluation
SUM = "sum"  # likewise: a masked update with a share of user-level noise
COUNTS = "counts"  # likewise: noised counts of a description, of all rows
# What is protected, and the kinds of entries that its epsilon is computed from. No row is in two of the first two: the
# owner says which rows are for what, for good; descriptions are of both. The third is the client as a whole.
TRAINING_ROWS, HELD_OUT_ROWS, WHOLE_CLIENT = (TRAIN, EVALUATE, COUNTS), (SCORES, COUNTS), (SUM,)
_LOG = logging.getLogger("kinfed.node")
_WAY_OUT = "Restore it from a copy; without its ledger a client answers nothing"

ByNoise = tuple[tuple[float, Events], ...]


@dataclass(frozen=True)
class Answered:
    """One answer with a price."""

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
    roles: str = ""  # which rows are for training, validation and test, where the data do not name them
    released: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # answers without a price, by run and rule
    summed: Mapping[str, str] = field(default_factory=dict)  # runs by digests of models, trained for secure sums

    def spent(self, run: str | None = None, kinds: Collection[str] = TRAINING_ROWS) -> ByNoise:
        """Cost of all answers of these kinds, or of those of one run."""
        total: dict[float, Events] = {}
        for answer in self.answers:
            if run in (None, answer.run) and answer.kind in kinds:
                total[answer.noise] = merge(total.get(answer.noise, ()), answer.events)
        return tuple(sorted(total.items()))

    def accounts(self, run: str | None = None) -> dict[str, ByNoise]:
        """Cost of all answers, or of those of one run, by what it protects."""
        kinds = {"training rows": TRAINING_ROWS, "held-out rows": HELD_OUT_ROWS, "the client as a whole": WHOLE_CLIENT}
        return {name: self.spent(run, of) for name, of in kinds.items()}

    def knows(self, request: str) -> bool:
        return any(answer.question == request for answer in self.answers)


class PrivacyLog:
    def __init__(self, folder: Path, client: str, counter: Path) -> None:
        self.folder, self.client = folder, client
        self.path = folder / f"{storage.file_name(client)}.json"
        self.counter = counter
        self._lock = Lock(folder / f".{storage.file_name(client)}.lock")

    def locked(self) -> AbstractContextManager[None]:
        """Lock the ledger, from the look at the rest of the budget until the answer is entered; also within a lock."""
        return self._lock.held()

    def open(self) -> None:
        """Begin an empty ledger, if there is none yet."""
        with self.locked():
            if not self.path.exists():
                self._write(Page())

    def read(self) -> Page:
        if not self.path.exists():
            raise StorageError(f"the ledger {self.path} is gone. {_WAY_OUT}")
        record = storage.read_json(self.path, "the ledger of a client")
        digest = record.pop("digest", None)
        about = (record.get("format"), record.get("client"))
        if about != (FORMAT, self.client) or digest != storage.record_digest(record):
            raise StorageError(f"{self.path} is damaged, or another client's. {_WAY_OUT}")
        answers = tuple(Answered.read(answer) for answer in record["answers"])
        page = Page(answers, record["rules"], record["roles"], record.get("released", {}), record.get("summed", {}))
        self._check_count(len(answers))
        return page

    def note(self, rules: Mapping[str, Any], roles: str) -> Page:
        """Enter the owner's present rules, if they have changed."""
        page = self.read()
        new = replace(page, rules=dict(rules), roles=roles)
        if new != page:
            self._write(new)
        return new

    def enter(self, answer: Answered) -> None:
        """Enter an answer with a price."""
        page = self.read()
        self._write(replace(page, answers=(*page.answers, answer)))
        self._keep_count(len(page.answers) + 1)

    def count(self, run: str, rule: str) -> None:
        """Enter an answer that a rule lets out without a price."""
        self.count_all({(run, rule): 1})

    def count_all(self, answers: Mapping[tuple[str, str], int]) -> None:
        """Enter numbers of such answers by run and rule, in one go."""
        page = self.read()
        released = {run: dict(rules) for run, rules in page.released.items()}
        for (run, rule), number in answers.items():
            of_run = released.setdefault(run, {})
            of_run[rule] = of_run.get(rule, 0) + number
        self._write(replace(page, released=released))

    def note_models(self, models: Mapping[str, str]) -> None:
        """Remember that models, by their digests, were trained for secure sums of runs."""
        page = self.read()
        if models.keys() - page.summed.keys():
            self._write(replace(page, summed={**page.summed, **models}))

    def _keep_count(self, entries: int) -> None:
        """Write the count, after the ledger: a crash in between leaves one that is too small, and no refused ledger."""
        if self.counter.parent.is_dir() and not os.access(self.counter.parent, os.W_OK):
            _LOG.warning(
                "%s cannot be written, so it will not be noticed if the vault is set back to an older copy; name a "
                "folder for it: counter in node.toml", self.counter,
            )  # fmt: skip
            return
        storage.write_json(self.counter, {"client": self.client, "answers": entries}, private=True)

    def _check_count(self, entries: int) -> None:
        if not self.counter.exists():
            return
        counted = storage.read_json(self.counter, "the count of a ledger's entries").get("answers")
        if not isinstance(counted, int) or entries < counted:
            raise StorageError(
                f"the ledger {self.path} has been set back: it has {entries} answers with a price, and {counted} had "
                f"left when {self.counter} was written. Restore the newest ledger. If it is lost, it is not known what "
                "was spent: remove the count only if you accept that"
            )

    def _write(self, page: Page) -> None:
        answers = [asdict(a) | {"events": [[e.q, e.gradients, e.batches] for e in a.events]} for a in page.answers]
        content = {"rules": dict(page.rules), "roles": page.roles, "answers": answers}
        record = {"format": FORMAT, "client": self.client, **content, "released": page.released, "summed": page.summed}
        storage.write_json(self.path, record | {"digest": storage.record_digest(record)}, private=True)
