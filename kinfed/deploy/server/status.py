"""State of a deployment: <run folder>/status.json, which the server's part replaces as a whole every few seconds.

    state       waiting (for clients to appear), running, done, or stopped
    doing       in words; since when
    written     the time of writing: a file that gets old is that of a server that has died
    clients     of each: connected, last_seen, last_answer, awaited_since, last_error
    nodes       what is known of nodes that have not said yet whose they are

Rounds, bytes and privacy are in the journal (rounds.jsonl), which `describe` reads beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.core import storage
from kinfed.errors import StorageError

if TYPE_CHECKING:
    from kinfed.deploy.transport.exchange import Exchange

FILE = "status.json"
WAITING, RUNNING, DONE, STOPPED = "waiting", "running", "done", "stopped"
ENDED = (DONE, STOPPED)
WRITE_SECONDS = 5.0  # between two files while nothing happens
STALE_SECONDS = 60.0  # after which a file that says "running" is not believed


@dataclass
class StatusWriter:
    """`watch` is called at every look for answers, `update` when something happens."""

    folder: Path
    exchange: Exchange
    about: dict[str, Any]  # method, model, rounds
    names: list[str] = field(default_factory=list)  # clients, once they are known
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    _last: float = float("-inf")
    _values: dict[str, Any] = field(default_factory=dict)

    def update(self, state: str, doing: str, **values: Any) -> None:
        self._values |= {"state": state, "doing": doing, "since": _text(self.wall())} | values
        self.write()

    def watch(self) -> None:
        if self.exchange.clock() - self._last >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        now, wall = self.exchange.clock(), self.wall()
        self._last = now

        def at(moment: float | None) -> str | None:
            return None if moment is None else _text(wall - timedelta(seconds=now - moment))

        presence, connected = self.exchange.presence, self.exchange.present()
        clients = {
            name: {
                "connected": name in connected, "last_seen": at(contact.seen), "last_answer": at(contact.answered),
                "awaited_since": at(contact.asked), "last_error": contact.error, "failed": at(contact.failed),
            }
            for name in self.names or sorted(presence.contacts)
            for contact in [presence.of(name)]
        }  # fmt: skip
        record = {"written": _text(wall), "clients": clients, "nodes": self.exchange.strangers()}
        storage.write_json(self.folder / FILE, self.about | self._values | record)


@dataclass(frozen=True)
class Status:
    state: str
    doing: str
    since: str
    written: str
    clients: dict[str, dict[str, Any]]
    nodes: list[str]
    method: str
    rounds: int
    reason: str = ""
    epsilon_limit: float | None = None  # of the run, for rows of a client
    user_epsilon_limit: float | None = None  # for clients as a whole
    secret_choice: bool = False  # of clients in a round, on which epsilon rests: the page does not say who was asked

    def budgets(self, progress: Progress) -> list[tuple[float, float]]:
        """Pairs of epsilon spent and its limit, if both are known."""
        pairs = (progress.epsilon, self.epsilon_limit), (progress.user_epsilon, self.user_epsilon_limit)
        return [(spent, limit) for spent, limit in pairs if spent is not None and limit is not None]

    @property
    def age(self) -> float:
        return (datetime.now(UTC) - datetime.fromisoformat(self.written)).total_seconds()


def read_status(folder: Path) -> Status | None:
    """The status; None if the server's part has written none yet."""
    path = folder / FILE
    if not path.exists():
        return None
    record = storage.read_json(path, "the status of a deployment")
    try:
        return Status(**{name: record[name] for name in Status.__dataclass_fields__ if name in record})
    except TypeError as error:
        raise StorageError(f"{path} is not the status of a deployment: {error}") from None


@dataclass(frozen=True)
class Progress:
    rounds: int = 0
    seconds: float = 0.0  # per round, of the last five
    bytes_down: int = 0
    bytes_up: int = 0
    personal: dict[str, float] = field(default_factory=dict)  # metrics of personal models at the last evaluation
    epsilon: float | None = None  # the largest of a client, at the last evaluation
    user_epsilon: float | None = None  # of the server's models, for every client; likewise


def read_progress(folder: Path) -> Progress:
    path = folder / "rounds.jsonl"
    if not path.exists():
        return Progress()
    with storage.storage_errors("read", path):
        lines = path.read_text("utf-8").splitlines(keepends=True)
    try:
        records = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
        seconds = [float(record["seconds"]) for record in records[-5:]]
        evaluated = [dict(record["personal"]) for record in records if record.get("personal")]
        spent = [
            record["method"]["privacy"]["epsilon_max"] for record in records if "privacy" in record.get("method", {})
        ]
        hidden = [record["method"]["user_privacy"] for record in records if "user_privacy" in record.get("method", {})]
        return Progress(
            len({record["round"] for record in records}), sum(seconds) / max(len(seconds), 1),
            sum(record["bytes_down"] for record in records), sum(record["bytes_up"] for record in records),
            evaluated[-1] if evaluated else {}, spent[-1] if spent else None,
            hidden[-1]["epsilon"] if hidden else None,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged: {type(error).__name__} {error}") from None


def _text(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def clock_of(text: str | None) -> str:
    """A time of the file for people: in this machine's zone, without the date of today."""
    if text is None:
        return "never"
    moment = datetime.fromisoformat(text).astimezone()
    today = datetime.fromtimestamp(time.time()).date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M")
