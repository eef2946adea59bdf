"""The audit log of a node or a server: what left, when, by which rule, to whom. Append-only, one JSON line a message:

    <vault>/audit/<client>.jsonl    at a node: every answer of a client, and every refusal
    <out>/transfers.jsonl           at the server, in a run's folder: every request and what came of it

Every line has its number and the digest of the line before, so that a line that is changed, moved or taken out is
noticed by `verify`. The number of lines and the last digest are also in <file>.head; `head`, noted elsewhere, shows
later that nothing was taken from the end, which anyone who may write both files could do. A line is on the disk before
the message leaves; where it cannot be written, nothing leaves.

Of a message there are its kind, size and digest, not its content. The other side's log has the digest of the same
message: with both logs, whether all that came has left is checked, too (`unmatched`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from kinfed.core import storage
from kinfed.deploy.operations.log_lines import AUDIT_LOGGER
from kinfed.errors import StorageError

AUDIT_FOLDER, TRANSFERS = "audit", "transfers.jsonl"
FIRST = hashlib.sha256(b"kinfed audit log 1").hexdigest()  # what the first line names as the one before
SENT, LEFT, CAME, REFUSED = "sent", "left", "came", "refused"  # events: of a server, of a node, of a server, of both
_LOG = logging.getLogger(AUDIT_LOGGER)
_TAIL = 1 << 16  # bytes of the end of a file that are looked at for the last line


@dataclass(frozen=True)
class AuditHead:
    """Number of lines and the digest of the last one."""

    lines: int = 0
    digest: str = FIRST

    def __str__(self) -> str:
        return f"{self.lines}:{self.digest}"


class AuditLog:
    def __init__(self, path: Path) -> None:
        self.path, self._head_path = path, path.with_name(f"{path.name}.head")

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, and sync them. An entry has `event`, and what is known of client, run, round, kind and rule."""
        if not entries:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), mode=0o600)
        with storage.storage_errors("append to the audit log", self.path), lock:
            head = self._last()
            lines = []
            for entry in entries:
                line = _line(head, {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry})
                lines.append(line)
                head = AuditHead(head.lines + 1, _digest(line))
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                storage.write_all(file, b"".join(line + b"\n" for line in lines))
                os.fsync(file)
            finally:
                os.close(file)
            storage.write_json(self._head_path, {"lines": head.lines, "digest": head.digest}, private=True)
        for entry in entries:
            _LOG.info("%s %s", entry.get("event"), entry.get("kind"), extra={"entry": entry})

    @property
    def client(self) -> str:
        """The client whose log it is, at a node: as its lines say, whatever the file is called."""
        named = (str(entry["client"]) for entry in self.read() if "client" in entry)
        return next(named, urllib.parse.unquote(self.path.stem))

    def read(self) -> list[dict[str, Any]]:
        """All entries, oldest first; nothing is verified."""
        return self.read_from(0)[0]

    def read_from(self, start: int) -> tuple[list[dict[str, Any]], int]:
        """Entries from a byte of the file on, and the byte after them. A last line in the making is left."""
        if not self.path.exists():
            return [], 0
        with storage.storage_errors("read the audit log", self.path), self.path.open("rb") as file:
            file.seek(start)
            whole = file.read().rpartition(b"\n")[0]
        lines = whole.split(b"\n") if whole else []
        return [_record(line, self.path) for line in lines], start + (len(whole) + 1 if lines else 0)

    def verify(self, known: AuditHead | None = None) -> AuditHead:
        """The head of a log that is whole; StorageError that says what is not. `known`: an earlier head of it, as noted
        elsewhere."""
        head, seen = AuditHead(), known is None or known.lines == 0
        if self.path.exists():
            with storage.storage_errors("read the audit log", self.path), self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # a crash within a line: nothing has left by it
                    record = _record(line, self.path)
                    if record.get("n") != head.lines + 1 or record.get("before") != head.digest:
                        raise StorageError(
                            f"{self.path}, line {head.lines + 1}: it does not follow from the line before, so one of "
                            "the two was changed, or lines were taken out or put in"
                        )
                    head = AuditHead(head.lines + 1, _digest(line.removesuffix(b"\n")))
                    seen = seen or head == known
        noted = self._noted()
        if noted.lines > head.lines or (noted.lines == head.lines and noted != head):
            raise StorageError(
                f"{self.path} has {head.lines} lines, and {self._head_path.name} says {noted.lines} that end "
                "otherwise: the end was cut off or changed"
            )
        if not seen:
            raise StorageError(f"{self.path} never had the head {known}: lines before it were changed, or it was cut")
        return head

    def _noted(self) -> AuditHead:
        if not self._head_path.exists():
            return AuditHead()
        record = storage.read_json(self._head_path, "the head of an audit log")
        return AuditHead(int(record.get("lines", 0)), str(record.get("digest", FIRST)))

    def _last(self) -> AuditHead:
        """The head to go on from. What a crash left of a line is cut off; a log that was cut is not continued."""
        noted = self._noted()
        if not self.path.exists():
            if noted.lines:
                raise StorageError(f"{self.path} is gone, and had {noted.lines} lines; restore it from a copy")
            return noted
        with self.path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            tail = file.read()
            whole, newline, rest = tail.rpartition(b"\n")
            if rest:
                file.truncate(size - len(rest))
        if not newline:
            last = AuditHead()
        else:
            line = whole.rpartition(b"\n")[2]
            last = AuditHead(int(_record(line, self.path).get("n", 0)), _digest(line))
        if last.lines < noted.lines:
            raise StorageError(
                f"{self.path} ends with line {last.lines}, and {noted.lines} were written: the end was cut off. "
                "Restore it from a copy; nothing leaves with a log that was cut"
            )
        return last


def unmatched(node: AuditLog, server: AuditLog, client: str) -> list[dict[str, Any]]:
    """Lines of the server's log about messages that came from a client and are not in the client's log."""
    left = {entry.get("content") for entry in node.read() if entry.get("event") == LEFT}
    came = (entry for entry in server.read() if entry.get("event") == CAME and entry.get("client") == client)
    return [entry for entry in came if entry.get("content") not in left]


def _line(head: AuditHead, entry: Mapping[str, Any]) -> bytes:
    return json.dumps({"n": head.lines + 1, **entry, "before": head.digest}, ensure_ascii=False).encode()


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _record(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise StorageError(f"{path} holds a line that is no entry of an audit log; it was changed")
    return record
