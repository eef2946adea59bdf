"""Folders of strangers: records with wrong types and absurd numbers, sealed anew, are refused in one sentence or read
as far as they go, by every command that reads a folder; never with a traceback, and in the time that the file takes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import kinfed as command

import kinfed
from kinfed.core import storage
from kinfed.records.run_files import file_digest, sealed

DEEP = "DEEP"  # stands for lists in lists
OPTIONS = {"client_column": "site", "label_column": "sick"}
COMMANDS: dict[str, list[list[str]]] = {
    "run": [
        ["report"], ["dossier"],
        ["predict", "t.csv", "--client", "east", "--algorithm", "ditto", "--out", "p.csv", "--run"],
        ["compare", "whole-run"], ["runs"], ["gain"],
    ],
    "fit": [
        ["report"], ["dossier"], ["export", "--client", "east", "--out", "m.safetensors"],
        ["predict", "t.csv", "--client", "east", "--out", "p.csv", "--run"], ["runs"],
    ],
    "study": [["table"], ["runs"]],
    "contributions": [["report"], ["runs"]],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and a fit, with the records of a study and of contributions."""
    place, draw = tmp_path_factory.mktemp("folders"), np.random.default_rng(3)
    with (place / "t.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["site", "age", "dose", "sick"])
        for k in range(90):
            rows.writerow([("east", "north", "west")[k % 3], round(draw.normal(50, 12), 1), k % 7, "yn"[k // 3 % 2]])
    table, few = str(place / "t.csv"), {"model": "mlr", "rounds": 2, "steps": 2, "seeds": (0,)}
    kinfed.run(dataset=table, algorithms="local,ditto", **few, **OPTIONS, out=place / "whole-run")
    kinfed.fit(
        table, models="mlr", algorithms="ditto", trials=1, folds=2, rounds=2, steps=2, references=False, accept="all",
        **OPTIONS, out=place / "whole-fit",
    )  # fmt: skip
    plan = {"settings": {}, "federations": [["digits", {}]], "models": [["", {}]], "setting": "", "values": [],
            "trials": 0, "tuning_seeds": [0]}  # fmt: skip
    content = {"format": "kinfed-study", "version": 2, "plan": plan, "cells": [[["digits", "", ""], ["local"], [0], 2]]}
    for kind, name, record in (
        ("study", "study.json", content),
        ("contributions", "contributions.json", {
            "algorithm": "fedavg", "metric": "accuracy", "settings": {"table": "t"},
            "sites": [{"site": "a", "parts": {}, "gain": {"value": 0.1, "error": 0.1}, "test_rows": 4}],
        }),
    ):  # fmt: skip
        (place / f"whole-{kind}").mkdir()
        (place / f"whole-{kind}" / name).write_text(json.dumps(record))
    return place


def poison(file: Path, where: tuple[Any, ...], value: Any) -> None:
    """Write a value at this place of the record in a file; of several lines, into the last."""
    if file.suffix == ".csv":
        with file.open(newline="") as before:
            rows = list(csv.reader(before))
        rows[where[0]][rows[0].index(where[1])] = value
        with file.open("w", newline="") as out:
            csv.writer(out).writerows(rows)
        return
    *others, last = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    record = json.loads(last)
    inner = record
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    text = json.dumps(record).replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)
    file.write_text("\n".join([*others, text]) + "\n")


def seal_again(folder: Path) -> None:
    """As whoever has changed the files can."""
    path = folder / "config.json"
    envelope = storage.parse_json(path.read_bytes())
    if isinstance(envelope.get("files"), dict):
        envelope["files"] = {name: file_digest(folder / name) for name in envelope["files"]}
    path.write_text(json.dumps(sealed(envelope)))


@pytest.mark.parametrize(
    ("kind", "name", "where", "value"),
    [
        ("run", "config.json", ("config", "rounds"), 10**400),
        ("run", "config.json", ("config", "rounds"), 10**15),
        ("run", "config.json", ("config", "rounds"), "many"),
        ("run", "config.json", ("config", "algorithms"), ["ditto"]),
        ("run", "config.json", ("config", "algorithms", "ditto", "method"), [1]),
        ("run", "config.json", ("config", "algorithms", "ditto"), DEEP),
        ("run", "config.json", ("config", "seeds"), {"0": 1}),
        ("run", "config.json", ("config", "dataset"), 7),
        ("run", "config.json", ("config", "model"), None),
        ("run", "config.json", ("config", "folds"), "x"),
        ("run", "config.json", ("config", "participation"), float("nan")),
        ("run", "config.json", ("versions",), 3),
        ("run", "config.json", ("continued",), "x"),
        ("run", "config.json", ("contents",), [1]),
        ("run", "config.json", ("fingerprint",), {}),
        ("run", "rounds.jsonl", ("round",), 10**15),
        ("run", "rounds.jsonl", ("algorithm",), [1]),
        ("run", "rounds.jsonl", ("fold",), "x"),
        ("run", "rounds.jsonl", ("method",), "x"),
        ("run", "rounds.jsonl", ("personal",), []),
        ("run", "summary.json", ("results",), 5),
        ("run", "summary.json", ("results", 0, "personal"), "x"),
        ("run", "summary.json", ("results", 0, "metric"), [1]),
        ("run", "summary.json", ("results", 0, "privacy"), "x"),
        ("run", "summary.json", ("results", 0, "clients"), 10**400),
        ("run", "baseline-0.json", ("personal", "accuracy"), {}),
        ("run", "curves/ditto-0.json", ("roc",), 0),
        ("run", "federation-0.json", ("groups",), [10**15, 0, 0]),
        ("run", "federation-0.json", ("inputs",), []),
        ("run", "federation-0.json", ("inputs", "shape"), [10**15]),
        ("run", "federation-0.json", ("problem", "num_classes"), 10**12),
        ("run", "model.json", ("layers",), {"a": 1}),
        ("run", "clients.csv", (1, "n_test"), "x"),
        ("run", "clients.csv", (2, "seed"), "9" * 5000),
        ("fit", "fit.json", ("sites", 1, "deployed"), -1),
        ("fit", "fit.json", ("sites", 0, "chosen"), "none"),
        ("fit", "fit.json", ("sites",), {}),
        ("fit", "fit.json", ("contenders",), "x"),
        ("fit", "fit.json", ("settings",), None),
        ("fit", "fit.json", ("settings", "rounds"), "x"),
        ("fit", "fit.json", ("problem", "num_classes"), 10**400),
        ("fit", "fit.json", ("metric",), []),
        ("fit", "fit.json", ("notes",), DEEP),
        ("fit", "config.json", ("config", "dp_noise"), "x"),
        ("study", "study.json", ("cells", 0, 3), 10**400),
        ("study", "study.json", ("cells",), [["digits"]]),
        ("study", "study.json", ("plan", "federations"), 1),
        ("contributions", "contributions.json", ("sites", 0, "gain"), [1]),
        ("contributions", "contributions.json", ("settings",), "x"),
    ],
    ids=lambda value: "·".join(map(str, value)) if isinstance(value, tuple) else f"{value!r:.12}",
)  # fmt: skip
def test_a_folder_with_wrong_values_is_read_or_refused_in_words(
    place: Path, tmp_path: Path, kind: str, name: str, where: tuple[Any, ...], value: Any
) -> None:
    folder = tmp_path / kind
    shutil.copytree(place / f"whole-{kind}", folder, ignore=shutil.ignore_patterns("*.html", "checkpoints"))
    shutil.copy(place / "t.csv", tmp_path)
    (tmp_path / "whole-run").symlink_to(place / "whole-run")
    poison(folder / name, where, value)
    if value not in (10**400, DEEP) and value == value and (folder / "config.json").exists():
        seal_again(folder)
    ended = []
    for arguments in COMMANDS[kind]:
        done = command(*arguments, str(folder if arguments[0] != "runs" else tmp_path), cwd=tmp_path)
        assert done.returncode in (0, 1, 2), (arguments, done.stderr)
        if done.returncode == 2:
            assert done.stderr.startswith("error: "), done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
        ended.append(done.returncode)
    assert 0 in ended or 2 in ended
