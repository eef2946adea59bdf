"""Observers of a run, a tuning or a deployment: displays, logs and trackers.

    class Printer(NullObserver):                       # every event has an empty answer to inherit
        def round(self, label, seed, report, personal, server):
            if personal is not None:
                print(label, seed, report.round, personal["accuracy"])

    kinfed.run(algorithms="local,ditto", observer=Printer())

In a run the order is: `begun` once; for every method and seed `started`, `round` after each round, `finished`; `ended`
once, also where the run fails or is stopped. Warm starts and pre-training are rounds with labels of their own, without
`finished`. `note` may come at any time. A resumed run is heard from the round on that it resumes with: those after the
last checkpoint were heard before, and have the same numbers. What an observer raises ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinfed.records import FinalRecord
    from kinfed.server import RoundReport

Metrics = dict[str, float]


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run before its first round."""

    settings: dict[str, Any]  # the whole configuration as plain values, as in config.json
    folder: Path | None  # None: nothing is written
    fingerprint: str | None  # identity of a run with a folder; stays the same when the run is extended


class Observer:
    """Listener to a run. An exception ends the run; a round is reported before it is saved in a checkpoint."""

    def begun(self, run: RunInfo) -> None:
        """A run begins, or goes on."""

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        """An algorithm begins, or goes on after `first` of its `rounds`."""

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        """A round is in the journal; `personal` and `server` are the metrics of the personal models and of the server's
        model on test data, where the round was evaluated (`server` None: also if there is no such model)."""

    def finished(self, result: FinalRecord) -> None:
        """An algorithm has done its last round."""

    def ended(self) -> None:
        """Nothing follows. What was opened is to be closed."""

    def note(self, text: str) -> None:
        """A sentence that a reader should see."""


class NullObserver(Observer):
    """Observer that ignores every event; others inherit what they do not care about."""


def _to_all(event: str) -> Any:
    def tell(self: Observers, *facts: Any) -> None:
        for member in self.members:
            getattr(member, event)(*facts)

    return tell


@dataclass(frozen=True)
class Observers(NullObserver):
    """Several as one, told in this order."""

    members: Sequence[Observer]

    begun, started, round, finished, note = map(_to_all, ("begun", "started", "round", "finished", "note"))

    def ended(self) -> None:
        """All are told, also where one fails."""
        with ExitStack() as stack:
            for member in reversed(self.members):
                stack.callback(member.ended)
