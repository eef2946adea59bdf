"""Reports while nothing happens. Times are those of any clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_REPORT, LONGEST_PAUSE = 30.0, 300.0  # before a log says who is awaited; between two such reports


@dataclass
class Silence:
    """Says when to report: after half a minute, then after twice as long each time."""

    now: float
    pause: float = FIRST_REPORT

    def __post_init__(self) -> None:
        self._due = self.now + self.pause

    @property
    def due(self) -> float:
        """Time of the next report."""
        return self._due

    def is_due(self, now: float) -> bool:
        if now < self._due:
            return False
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self._due = now + self.pause
        return True
