"""Trackers: observers that write what a run does for TensorBoard, MLflow or Weights & Biases. Each needs a package of
its own, which is an extra of kinfed.

    kinfed run --track tensorboard,mlflow --out runs/a
    kinfed.run(algorithms="local,ditto", out="runs/a", observer=make_tracker("tensorboard"))

Every method and seed is a run of the tracker, called ditto-0, with the settings, and figures of every round under the
names of `track.round_values`. A run that is resumed goes on in the same place.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from kinfed.errors import ConfigError, unknown_name
from kinfed.trackers.track import Tracker

TRACKERS = {
    "tensorboard": "kinfed.trackers.tensorboard_tracker:TensorBoardTracker",
    "mlflow": "kinfed.trackers.mlflow_tracker:MlflowTracker",
    "wandb": "kinfed.trackers.wandb_tracker:WandbTracker",
}
__all__ = ["TRACKERS", "make_tracker", "make_trackers"]


def make_tracker(name: str) -> Tracker[Any]:
    """The tracker of that name, with its files in the run's folder."""
    if name not in TRACKERS:
        raise unknown_name("tracker", name, TRACKERS)
    module, _, kind = TRACKERS[name].partition(":")
    try:
        tracker: Tracker[Any] = getattr(importlib.import_module(module), kind)()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracking with {name} needs the package {error.name}; pip install 'kinfed[{name}]'"
        ) from error
    return tracker


def make_trackers(names: Iterable[str]) -> list[Tracker[Any]]:
    """From names, several of which may stand in one text: tensorboard,mlflow."""
    listed = [part.strip() for text in names for part in text.split(",") if part.strip()]
    return [make_tracker(name) for name in dict.fromkeys(listed)]
