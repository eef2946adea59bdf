"""What careless users type and hostile files hold: one clear sentence, exit status 2, and no traceback."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from command_line import Done, kinfed
from manifests import change_settings
from torch import nn

from kinfed.config.config_reading import make_config
from kinfed.core.storage import escape_formula, unescape_formula
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.privacy.policy import Privacy
from kinfed.records.reader import load_run
from kinfed.runs import run_checks, run_inputs
from kinfed.runs.experiment import run
from kinfed.runs.run_inputs import build_federation

ROLES = ("--client-column", "c", "--label-column", "y")
QUICK = ("--rounds", "2", "--seeds", "0", "--algorithms", "fedavg", "--model", "mlr")


def write_table(path: Path, clients: tuple[str, str] = ("a", "b"), header: bytes = b"c,u,y") -> None:
    rows = [f"{clients[i % 2]},{i % 7},{'yn'[(i // 2) % 2]}" for i in range(40)]
    path.write_bytes(header + b"\n" + "\n".join(rows).encode() + b"\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of clients whose names are markup and formulas, in a folder whose name is markup."""
    place = tmp_path_factory.mktemp("input")
    write_table(place / "t.csv", ("[/bold] :x:", "=1+1"))
    done = kinfed("run", "--dataset", "t.csv", *ROLES, *QUICK, "--participation", "1", "--out", "[/red]", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "results  [/red]" in done.stdout
    return place


def refused(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in " ".join(done.stderr.split())


def test_a_header_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", header=b"c,u\xff,y")
    refused(kinfed("run", "--dataset", "t.csv", *ROLES, *QUICK, cwd=tmp_path), "columns of t.csv are not UTF-8")


def test_integers_beyond_2_to_the_53_are_features(tmp_path: Path) -> None:
    columns = {"c": ["ab"[i % 2] for i in range(40)], "u": [2**60 + i * 2**50 for i in range(40)]}
    pa.parquet.write_table(pa.table(columns | {"y": ["yn"[i // 2 % 2] for i in range(40)]}), tmp_path / "t.parquet")
    config = make_config(None, {"dataset": str(tmp_path / "t.parquet"), "client_column": "c", "label_column": "y"})
    raw = build_federation(config, 0).features.raw[:, 0]
    assert raw.tolist() == [float(np.float32(value)) for value in columns["u"]]


def test_a_table_without_features_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("c,y\n" + "a,n\nb,y\n" * 10)
    refused(kinfed("run", "--dataset", "t.csv", *ROLES, *QUICK, cwd=tmp_path), "no feature columns left; it has c, y")


def test_a_column_of_identifiers_is_no_class(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("c,u,y\n" + "".join(f"{'ab'[i % 2]},{i},id{i}\n" for i in range(300)))
    done = kinfed("run", "--dataset", "t.csv", *ROLES, *QUICK, cwd=tmp_path)
    refused(done, "300 different values in 300 rows", "Is it a number or an identifier")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a zip", "cannot read x from new.npz"),
        (b"", "cannot read x from new.npz"),
        (b"PK\x03\x04" + b"\0" * 40, "cannot read x from new.npz"),
        ("array", "new.npz holds one array and is no .npz file"),
        ("empty", "should hold one row of numbers per example; got float64 of shape (3, 0)"),
    ],
)
def test_an_npz_that_is_none_is_refused(folder: Path, content: bytes | str, words: str) -> None:
    path = folder / "new.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "empty":
        np.savez(path, x=np.zeros((3, 0)))
    else:
        with path.open("wb") as file:
            np.save(file, np.zeros((3, 1)))
    refused(kinfed("predict", "new.npz", "--run", "[/red]", "--client", "=1+1", "-o", "p.csv", cwd=folder), words)


@pytest.mark.parametrize("text", ["null", "{}", '{"model": "mlr", "parameters": 4, "layers": null}', '{"layers": [1]}'])
def test_a_layout_that_is_none_is_refused(folder: Path, text: str) -> None:
    path = folder / "[/red]" / "model.json"
    before = path.read_text()
    path.write_text(text)
    try:
        refused(kinfed("export", "[/red]", "--client", "=1+1", cwd=folder), "model.json")
    finally:
        path.write_text(before)


def test_a_table_of_clients_that_is_not_utf8_can_be_reported(folder: Path) -> None:
    path = folder / "[/red]" / "clients.csv"
    before = path.read_bytes()
    path.write_bytes(before.replace(b":x:", b":\xff:"))
    try:
        done = kinfed("report", "[/red]", "-o", "page.html", cwd=folder)
        assert (done.returncode, done.stdout) == (0, "report   page.html\n"), done.stderr
        assert "Changed after the run had ended: clients.csv." in (folder / "page.html").read_text()
        done = kinfed("compare", "[/red]", "[/red]", cwd=folder)
        assert (done.returncode, done.stdout) == (1, "clients.csv: changed in [/red] after the run had ended\n")
    finally:
        path.write_bytes(before)


def test_names_are_text_on_the_terminal_and_in_spreadsheets(folder: Path) -> None:
    done = kinfed("describe", "--dataset", "t.csv", *ROLES, cwd=folder)
    assert "[/bold] :x:" in done.stdout
    with (folder / "[/red]" / "clients.csv").open() as file:
        assert {row["client"] for row in csv.DictReader(file)} == {"[/bold] :x:", "'=1+1"}
    names = {client.client for client in load_run(folder / "[/red]", "run").trials[0].clients}
    assert names == {"[/bold] :x:", "=1+1"}
    done = kinfed(
        "predict", "t.csv", "--run", "[/red]", "--client", "=1+1", "-o", "p.csv", "--name-column", "c", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    with (folder / "p.csv").open() as file:
        assert {row["row"] for row in csv.DictReader(file)} == {"[/bold] :x:", "'=1+1"}


@pytest.mark.parametrize("text", ["=1", "+x", "-x", "@x", "\tx", "'=1", "''=1", "'x", "x", "", "-1.5", "+2e3", "'-1"])
def test_escaped_texts_come_back(text: str) -> None:
    cell = escape_formula(text)
    assert unescape_formula(cell) == text
    assert not cell.startswith(("=", "@", "\t"))
    assert escape_formula("-1.5") == "-1.5"  # a number is no formula


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"noise": 1e-320}, r"noise must be 0 or in \[0\.01, 1e\+06\]; got 1e-320"),
        ({"noise": 1e300}, "noise must be"),
        ({"epsilon": 1e-320}, "epsilon must be"),
        ({"epsilon": 1e300}, "epsilon must be"),
        ({"noise": 1.0, "clip": 1e-320}, "clip must be"),
        ({"noise": 1.0, "clip": 1e300}, "clip must be"),
        ({"noise": 1.0, "delta": 1e-320}, "delta must be"),
        ({"noise": 1.0, "budget": 1e-320}, "budget must be"),
    ],
)
def test_absurd_privacy_is_refused(options: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Privacy(**options)
    Privacy(noise=0.0)  # without noise: that is said, not refused


def test_fedfomo_with_too_many_clients_is_refused_before_it_takes_the_memory() -> None:
    from kinfed.algorithms import make_algorithm
    from kinfed.algorithms.base import check_algorithm_settings
    from kinfed.data import Population
    from kinfed.data.examples.batches import LocalTraining
    from kinfed.engine.task_factory import make_task

    many, task = Population(10_000_000, 0), make_task(lambda: nn.Linear(100, 10))
    for name in ("fedfomo", "fedfomo_ma"):
        with pytest.raises(ConfigError, match=r"every one of 10,000,000 clients: 40.4 GB, more than max_gb=16"):
            check_algorithm_settings(make_algorithm(name, LocalTraining()), task, many)


def test_a_hundred_thousand_classes_are_refused_before_a_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label that is a name: what models would say of all test rows does not fit into memory."""
    monkeypatch.setattr(run_checks, "physical_memory", lambda: 8 << 30)
    classes, rows = 100_000, 40_000
    x, y, owner = np.zeros((rows, 1), np.float32), np.arange(rows) % classes, np.arange(rows) % 4
    data = Federation.from_arrays(x, y, owner, num_classes=classes)
    with pytest.raises(ConfigError, match=r"100,000 classes on [0-9,]+ test rows take .* GB, .*--label-column"):
        run(federation=data, model="mlr", algorithms="fedavg", rounds=1, seeds="0", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_memory_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_all(*_: object, **__: object) -> None:
        torch.empty(1 << 58)  # more than any machine has: refused at once, and not taken

    monkeypatch.setattr(run_inputs, "build_federation", take_all)
    refused(kinfed("describe", cwd=tmp_path), "not enough memory; take fewer clients")


def test_a_share_of_validation_above_one_is_refused(tmp_path: Path) -> None:
    refused(
        kinfed("run", "--validation", "1.2", cwd=tmp_path), "validation must be auto or a number in [0, 1); got '1.2'"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--algorithms", "ditto:lam=1"), "got 'ditto:lam'. Options are given as --set ditto.lam=0.5"),
        (("--metric", "nosuch"), "unknown metric 'nosuch'"),
        (("--plugin", "leaves.py"), "leaves.py cannot be loaded: SystemExit(3)"),
    ],
)
def test_what_came_is_said(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    done = kinfed("run", *arguments, "--out", "run", cwd=tmp_path)
    refused(done, words)
    assert "accuracy, accuracy" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", [{"seeds": None}, {"seeds": []}, {"algorithms": 5}, {"algorithms": {}}])
def test_a_configuration_without_methods_or_seeds_is_refused(folder: Path, settings: dict[str, object]) -> None:
    path = folder / "[/red]" / "config.json"
    before = path.read_text()
    change_settings(path.parent, **settings)
    try:
        done = kinfed("export", "[/red]", "--client", "=1+1", cwd=folder)
        refused(done, f"names no {next(iter(settings))}; was it written by kinfed?")
    finally:
        path.write_text(before)


def test_folders_that_are_no_runs_are_not_the_same(tmp_path: Path) -> None:
    refused(kinfed("compare", "nosuch1", "nosuch2", cwd=tmp_path), "nosuch1 is no run folder")


def test_a_page_of_two_runs_leaves_their_own_pages_alone(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        done = kinfed(
            "run", "--clients", "3", *QUICK, "--lr", "0.1" if name == "a" else "0.2", "--out", name, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    before = (tmp_path / "a" / "report.html").read_bytes()
    done = kinfed("report", "a", "b", cwd=tmp_path)
    assert done.stdout == "report   comparison.html\n"
    assert (tmp_path / "a" / "report.html").read_bytes() == before
    assert (tmp_path / "comparison.html").exists()
    assert kinfed("report", ".", "../b", cwd=tmp_path / "a").stdout == "report   comparison.html\n"
    assert (tmp_path / "a" / "report.html").read_bytes() == before


def test_naming_the_default_partition_changes_nothing() -> None:
    plain, named = (build_federation(make_config(None, s), 0) for s in ({}, {"partition": "dirichlet"}))
    assert plain.digest() == named.digest()
    assert plain.description["options"]["alpha"] == 0.3


def test_a_tuning_is_resumed_wherever_the_data_lie(tmp_path: Path) -> None:
    options = ("--algorithms", "fedavg", "--clients", "3", "--model", "mlr", "--rounds", "1", "--trials", "1")
    begun = kinfed("tune", *options, "--out", "t", cwd=tmp_path, KINFED_DATA=str(tmp_path))
    assert begun.returncode == 0, begun.stderr
    for variables in ({"KINFED_DATA": str(tmp_path)}, {"KINFED_DATA": str(tmp_path / "elsewhere")}, {}):
        done = kinfed("tune", "--out", "t", "--resume", "--trials", "2", cwd=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "t" / "tuning.json").read_text())["methods"]["fedavg"]["trials"]) == 2


def test_a_folder_whose_name_the_locale_cannot_read_gets_its_page(tmp_path: Path) -> None:
    """With LC_ALL=C the bytes of a name come as surrogates, which UTF-8 refuses unless they are given back as bytes."""
    name = b"\xe4".decode("utf-8", "surrogateescape")
    options = ("--rounds", "1", "--clients", "3", "--seeds", "0", "--algorithms", "local", "--model", "mlr")
    done = kinfed("run", *options, "--out", name, cwd=tmp_path)
    assert (tmp_path / name / "report.html").exists(), done.stderr
