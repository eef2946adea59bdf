"""A run is resumed only on the data and the code that it was begun with; other versions are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manifests import change_manifest

import kinfed
from kinfed.core import plugins
from kinfed.core.registry import registry_of
from kinfed.data.federations.federation import Federation
from kinfed.errors import StorageError
from kinfed.records.reader import load_run
from kinfed.records.run_folder import RunFolder
from kinfed.runs.observer import NullObserver
from kinfed.testing import tiny_federation

QUICK: dict[str, Any] = {"algorithms": "fedavg", "rounds": 2, "seeds": (0, 1), "model": "mlr", "eval_every": 0}


class Notes(NullObserver):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def write_table(path: Path, change: float = 0.0) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{'abc'[i % 3]},{draw.normal():.4f},{draw.normal():.4f},{'yn'[i % 2]}" for i in range(60)]
    client, first, *rest = rows[17].split(",")
    rows[17] = ",".join([client, f"{float(first) + change:.4f}", *rest])
    path.write_text("\n".join(["client,u,v,y", *rows]) + "\n")


def test_a_table_that_changed_is_not_resumed(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    settings = QUICK | {"dataset": str(table), "client_column": "client", "label_column": "y"}
    write_table(table)
    kinfed.run(**settings, out=tmp_path / "run")
    write_table(table, change=0.5)
    with pytest.raises(StorageError, match=r"holds another run \(other data of seed 0; other data of seed 1\)"):
        kinfed.run(**settings, out=tmp_path / "run", resume=True)
    write_table(table)
    kinfed.run(**settings, out=tmp_path / "run", resume=True)


def test_a_saved_federation_that_changed_is_not_resumed(tmp_path: Path) -> None:
    federation = tiny_federation()
    federation.save(tmp_path / "clients")
    kinfed.run(**QUICK, dataset=str(tmp_path / "clients"), out=tmp_path / "run")
    replace(federation, labels=(federation.labels + 1) % 3).save(tmp_path / "clients")
    with pytest.raises(StorageError, match="other data of seed 0"):
        kinfed.run(**QUICK, dataset=str(tmp_path / "clients"), out=tmp_path / "run", resume=True)


def changed(federation: Federation) -> dict[str, Federation]:
    raw, labels = federation.features.raw.clone(), federation.labels.clone()
    raw[5, 0] += 1e-6
    labels[5] = (labels[5] + 1) % 3
    return {
        "example": replace(federation, features=replace(federation.features, raw=raw)),
        "scale": replace(federation, features=replace(federation.features, mean=torch.ones(4))),
        "label": replace(federation, labels=labels),
        "owner": replace(federation, train=federation.train.take(torch.tensor([1, 0, 2, 3, 4, 5]))),
        "name": replace(federation, names=["x", *federation.names[1:]]),
        "groups": replace(federation, groups=None),
    }


def test_every_part_of_the_data_is_in_the_digest() -> None:
    federation = tiny_federation()
    assert federation.digest() == tiny_federation().digest()
    assert replace(federation, notes=["seen"], description={"dataset": "elsewhere"}).digest() == federation.digest()
    digests = {name: other.digest() for name, other in changed(federation).items()} | {"same": federation.digest()}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("part", ["example", "owner"])
def test_given_arrays_that_changed_are_not_resumed(tmp_path: Path, part: str) -> None:
    federation = tiny_federation()
    kinfed.run(**QUICK, federation=federation, out=tmp_path / "run")
    with pytest.raises(StorageError, match="other data of seed 0"):
        kinfed.run(**QUICK, federation=changed(federation)[part], out=tmp_path / "run", resume=True)


PLUGIN = """
from dataclasses import dataclass
import kinfed
from kinfed.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    def train(self, task, w, data):
        return w + STEP

kinfed.register("algorithm", "mine_of_identity", Mine)
"""


def test_a_plugin_that_changed_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "plugin.py"
    settings = QUICK | {"plugins": [plugin], "algorithms": "mine_of_identity", "clients": 3, "seeds": (0,)}
    plugin.write_text(PLUGIN.replace("STEP", "0.001"))
    try:
        kinfed.run(**settings, out=tmp_path / "run")
        registry_of("algorithm").unregister("mine_of_identity")
        monkeypatch.setattr(plugins, "_loaded", {})  # as in another process
        plugin.write_text(PLUGIN.replace("STEP", "0.002"))
        with pytest.raises(StorageError, match="other code of mine_of_identity"):
            kinfed.run(**settings, out=tmp_path / "run", resume=True)
    finally:
        registry_of("algorithm").unregister("mine_of_identity")


def test_other_versions_are_said_and_written_down(tmp_path: Path) -> None:
    federation = tiny_federation()
    kinfed.run(**QUICK, federation=federation, out=tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    envelope = json.loads(path.read_text())
    current = {"kinfed": envelope["kinfed"], "versions": envelope["versions"]}
    change_manifest(path.parent, versions={**envelope["versions"], "torch": "1.0.0"})
    notes = Notes()
    kinfed.run(**QUICK, federation=federation, out=tmp_path / "run", resume=True, observer=notes)
    torch_version = current["versions"]["torch"]
    assert any(f'versions.torch: "1.0.0" before, "{torch_version}" now' in text for text in notes.texts)
    assert json.loads(path.read_text())["continued"] == [current]
    page_notes = load_run(tmp_path / "run", "run").notes
    assert any("begun with" in note and "torch 1.0.0 and continued with" in note for note in page_notes)
    again = Notes()
    kinfed.run(**QUICK, federation=federation, out=tmp_path / "run", resume=True, observer=again)
    assert not any("other versions" in text for text in again.texts)
    assert json.loads(path.read_text())["continued"] == [current]


def test_a_package_that_decides_no_result_is_written_down_and_not_said(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, {}, "mine").close()
    path = tmp_path / "config.json"
    change_manifest(tmp_path, versions=json.loads(path.read_text())["versions"] | {"python": "2"})
    with RunFolder.open(tmp_path, {}, "mine", resume=True) as folder:
        assert folder.version_change == ""
    assert len(json.loads(path.read_text())["continued"]) == 1
