"""Runs of Weights & Biases: one of every method and seed, in the project "kinfed", grouped by the run's folder.

Offline by default, in <run folder>/wandb, from where `wandb sync` sends them; WANDB_MODE=online sends at once.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import wandb

from kinfed.core import storage
from kinfed.runs import RunInfo
from kinfed.trackers.track import Tracker, Values

PROJECT = "kinfed"


class WandbTracker(Tracker[Any]):
    def __init__(self, project: str = PROJECT, folder: Path | str | None = None) -> None:
        super().__init__(folder)
        self._project = project

    def open(self, run: RunInfo, label: str, seed: int, first: int) -> Any:
        place = self.folder(run, "")
        storage.make_folder(place / "wandb")  # wandb chooses another place if it is missing
        name = self.track_name(label, seed)
        identity = hashlib.sha256(f"{run.fingerprint} {place.resolve()} {name}".encode()).hexdigest()[:16]
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False)
        return wandb.init(  # the identity is the same when the run is resumed
            project=self._project, group=place.name or None, name=name, id=identity, resume="allow", dir=str(place),
            mode=os.environ.get("WANDB_MODE", "offline"), reinit="create_new", settings=quiet,
            config={**run.settings, "algorithm": label, "seed": seed},
        )  # fmt: skip

    def write(self, track: Any, values: Values, round: int) -> None:
        track.log(values, step=round)

    def close(self, track: Any, finished: bool) -> None:
        track.finish(exit_code=0 if finished else 1)
