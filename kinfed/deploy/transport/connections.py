"""Connections of clients, so that the log can give the reason for every silence.

Times are those of the exchange's clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass
class Contact:
    seen: float | None = None  # last time that its node was connected
    answered: float | None = None  # last time that it answered
    asked: float | None = None  # since when its answer is awaited; None: nothing is
    error: str = ""  # the last one
    failed: float | None = None  # when that was


@dataclass
class Presence:
    contacts: dict[str, Contact] = field(default_factory=dict)

    def of(self, name: str) -> Contact:
        return self.contacts.setdefault(name, Contact())

    def see(self, names: Iterable[str], now: float) -> None:
        for name in names:
            self.of(name).seen = now

    def ask(self, name: str, now: float) -> None:
        contact = self.of(name)
        contact.asked = now if contact.asked is None else contact.asked

    def settle(self, name: str, now: float, error: str = "") -> None:
        """Note an answer, or the end of waiting for one with its error."""
        contact = self.of(name)
        contact.asked = None
        if error:
            contact.error, contact.failed = error, now
        else:
            contact.answered = contact.seen = now

    def note_error(self, name: str, now: float, error: str) -> None:
        """Note an error of a client whose answer is still awaited."""
        contact = self.of(name)
        contact.error, contact.failed = error, now

    def sentence(self, name: str, now: float, connected: Collection[str]) -> str:
        """The reason why there is nothing from this client yet."""
        contact = self.of(name)
        if name not in connected:
            where = "never seen yet" if contact.seen is None else f"not connected, last seen {_ago(now, contact.seen)}"
        elif contact.asked is None:
            where = "connected, not asked yet"
        else:
            where = f"connected, asked {_ago(now, contact.asked)}, no answer yet"
        last = "" if contact.failed is None else f"; last error {_ago(now, contact.failed)}: {contact.error}"
        return f"{name}: {where}{last}"


def _ago(now: float, then: float) -> str:
    return f"{max(now - then, 0.0):.0f} s ago"
