"""Who hears what a run, a tuning or a deployment does: displays, logs and trackers are observers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kinfed.server.loop import RoundReport

Metrics = dict[str, float]


class Observer(Protocol):
    """What is raised here ends the run; a round is reported before it is saved in a checkpoint."""

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        """An algorithm begins, or goes on after `first` of its `rounds`."""

    def round(self, label: str, seed: int, report: RoundReport, personal: Metrics | None) -> None:
        """A round is in the journal; `personal` are the metrics of the personal models where they were evaluated."""

    def note(self, text: str) -> None:
        """A sentence that a reader should see."""


class NullObserver:
    """For nobody."""

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        pass

    def round(self, label: str, seed: int, report: RoundReport, personal: Metrics | None) -> None:
        pass

    def note(self, text: str) -> None:
        pass
