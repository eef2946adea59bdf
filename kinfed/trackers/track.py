"""Trackers: observers that write what a run does for TensorBoard, MLflow or Weights & Biases, each with an extra.

    kinfed run --track tensorboard,mlflow --out runs/a
    kinfed.run(algorithms="local,ditto", out="runs/a", observer=make_tracker("tensorboard"))

Every method and seed is a run of the tracker, called ditto-0, with the settings, and figures of every round under the
names of `round_values`. A run that is resumed goes on in the same place.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kinfed.core import storage
from kinfed.errors import ConfigError, unknown_name
from kinfed.runs import Metrics, NullObserver, RunInfo

if TYPE_CHECKING:
    from kinfed.records import FinalRecord
    from kinfed.server import RoundReport

TRACKERS = {
    "tensorboard": "kinfed.trackers.tensorboard_tracker:TensorBoardTracker",
    "mlflow": "kinfed.trackers.mlflow_tracker:MlflowTracker",
    "wandb": "kinfed.trackers.wandb_tracker:WandbTracker",
}

Track = TypeVar("Track")  # what a tracker has open for one method and seed
Values = dict[str, float]


def round_values(report: RoundReport, personal: Metrics | None, server: Metrics | None) -> Values:
    """personal/accuracy, server/loss, cost/bytes_up ...; what is not finite is left out."""
    values: Values = {
        "cost/bytes_down": report.bytes_down,
        "cost/bytes_up": report.bytes_up,
        "cost/seconds": report.seconds,
        "clients/active": report.active,
        "clients/dropped": report.dropped,
    }
    for kind, metrics in (("personal", personal), ("server", server)):
        values |= {f"{kind}/{name}": value for name, value in (metrics or {}).items() if math.isfinite(value)}
    return values


class Tracker(NullObserver, Generic[Track]):
    """Opens a track when a method starts with a seed, writes every round to it and closes it at the end; what these
    three are is said by the trackers themselves."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.run: RunInfo | None = None
        self._folder = None if folder is None else Path(folder)
        self._tracks: dict[tuple[str, int], Track] = {}

    def open(self, run: RunInfo, label: str, seed: int, first: int) -> Track:
        """A method begins, or goes on after `first` rounds of its own."""
        raise NotImplementedError

    def write(self, track: Track, values: Values, round: int) -> None:
        raise NotImplementedError

    def close(self, track: Track, finished: bool) -> None:
        """`finished`: the method has done its last round."""
        raise NotImplementedError

    def folder(self, run: RunInfo, name: str) -> Path:
        """The place of the tracker: the folder that it was given, or `name` in the run's."""
        if self._folder is not None:
            return self._folder
        if run.folder is None:
            raise ConfigError(f"{type(self).__name__} writes to the run's folder, and there is none; give out (--out)")
        return run.folder / name

    def track_name(self, label: str, seed: int) -> str:
        """ditto-0; ditto-fold-2-0 in a cross-validation."""
        return storage.file_name(f"{label}-{seed}".replace(" ", "-"))

    def begun(self, run: RunInfo) -> None:
        self.run = run

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        assert self.run is not None, "a tracker is told of a run's beginning first"
        self._tracks[label, seed] = self.open(self.run, label, seed, first)

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        self.write(self._tracks[label, seed], round_values(report, personal, server), report.round)

    def finished(self, result: FinalRecord) -> None:
        track = self._tracks.pop((result.label, result.seed), None)
        if track is not None:  # of a cross-validation the folds are tracked, each under a name of its own
            self.close(track, finished=True)

    def ended(self) -> None:
        while self._tracks:
            (label, _), track = self._tracks.popitem()
            self.close(track, finished=label not in (self.run.settings["algorithms"] if self.run else ()))


def make_tracker(name: str) -> Tracker[Any]:
    """The tracker of that name, with its files in the run's folder."""
    if name not in TRACKERS:
        raise unknown_name("tracker", name, TRACKERS)
    module, _, kind = TRACKERS[name].partition(":")
    try:
        tracker: Tracker[Any] = getattr(importlib.import_module(module), kind)()
    except ModuleNotFoundError as error:
        needed = f"tracking with {name} needs the package {error.name}"
        raise ConfigError(f"{needed}; pip install 'kinfed[{name}]'") from error
    return tracker


def make_trackers(names: Iterable[str]) -> list[Tracker[Any]]:
    """The trackers of these names, several of which may stand in one text: tensorboard,mlflow."""
    listed = [part.strip() for text in names for part in text.split(",") if part.strip()]
    return [make_tracker(name) for name in dict.fromkeys(listed)]
