"""Trackers write files that their own libraries read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kinfed
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.runs.observer import NullObserver, Observers
from kinfed.trackers import TRACKERS, make_tracker, make_trackers
from kinfed.trackers.track import Tracker

SETTINGS: dict[str, Any] = {
    "algorithms": "local,fedavg", "model": "mlr", "rounds": 3, "eval_every": 2, "steps": 1, "seeds": (5,), "workers": 1,
    "warm_start": 1, "checkpoint_every": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Federation:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x[:, 0] > 0).to(torch.int64), [i % 4 for i in range(40)])


def tracked(name: str, data: Federation, folder: Path) -> kinfed.RunResult:
    """A run that is killed in its second method, after a round was tracked and before it was saved, and resumed."""
    pytest.importorskip(name, reason=f"the extra {name} is not installed")

    class Killer(NullObserver):
        def round(self, label: str, seed: int, report: Any, personal: Any, server: Any) -> None:
            if (label, report.round) == ("fedavg", 3):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kinfed.run(federation=data, out=folder, observer=Observers((make_tracker(name), Killer())), **SETTINGS)
    return kinfed.run(federation=data, out=folder, observer=make_tracker(name), resume=True, **SETTINGS)


def expected(result: kinfed.RunResult, label: str) -> dict[str, dict[int, float]]:
    """By name and round, from the journal."""
    trial = next(trial for trial in result.run.trials if trial.algorithm == label)
    curves = {f"{kind}/accuracy": {r.number: r.metrics[kind]["accuracy"] for r in trial.rounds if kind in r.metrics}
              for kind in ("personal", "server")}  # fmt: skip
    return curves | {"cost/bytes_up": {r.number: r.bytes_up for r in trial.rounds}}


def test_tensorboard_reads_its_files(data: Federation, tmp_path: Path) -> None:
    result = tracked("tensorboard", data, tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for label in ("local", "fedavg"):
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / f"{label}-5")).Reload()
        for name, values in expected(result, label).items():
            if not values:
                assert name not in events.Tags()["scalars"]
                continue
            scalars = events.Scalars(name)
            assert [event.step for event in scalars] == sorted(values), "rounds come once, also of a resumed run"
            assert [event.value for event in scalars] == pytest.approx([values[r] for r in sorted(values)])
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_mlflow_reads_its_files(data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = tracked("mlflow", data, tmp_path / "run")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "run" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("kinfed")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"local-5", "fedavg-5", "warm-start-5"}
    for label in ("local", "fedavg"):
        run = runs[f"{label}-5"]
        assert run.info.status == "FINISHED"
        assert run.data.params["rounds"] == "3"
        assert run.data.params["algorithms.local.method"] == "local"
        for name, values in expected(result, label).items():
            history = client.get_metric_history(run.info.run_id, name) if values else []
            assert {point.step: point.value for point in history} == pytest.approx(values)


@pytest.mark.skipif("KINFED_TEST_WANDB" not in os.environ, reason="starts processes; set KINFED_TEST_WANDB=1")
def test_wandb_reads_its_files(data: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    result = tracked("wandb", data, tmp_path / "run")
    curves: dict[str, dict[str, dict[int, float]]] = {}
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        name = ""
        for record in wandb_records(file.read_bytes()):
            name = record.run.display_name or name
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for key, value in items.items():
                if "/" in key:
                    step = record.history.step.num or int(items["_step"])
                    curves.setdefault(name, {}).setdefault(key, {})[step] = float(value)
    for label in ("local", "fedavg"):
        for name, values in expected(result, label).items():
            assert curves[f"{label}-5"].get(name, {}) == pytest.approx(values)


def wandb_records(text: bytes) -> Iterator[Any]:
    """wandb's own messages, in a log of LevelDB: after seven bytes, chunks of checksum, length, kind (1 whole, 2 first,
    3 middle, 4 last) and content, none across a block of 32768 bytes. wandb's reader is a program, not a module."""
    from wandb.proto import wandb_internal_pb2 as proto

    assert text.startswith(b":W&B")
    position, parts = 7, b""
    while position + 7 <= len(text):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(text[position + 4 : position + 6], "little"), text[position + 6]
        parts = (b"" if kind in (1, 2) else parts) + text[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = proto.Record()
            record.ParseFromString(parts)
            yield record


def test_trackers_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean tensorboard"):
        make_tracker("tensorbord")
    monkeypatch.setitem(TRACKERS, "lost", "kinfed.trackers.nowhere:Nothing")
    with pytest.raises(ConfigError, match=r"tracking with lost needs the package .*; pip install 'kinfed\[lost\]'"):
        make_tracker("lost")
    assert make_trackers([]) == []
    pytest.importorskip("tensorboard")
    assert len(make_trackers(["tensorboard", "tensorboard, tensorboard"])) == 1


def test_a_tracker_without_a_place_says_so(data: Federation, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from kinfed.trackers.tensorboard_tracker import TensorBoardTracker

    with pytest.raises(ConfigError, match="writes to the run's folder, and there is none"):
        kinfed.run(federation=data, observer=TensorBoardTracker(), **SETTINGS)
    kinfed.run(federation=data, observer=TensorBoardTracker(tmp_path), **{**SETTINGS, "folds": 2, "warm_start": 0})
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{label}-fold-{fold}-5" for label in ("local", "fedavg") for fold in (1, 2)
    }


def test_what_is_open_is_closed_where_a_run_fails(data: Federation) -> None:
    closed: list[tuple[str, bool]] = []

    class Book(Tracker[str]):
        def open(self, run: Any, label: str, seed: int, first: int) -> str:
            return label

        def write(self, track: str, values: Any, round: int) -> None:
            if track == "fedavg":
                raise RuntimeError("full")

        def close(self, track: str, finished: bool) -> None:
            closed.append((track, finished))

    with pytest.raises(RuntimeError, match="full"):
        kinfed.run(federation=data, observer=Book(), **SETTINGS)
    assert sorted(closed) == [("fedavg", False), ("local", True), ("warm start", True)]


def test_a_run_that_is_extended_keeps_the_identity_that_trackers_find_it_by(data: Federation, tmp_path: Path) -> None:
    class Identity(NullObserver):
        def begun(self, run: Any) -> None:
            identities.append(run.fingerprint)

    identities: list[str] = []
    settings = {**SETTINGS, "warm_start": 0}
    kinfed.run(federation=data, out=tmp_path, observer=Identity(), **settings)
    for more in ({"rounds": 4}, {"seeds": (6,)}):
        kinfed.run(federation=data, out=tmp_path, observer=Identity(), extend=True, **more)
    assert len(identities) == 3
    assert identities[0] is not None
    assert len(set(identities)) == 1
