"""Runs of MLflow: one for every method and seed, in the experiment "kinfed", at MLFLOW_TRACKING_URI if that is set,
else in <run folder>/mlruns. MLflow 3 reads such files only if told to:

    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri runs/a/mlruns
"""

import os
import time
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from kinfed.config import flat_settings
from kinfed.runs import RunInfo
from kinfed.trackers.track import Tracker, Values

EXPERIMENT = "kinfed"
_PARAMS_AT_ONCE, _LONGEST = 100, 500  # what every server of MLflow takes: parameters of a request, letters of a value
_URI, _FILES = "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"


class MlflowRun(NamedTuple):
    client: MlflowClient
    id: str


class MlflowTracker(Tracker[MlflowRun]):
    def __init__(self, uri: str | None = None, experiment: str = EXPERIMENT) -> None:
        super().__init__()
        self._uri, self._experiment = uri or os.environ.get(_URI), experiment

    def open(self, run: RunInfo, label: str, seed: int, first: int) -> MlflowRun:
        place = self._uri
        if place is None:
            os.environ.setdefault(_FILES, "true")  # files of one run are read where they are written, without a server
            place = self.folder(run, "mlruns").resolve().as_uri()
        client = MlflowClient(tracking_uri=place)
        known = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if known is None else known.experiment_id
        name, identity = self.track_name(label, seed), run.fingerprint or ""
        tags = {"kinfed.trial": name, "kinfed.fingerprint": identity, "algorithm": label, "seed": str(seed)}
        if first and identity:
            wanted = f"tags.`kinfed.trial` = '{name}' and tags.`kinfed.fingerprint` = '{identity}'"
            if earlier := client.search_runs([experiment], wanted, max_results=1):
                client.update_run(earlier[0].info.run_id, status="RUNNING")
                return MlflowRun(client, earlier[0].info.run_id)
        created = client.create_run(experiment, tags=tags, run_name=name).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in flat_settings(run.settings)]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            client.log_batch(created, params=params[start : start + _PARAMS_AT_ONCE])
        return MlflowRun(client, created)

    def write(self, track: MlflowRun, values: Values, round: int) -> None:
        now = int(time.time() * 1000)  # milliseconds, as MLflow counts them
        track.client.log_batch(track.id, metrics=[Metric(name, value, now, round) for name, value in values.items()])

    def close(self, track: MlflowRun, finished: bool) -> None:
        track.client.set_terminated(track.id, "FINISHED" if finished else "KILLED")
