"""Logs as lines of JSON, where KINFED_LOG=json asks for them (`kinfed deploy server --log json`, and `node`):

    {"time": ..., "level": "info", "source": "node", "text": "left train", "id": "1f0c/3/hospital-a",
     "run": "1f0c", "round": 3, "site": "hospital-a", ...}

`id` names run, round and site as far as a line is of one; the lines of a message have the same one at server and node.
Every message is a line, too: its entry in the audit log (kinfed.deploy.operations.audit_log).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

VARIABLE, JSON = "KINFED_LOG", "json"
AUDIT_LOGGER = "kinfed.audit"  # of entries of the audit log, each in the attribute `entry` of its record
_place: ContextVar[Mapping[str, Any]] = ContextVar("place", default={})  # noqa: B039 (a Mapping is not changed)
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")  # of terminals
_NAMES = {"client": "site"}  # fields of entries by other names


def wants_json() -> bool:
    return os.environ.get(VARIABLE) == JSON


def place_lines(**ids: Any) -> None:
    """Say of which run, round and site the lines from here on are."""
    _place.set({**_place.get(), **ids})


def json_line(text: str, source: str, level: str = "info", **fields: Any) -> str:
    about = {**_place.get(), **{_NAMES.get(name, name): value for name, value in fields.items()}}
    ids = [str(about[name]) for name in ("run", "round", "site") if about.get(name) not in (None, "")]
    moment = about.pop("time", None) or datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
    line = {"time": moment, "level": level, "source": source, "text": text, **({"id": "/".join(ids)} if ids else {})}
    return json.dumps(line | about, ensure_ascii=False)


def say_json(source: str) -> Callable[[str], None]:
    """A function that prints a sentence as a line of JSON."""
    return lambda text: print(json_line(text, source), flush=True)


def rewritten(line: str, source: str) -> str:
    """A line that another program has printed; one that is a line of JSON already stays as it is."""
    line = ESCAPES.sub("", line)
    if line.startswith("{"):
        try:
            if "time" in json.loads(line):
                return line
        except ValueError:
            pass
    return json_line(line, source)


class _Formatter(logging.Formatter):
    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return json_line(text, self._source, record.levelname.lower(), **getattr(record, "entry", {}))


@contextmanager
def json_lines(source: str, *loggers: str) -> Iterator[None]:
    """Around a task: what these loggers and those of kinfed say becomes lines of JSON, where that is asked for."""
    if not wants_json():
        yield
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Formatter(source))
    former = {}
    for name in ("kinfed", *loggers):
        logger = logging.getLogger(name)
        former[name] = logger.handlers, logger.level, logger.propagate
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for name, (handlers, level, propagate) in former.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
