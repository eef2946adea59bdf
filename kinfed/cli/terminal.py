"""Printing and stopping of commands. Names from outside, such as "[/bold]" and ":x:", are text and never markup."""

from __future__ import annotations

import signal
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(soft_wrap=False, markup=False, emoji=False)


def say(text: str, *, style: str | None = None) -> None:
    """A line that is not cut, wrapped or coloured by rich, so that paths in it can be copied."""
    console.print(text, style=style, highlight=False, soft_wrap=True)


def plain_table(*headings: str, **about: Any) -> Table:
    """A table without lines."""
    return Table(*headings, box=None, padding=(0, 2, 0, 0), **about)


def new_folder(kind: str) -> Path:
    """The folder of a job that begins now, if none was named: runs/2026-01-31-120000."""
    return Path(kind) / datetime.now().strftime("%Y-%m-%d-%H%M%S")


class StopRequest:
    """The first Ctrl-C (or SIGTERM) asks to stop after the round; a second Ctrl-C stops at once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._requested = False
        self._handlers: dict[int, Any] = {}  # that stood before, by signal

    def __call__(self) -> bool:
        return self._requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        self._console.print("stopping after this round; press Ctrl-C again to stop at once")

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
