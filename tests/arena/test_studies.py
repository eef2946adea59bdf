"""Studies: what is crossed, what is run again, and what the table says."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from command_line import kinfed

from kinfed import study
from kinfed.analysis import metric_style, rankings
from kinfed.arena import StudyPlan, open_study
from kinfed.arena.study_table import _marks, _rank
from kinfed.core.storage import as_record
from kinfed.errors import ConfigError, DataError, StorageError
from kinfed.runs import Interrupted

SMALL = {
    "algorithms": "local,fedavg",
    "rounds": 1,
    "steps": 1,
    "seeds": [0, 1],
    "clients": 4,
    "sweep": {"setting": "partition.alpha", "values": [0.5, 100.0]},
    "federations": [{"name": "digits, uneven", "dataset": "digits", "partition": "dirichlet"}],
}
ACCURACY = metric_style("accuracy")


def journal(result, folder):
    return (result.folder / "cells" / folder / "rounds.jsonl").read_text().splitlines()


def finals(result):
    """The figure of every cell, method and seed."""
    return {
        (cell.folder, trial.algorithm, trial.seed): trial.final.personal["accuracy_mean"]
        for cell, run in result.cells
        for trial in run.trials
    }


def test_a_study_grows_without_repeating_anything(tmp_path):
    first = study(SMALL, tmp_path / "study")
    before = finals(first)
    assert len(before) == 2 * 2 * 2
    lines = {cell.folder: journal(first, cell.folder) for cell, _ in first.cells}
    more = SMALL | {
        "algorithms": "local,fedavg,ditto",
        "seeds": [0, 1, 2],
        "sweep": {"setting": "partition.alpha", "values": [0.5, 1.0, 100.0]},
    }
    grown = study(more, tmp_path / "study")
    after = finals(grown)
    assert len(after) == 3 * 3 * 3
    assert {key: after[key] for key in before} == before
    for folder, written in lines.items():
        assert set(written) <= set(journal(grown, folder))
    assert finals(study(more, tmp_path / "at once")) == after


def test_a_study_that_is_stopped_goes_on(tmp_path):
    begun = []

    def stop():
        return len(begun) == 2

    with pytest.raises(Interrupted):
        study(SMALL, tmp_path / "study", should_stop=stop, begin=begun.append)
    part = open_study(tmp_path / "study").table()
    assert any(note.startswith("Not finished: ") for note in part.notes)
    assert finals(study(SMALL, tmp_path / "study")) == finals(study(SMALL, tmp_path / "whole"))


def test_a_changed_setting_is_refused(tmp_path):
    study(SMALL, tmp_path)
    with pytest.raises(StorageError, match="steps: 1 there, 2 now"):
        study(SMALL | {"steps": 2}, tmp_path)


def test_methods_are_tuned_with_equal_budgets_once(tmp_path):
    tuned = SMALL | {"tuning": {"trials": 2}, "seeds": [0], "sweep": {"setting": "lr", "values": [0.1]}}
    result = study(tuned, tmp_path)
    records = {label: tmp_path / "tuning" / "digits-uneven_0.1" / label / "best.toml" for label in ("local", "fedavg")}
    chosen = {label: file.read_text() for label, file in records.items()}
    assert all("algorithms" in text and "2 trial(s)" in text for text in chosen.values())
    study(tuned | {"algorithms": "local,fedavg,ditto"}, tmp_path)
    assert {label: file.read_text() for label, file in records.items()} == chosen
    assert any("2 trials on validation data" in note for note in result.table().notes)


def test_the_table_in_every_form(tmp_path):
    settings = 'algorithms = "local,fedavg"\nrounds = 1\nsteps = 1\nseeds = [0, 1]\nclients = 3\n'
    (tmp_path / "s.toml").write_text(settings + '[sweep]\nsetting = "batch"\nvalues = [5, 10]\n')
    assert kinfed("study", "s.toml", "--out", "out", cwd=tmp_path).returncode == 0
    shown = kinfed("table", "out", "--form", "csv", cwd=tmp_path).stdout.splitlines()
    assert shown[0] == "Method,batch 5,batch 10,rank"
    assert shown[1].startswith("Local,")
    latex = kinfed("table", "out", "--form", "latex", cwd=tmp_path).stdout
    assert r"\begin{tabular}{lrrl}" in latex
    assert r"95 \% for all rivals of a column together" in latex.partition(r"\end{tabular}")[2]
    assert "| Method | batch 5 |" in kinfed("table", "out", "--form", "markdown", cwd=tmp_path).stdout
    assert "MB" in kinfed("table", "out", "--costs", cwd=tmp_path).stdout
    assert kinfed("table", "out", "--out", "t.html", cwd=tmp_path).returncode == 0
    assert "Accuracy of personal models" in (tmp_path / "t.html").read_text()
    assert "unknown metric" in kinfed("table", "out", "--metric", "nonsense", cwd=tmp_path).stderr
    result = open_study(tmp_path / "out")
    assert [trace["x"] for trace in json.loads(result.plot().to_json())["data"] if trace.get("showlegend")]
    assert "Local" in str(result)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sweep": {"setting": "lr"}}, "needs setting and values"),
        ({"sweep": {"seting": "lr", "values": [1]}}, "setting"),
        ({"federations": [{"dataset": "digits"}]}, "needs a name of its own"),
        ({"federations": [{"name": name, "partition": "dirichlet"} for name in ("a b", "a-b")]}, "the same folder"),
        ({"tuning": {"trials": -1}}, "number of trials"),
        ({"roundz": 3}, "rounds"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(change, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        study(SMALL | change, tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(DataError, match="holds files but no study"):
        study(SMALL, tmp_path)
    with pytest.raises(ConfigError, match="needs the folder"):
        study(SMALL)


@pytest.mark.parametrize("place", ["settings", "federations", "values"])
def test_reading_a_strangers_study_runs_no_code(tmp_path, place):
    """Plugins may be named among the settings of all cells, of a federation, or as values of a sweep."""
    plugin = tmp_path / "evil.py"
    plugin.write_text(f"open({str(tmp_path / 'was-here')!r}, 'w')")
    result = study({**SMALL, "sweep": {"setting": "batch", "values": [5]}, "seeds": [0]}, tmp_path / "study")
    shown = open_study(result.folder).table().csv()
    record = json.loads((result.folder / "study.json").read_text())
    if place == "settings":
        record["plan"]["settings"]["plugins"] = [str(plugin)]
    elif place == "federations":
        record["plan"]["federations"][0][1]["plugins"] = [str(plugin)]
    else:
        record["plan"] |= {"setting": "plugins", "values": [[str(plugin)]]}
    (result.folder / "study.json").write_text(json.dumps(record))
    assert open_study(result.folder).table().csv().splitlines()[1:] == shown.splitlines()[1:]
    assert kinfed("table", str(result.folder), cwd=tmp_path).returncode == 0
    assert not (tmp_path / "was-here").exists()
    with pytest.raises(ConfigError, match="no settings to run"):
        _ = open_study(result.folder).cells[0][0].config
    (result.folder / "study.json").write_text(json.dumps({**record, "cells": [["a"]]}))
    with pytest.raises(StorageError, match="no record of a study: cells"):
        open_study(result.folder)


def test_a_plan_is_read_as_it_was_written():
    plan = StudyPlan.read(SMALL)
    assert as_record(StudyPlan, json.loads(json.dumps(asdict(plan))), "study.json") == plan


# By hand: a leads b by 2, 3 and 4 points (t = 3 / (1 / sqrt 3) = 5.2), and c by 1, -1 and 3.
VALUES = {
    "a": {0: 0.90, 1: 0.91, 2: 0.92},
    "b": {0: 0.88, 1: 0.88, 2: 0.88},
    "c": {0: 0.89, 1: 0.92, 2: 0.89},
    "d": {0: 0.90, 1: float("nan"), 2: 0.5},
}


def test_bold_is_what_the_best_does_not_lead_clearly():
    three = {name: VALUES[name] for name in "abc"}
    marks = _marks(three | {"b": {0: 0.80, 1: 0.81, 2: 0.82}}, ACCURACY)
    assert marks == {"a": "best", "c": "best", "b": "second"}
    # At 97.5 % of both sides the quantile of two degrees is 6.2: b is not clearly behind with two rivals, alone it is.
    assert _marks(three, ACCURACY)["b"] == "best"
    assert _marks({name: VALUES[name] for name in "ab"}, ACCURACY) == {"a": "best", "b": "second"}
    assert "d" not in _marks(VALUES, ACCURACY)


def test_ranks_share_ties_and_put_what_diverged_last():
    first, second = ({name: by_seed[seed] for name, by_seed in VALUES.items()} for seed in (0, 1))
    assert list(rankings.places(first).values()) == [1.5, 4, 3, 1.5]
    assert list(rankings.places(second).values()) == [2, 3, 1, 4]
    assert _rank("a", [VALUES], ACCURACY).text.startswith("1.5 [")
    assert _rank("nobody", [VALUES], ACCURACY).text == "–"


def test_rounds_of_clients_are_kept_on_request(tmp_path):
    plan = {**SMALL, "rounds": 2, "eval_every": 1, "client_rounds": True, "seeds": [0]}
    result = study(plan, tmp_path / "study")
    table = result.client_rounds().to_pylist()
    assert len(table) == 2 * 2 * 2 * 4  # values, methods, rounds, clients
    last = [row for row in table if (row["value"], row["algorithm"], row["round"]) == ("0.5", "fedavg", 2)]
    taught = [row["personal_accuracy"] for row in last if row["took_part"]]
    assert sum(taught) / len(taught) == pytest.approx(finals(result)["digits-uneven_0.5", "fedavg", 0])
    longer = study({**plan, "rounds": 3, "eval_every": 2}, tmp_path / "longer")
    assert sorted({row["round"] for row in longer.client_rounds().to_pylist()}) == [2, 3]
    grown = study({**plan, "rounds": 4, "eval_every": 2}, tmp_path / "longer")
    assert sorted({row["round"] for row in grown.client_rounds().to_pylist()}) == [2, 4]
    with pytest.raises(ConfigError, match="client_rounds = true"):
        study(SMALL, tmp_path / "without").client_rounds()
