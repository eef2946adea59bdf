"""Results as tables, figures and pages: the same from memory and from disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import polars as pl
import pyarrow as pa
import pytest
import torch

import kinfed
from kinfed.api import result_views
from kinfed.api.run_result import RunResult
from kinfed.core import storage
from kinfed.data.federations.federation import Federation
from kinfed.errors import ConfigError
from kinfed.records.run_files import RunFolderError
from kinfed.records.run_record import FinalRecord
from kinfed.runs.method_run import Interrupted
from kinfed.runs.results import MethodResult

SETTINGS: dict[str, Any] = {
    "algorithms": "local,fedavg,ditto", "model": "mlr", "rounds": 3, "eval_every": 2, "steps": 2, "seeds": (0, 1),
    "participation": 0.7, "workers": 1,
}  # fmt: skip
Results = tuple[RunResult, RunResult, RunResult]


@pytest.fixture(scope="module")
def data() -> Federation:
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    return Federation.from_arrays(x, (x[:, 0] > 0).to(torch.int64), [f"c{i % 6}" for i in range(90)])


@pytest.fixture(scope="module")
def results(data: Federation, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """In memory; with a folder; from that folder."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    in_memory = kinfed.run(federation=data, **SETTINGS)
    return in_memory, kinfed.run(federation=data, out=folder, **SETTINGS), kinfed.load(folder)


def without_times(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.drop(columns="seconds", errors="ignore")


@pytest.mark.parametrize("table", ["to_frame", "history", "clients"])
def test_tables_are_the_same_from_memory_and_from_disk(results: Results, table: str) -> None:
    first, *others = (without_times(getattr(result, table)("pandas")) for result in results)
    assert len(first)
    for other in others:
        pd.testing.assert_frame_equal(first, other)


def test_the_record_in_memory_is_that_of_the_folder(results: Results) -> None:
    ours, theirs = results[0].run, results[2].run
    for name in ("config", "version", "versions", "federations", "baselines", "parameters", "notes", "algorithms"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.curves.keys() == theirs.curves.keys()
    assert [trial.clients for trial in ours.trials] == [trial.clients for trial in theirs.trials]


def test_rows_and_columns_of_the_tables(results: Results) -> None:
    frame = results[2].to_frame("pandas")
    assert list(frame.columns[:8]) == [
        "algorithm", "seed", "rounds", "finished", "diverged", "took_part", "bytes_down", "bytes_up",
    ]  # fmt: skip
    assert list(zip(frame["algorithm"], frame["seed"], strict=True)) == [
        (label, seed) for seed in (0, 1) for label in ("local", "fedavg", "ditto")
    ]
    by_hand = results[0].result("ditto", 1)
    row = frame[(frame["algorithm"] == "ditto") & (frame["seed"] == 1)].iloc[0]
    assert row["personal_accuracy"] == by_hand.personal["accuracy"]
    assert row["bytes_up"] == by_hand.bytes_up
    assert pd.isna(frame.iloc[0]["server_accuracy"])  # local training has no server model
    history = results[2].history("pandas")
    assert len(history) == 3 * 2 * 3
    assert list(history["personal_accuracy"].isna()[:3]) == [True, False, False]  # evaluated are rounds 2 and 3
    clients = results[2].clients("pandas")
    assert len(clients) == 3 * 2 * 6
    assert clients["took_part"].dtype == bool
    assert set(clients["client"]) == {f"c{i}" for i in range(6)}


def test_frames_of_every_backend(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"pandas": pd.DataFrame, "polars": pl.DataFrame, "pyarrow": pa.Table}
    for backend, kind in kinds.items():
        assert isinstance(results[0].to_frame(backend), kind)
    assert isinstance(results[0].to_frame(), pd.DataFrame)
    with pytest.raises(ConfigError, match="backend of frames"):
        results[0].to_frame("panda")
    found = result_views.importlib.util.find_spec
    monkeypatch.setattr(
        result_views.importlib.util, "find_spec", lambda name: None if name == "pandas" else found(name)
    )
    assert isinstance(results[0].to_frame(), pl.DataFrame)
    with pytest.raises(ConfigError, match="pandas is not installed"):
        results[0].to_frame("pandas")


def test_results_by_name(results: Results) -> None:
    live, loaded = results[0].result("ditto", 1), results[2].result("ditto", 1)
    assert isinstance(live, MethodResult)
    assert type(loaded) is FinalRecord
    for name in ("label", "seed", "rounds", "personal", "server", "took_part", "bytes_up", "metric", "evaluated"):
        assert getattr(live, name) == getattr(loaded, name)
    for result in results:
        with pytest.raises(ConfigError, match="say which algorithm"):
            result.result()
        with pytest.raises(ConfigError, match="no result of 'ditto' with seed 5"):
            result.result("ditto", 5)
        assert result.algorithms == ("local", "fedavg", "ditto")
        assert result.seeds == (0, 1)


def test_models_from_disk_predict_like_those_in_memory(results: Results, data: Federation) -> None:
    x = data.features.raw[:5]
    live, _, loaded = results
    for client in ("c3", 3):
        ours, theirs = (one.personal_model(client, "ditto", 1).predict_proba(x) for one in (live, loaded))
        assert (ours == theirs).all()
    ours, theirs = (one.server_model("fedavg") for one in (live, loaded))
    assert ours is not None
    assert theirs is not None
    assert (ours.predict_proba(x) == theirs.predict_proba(x)).all()
    assert loaded.server_model("local") is None
    with pytest.raises(ConfigError, match="no client is called 'c9'"):
        loaded.personal_model("c9", "ditto")


def test_a_folder_does_not_hold_the_data_and_says_so(results: Results) -> None:
    assert results[0].federations[0].num_clients == 6
    for name in ("federations", "task"):
        with pytest.raises(ConfigError, match=r"a run folder holds no (data|task)"):
            getattr(results[2], name)
    assert results[2].describe(1).names == [f"c{i}" for i in range(6)]
    with pytest.raises(ConfigError, match="no seed 7"):
        results[2].describe(7)


@pytest.mark.parametrize("what", ["rounds", "bytes", "clients"])
def test_plots_show_every_method_once_with_a_name(results: Results, what: str) -> None:
    figure = results[0].plot(what)
    assert isinstance(figure, go.Figure)
    names = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(names) == ["Ditto", "FedAvg", "Local"]
    # Only the server's models of methods that have one, and another title above.
    server = results[0].plot(what, "server")
    assert {trace.name for trace in server.data} == {"Ditto", "FedAvg"}
    if what != "clients":
        assert server.layout.annotations[0].text != figure.layout.annotations[0].text


def test_plots_that_do_not_exist(results: Results, data: Federation) -> None:
    with pytest.raises(ConfigError, match="did you mean rounds"):
        results[0].plot("round")
    with pytest.raises(ConfigError, match="kind of model"):
        results[0].plot("rounds", "personel")  # type: ignore[arg-type]
    alone = kinfed.run(federation=data, **{**SETTINGS, "algorithms": "local", "seeds": (0,), "rounds": 1})
    with pytest.raises(ConfigError, match="nothing to plot of the server models"):
        alone.plot("rounds", "server")


def test_pages_from_memory_and_disk_say_the_same(results: Results, tmp_path: Path) -> None:
    live, _, loaded = results
    assert loaded.folder is not None
    paths = live.report(tmp_path / "a.html"), loaded.report()
    assert paths == (tmp_path / "a.html", loaded.folder / "report.html")
    ours, theirs = (path.read_text("utf-8").partition("<script>")[0] for path in paths)

    assert "this run" in ours
    for pattern in (r'<th scope="row">.*?</th>', r'class="plot"', r"<h2[^>]*>.*?</h2>"):
        parts = re.findall(pattern, ours, re.S)
        assert parts
        assert parts == re.findall(pattern, theirs, re.S)


def test_in_a_notebook_and_in_a_line(results: Results, data: Federation) -> None:
    for result in results:
        html = result._repr_html_()
        assert "Ditto" in html
        assert "<script" not in html
        assert len(repr(result)) < 160
        for part in (result.run, result.comparison, result.baselines[0], result.describe()):
            assert len(repr(part)) < 250, type(part)
    assert repr(results[2]).startswith(f"<RunResult {results[2].folder}: accuracy local ")
    assert "in memory" in repr(results[0])
    hostile = "<script>alert(1)</script>"
    x = torch.zeros(8, 2)
    named = Federation.from_arrays(x, [0, 1] * 4, [hostile] * 4 + ["b"] * 4)
    assert hostile not in named._repr_html_()
    assert "&lt;script&gt;" in named._repr_html_()


def test_an_unfinished_run_is_read_as_far_as_it_goes(data: Federation, tmp_path: Path) -> None:
    rounds = iter([False] * 4 + [True] * 9)
    with pytest.raises(Interrupted):
        kinfed.run(federation=data, out=tmp_path / "a", should_stop=lambda: next(rounds), **SETTINGS)
    result = kinfed.load(tmp_path / "a")
    assert list(result.to_frame("pandas")["finished"]) == [True, False]
    assert len(result.results) == 0
    assert "unfinished" in repr(result)
    assert "unfinished" in result._repr_html_()
    with pytest.raises(RunFolderError, match="no run folder"):
        kinfed.load(tmp_path)
    done = kinfed.run(federation=data, out=tmp_path / "a", resume=True, **SETTINGS)
    assert len(done.results) == 6


def test_a_summary_of_another_version_is_refused(results: Results, tmp_path: Path) -> None:
    assert results[2].folder is not None
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_bytes((results[2].folder / "config.json").read_bytes())
    storage.write_json(folder / "summary.json", {"results": [{"algorithm": "local", "seed": 0, "rounds": 1,
        "bytes_down": 0, "bytes_up": 0, "seconds": 0}]})  # fmt: skip
    with pytest.raises(RunFolderError, match="a result needs"):
        kinfed.load(folder)


def test_folds_are_joined_in_memory_as_on_disk(data: Federation, tmp_path: Path) -> None:
    settings = {**SETTINGS, "algorithms": "local,fedavg", "seeds": (0,), "folds": 2, "rounds": 2}
    ours = kinfed.run(federation=data, **settings)
    kinfed.run(federation=data, out=tmp_path / "a", **settings)
    for table in ("to_frame", "history", "clients"):
        frames = [without_times(getattr(one, table)("pandas")) for one in (ours, kinfed.load(tmp_path / "a"))]
        pd.testing.assert_frame_equal(*frames)


def test_printing_a_result_shows_its_table(results: Results) -> None:
    for result in results:
        assert all(name in str(result) for name in ("Local", "FedAvg", "Ditto", "Accuracy (%)"))
