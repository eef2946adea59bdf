"""The report: reading run folders, the rule for calling a method best, figures, and the page as a browser sees it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly import graph_objects
from report_fixture import described, stop_early, write_run

from kinfed.analysis.comparison import Comparison, Method, cautions, compare
from kinfed.analysis.statistics import average, clear_winner, difference, gains, leader, summarize_gains
from kinfed.data.federations.description import Description
from kinfed.errors import KinfedError, StorageError
from kinfed.records.reader import load_run, load_runs
from kinfed.records.run_record import ClientRecord, FinalRecord, RunRecord, TrialRecord
from kinfed.report import build, downloads, method_tables
from kinfed.report.charts import figures
from kinfed.report.charts.class_map import MAX_COLUMNS, class_map, client_columns
from kinfed.report.charts.figures import gain_against_size, sorted_gains
from kinfed.report.drawing import looks, style_of
from kinfed.report.drawing.chart import Figure, axis, escape, layout, log_axis, numbers, short, subsampled
from kinfed.report.drawing.looks import format_number
from kinfed.report.html import environment
from kinfed.report.panels import PANELS, Panel, method_panels, series
from kinfed.report.sentences import brief, data_notes, facts, findings

SMALL: dict[str, Any] = {"algorithms": ("local", "fedavg", "ditto"), "clients": 12, "rounds": 10, "seeds": (0, 1)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def comparison(finished: Path) -> Comparison:
    return compare(load_runs([finished]))[0]


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    return build([finished]).read_text(encoding="utf-8")


def own_text(page: str) -> str:
    """The page without the plotly library, which is large and full of addresses it never calls."""
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    return page.replace(max(scripts, key=len), "")


def rewrite(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def trial(
    algorithm: str, seed: int, accuracy: float, clients: dict[str, float] | None = None, at: int = 10
) -> TrialRecord:
    metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
    results = tuple(ClientRecord(c, 20, 10, {"personal_accuracy": a}) for c, a in (clients or {}).items())
    costs = {"bytes_down": 5e5, "bytes_up": 5e5, "seconds": 1.0}
    final = FinalRecord(label=algorithm, seed=seed, rounds=at, personal=metrics, **costs)
    return TrialRecord(algorithm, seed, (), results, final, True)


def run_of(*trials: TrialRecord, label: str = "run", config: dict[str, Any] | None = None) -> RunRecord:
    return RunRecord(Path(label), label, config or {}, "0", {}, "", trials, {})


# Reading


def test_a_finished_run_is_read_as_written(finished: Path) -> None:
    run = load_run(finished, "first")
    lines = [json.loads(line) for line in (finished / "rounds.jsonl").read_text().splitlines()]
    assert run.algorithms == ("local", "fedavg", "ditto", "selffl", "fedfomo", "cgpfl")
    assert [(t.algorithm, t.seed) for t in run.trials[:2]] == [("local", 0), ("fedavg", 0)]
    assert not run.notes
    fedavg = run.trials[1]
    assert fedavg.finished
    assert fedavg.round == 60
    assert fedavg.final.metrics["personal"] == lines[119]["personal"]
    assert fedavg.final.bytes == sum(r.bytes for r in fedavg.rounds)
    assert [r.number for r in fedavg.rounds] == list(range(1, 61))
    assert fedavg.rounds[0].metrics == {}
    assert run.trials[0].final.metrics.keys() == {"personal"}
    assert "server_accuracy" not in run.trials[0].clients[0].values
    assert run.federations[0].sizes() == [c.n_train for c in fedavg.clients]


def test_a_page_is_made_without_torch(finished: Path, tmp_path: Path) -> None:
    """In a process of its own, where nothing else has imported anything: torch takes longer than the page."""
    program = f"""
import sys
from pathlib import Path
from kinfed.report import build
build([Path({str(finished)!r})], Path({str(tmp_path / "page.html")!r}))
print(sorted({{"torch", "pyarrow", "plotly", "sklearn", "pandas"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unfinished_run_says_how_far_it_came(tmp_path: Path) -> None:
    run = load_run(stop_early(write_run(tmp_path / "r", **SMALL), 47), "r")  # seed 1: local done, fedavg 7 of 10
    assert re.findall(r"unfinished|fedavg|\d+", run.notes[0]) == ["unfinished", "fedavg", "1", "7", "10", "1", "6"]
    assert "cut" in run.notes[1]
    by_key = {(t.algorithm, t.seed): t for t in run.trials}
    assert by_key["local", 1].finished
    stopped = by_key["fedavg", 1]
    assert not stopped.finished
    assert (stopped.round, stopped.final.rounds, len(stopped.rounds)) == (5, 5, 7)
    assert stopped.final.bytes == sum(r.bytes for r in stopped.rounds[:5])


def test_seeds_that_lag_behind_are_left_out_of_averages(tmp_path: Path) -> None:
    made = compare(load_runs([stop_early(write_run(tmp_path / "r", **SMALL), 47)]))[0]
    by_name = {method.algorithm: method for method in made.methods}
    assert by_name["local"].seeds == (0, 1)
    assert by_name["fedavg"].seeds == (0,)
    notes = cautions(made)
    assert re.findall(r"FedAvg|\d+", notes[0]) == ["FedAvg", "10", "1", "5"]  # seed 1 is in round 5 of 10
    assert "(Local 0+1, FedAvg 0, Ditto 0)" in notes[1]


def test_a_run_without_rounds_still_gives_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", **SMALL)
    for name in ("rounds.jsonl", "clients.csv", "summary.json"):
        (folder / name).unlink()
    text = own_text(build([folder]).read_text())
    assert "has not finished a round yet" in text
    assert "Who holds which data" in text


def test_repeated_rounds_of_a_resumed_run_count_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", **SMALL)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    again = json.loads(lines[9]) | {"bytes_down": 7.0}
    (folder / "rounds.jsonl").write_text("\n".join([*lines[:10], json.dumps(again), *lines[10:]]) + "\n")
    first = load_run(folder, "r").trials[0]
    assert len(first.rounds) == 10
    assert first.rounds[9].bytes_down == 7.0


def test_damaged_lines_are_left_out_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", **SMALL)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join([*lines[:3], '{"algorithm": "lo\n', *lines[4:]]))
    run = load_run(folder, "r")
    assert len(run.notes) == 1
    assert "rounds.jsonl" in run.notes[0]
    assert "(line 4)" in run.notes[0]
    assert [r.number for r in run.trials[0].rounds] == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_warm_start_shifts_the_numbers_of_rounds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", **SMALL, settings={"warm_start": 20})
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(x | {"round": x["round"] + 20}) + "\n" for x in lines))
    trial = load_run(folder, "r").trials[1]
    assert (trial.round, trial.final.rounds) == (30, 10)
    (folder / "summary.json").unlink()
    assert not load_run(folder, "r").notes


def test_null_is_a_figure_that_is_not_finite(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", **SMALL)
    rewrite(folder / "summary.json", lambda s: s["results"][1]["personal"].update(loss=None))
    made = compare(load_runs([folder]))[0]
    assert math.isnan(made.methods[1].final("personal", "loss")[0])
    assert "not finite" in method_tables.results_table(made).markdown()
    assert "not finite" in own_text(build([folder]).read_text())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "is no run folder"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list, not an object"),
        (lambda f: (f / "config.json").write_text("{}"), "has no fingerprint and config"),
        (lambda f: (f / "rounds.jsonl").write_text('{"seed": 0}\n'), "line 1: algorithm is missing"),
        (lambda f: (f / "rounds.jsonl").write_text("3\n"), "line 1: should be a table of names, and is 3"),
        (lambda f: (f / "clients.csv").write_text("algorithm,seed\n"), "lacks the columns client, n_test, n_train"),
        (lambda f: (f / "summary.json").write_text('{"results": [{}]}'), "a result needs algorithm"),
        (lambda f: rewrite(f / "federation-0.json", lambda v: v["names"].pop()), "train should hold 11 clients"),
        (lambda f: rewrite(f / "federation-0.json", lambda v: v["groups"].pop()), "11 groups given for 12 clients"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_with_the_reason(tmp_path: Path, spoil: Any, says: str) -> None:
    folder = write_run(tmp_path / "r", **SMALL)
    spoil(folder)
    with pytest.raises(KinfedError, match=re.escape(says)):
        build([folder])


def test_no_folder_and_the_same_folder_twice_are_refused(finished: Path) -> None:
    with pytest.raises(KinfedError, match="at least one run folder"):
        build([])
    with pytest.raises(KinfedError, match="given twice"):
        build([finished, finished / ".." / finished.name])


def test_labels_of_runs_are_as_long_as_needed(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "run", **SMALL) for name in ("a", "b")]
    assert [run.label for run in load_runs(folders)] == ["a/run", "b/run"]


# What may be compared


def test_runs_on_the_same_data_are_compared_and_methods_carry_their_run(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", **SMALL)
    two = write_run(tmp_path / "two", **SMALL | {"algorithms": ("ditto", "apfl")}, settings={"lr": 0.5})
    (made,) = compare(load_runs([one, two]))
    assert [m.label for m in made.methods] == ["Local", "FedAvg", "Ditto · one", "Ditto · two", "APFL"]
    assert len({style_of(m) for m in made.methods}) == 5
    (caution,) = cautions(made)
    assert "lr (0.05 / 0.5)" in caution


def test_runs_on_different_data_stand_apart(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", **SMALL)
    two = write_run(tmp_path / "two", **SMALL, dataset="mnist")
    text = own_text(build([one, two], tmp_path / "both.html").read_text())
    assert "one | two" in text
    assert text.count("<h2>") == 2
    assert text.count(">Results</h3>") == 2
    first, second = compare(load_runs([one, two]))
    assert [style_of(m) for m in first.methods] == [style_of(m) for m in second.methods]
    assert not {m.index for m in first.methods} & {m.index for m in second.methods}


def test_the_same_settings_with_other_examples_are_other_data(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", **SMALL)
    two = write_run(tmp_path / "two", **SMALL)
    rewrite(two / "federation-1.json", lambda f: f["train"][3].__setitem__(0, f["train"][3][0] + 1))
    assert len(compare(load_runs([one, two]))) == 2


def test_defaults_left_out_and_defaults_written_out_are_the_same_data(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", **SMALL)
    two = write_run(tmp_path / "two", **SMALL, settings={"partition": None, "clients": None})
    (made,) = compare(load_runs([one, two]))
    assert cautions(made) == []
    assert facts(made.runs[0])["Split among clients"] == facts(made.runs[1])["Split among clients"]
    assert facts(made.runs[1])["Clients"] == "12"
    rewrite(two / "federation-0.json", lambda f: f["description"].update(partition="rotated"))
    assert len(compare(load_runs([one, two]))) == 2


def test_notes_about_the_data_name_their_seeds() -> None:
    federations = {0: replace(federation_of(3, 2), notes=["a", "b"]), 1: replace(federation_of(3, 2), notes=["a"])}
    assert data_notes(federations) == ["a", "Seed 0: b"]


def test_local_is_found_behind_any_label_and_first_in_the_own_run() -> None:
    config = {"algorithms": {"alone": {"method": "local"}, "ditto": {}}}
    one = run_of(trial("alone", 0, 0.5, {"a": 0.5}), trial("ditto", 0, 0.6, {"a": 0.6}), label="1", config=config)
    two = run_of(trial("alone", 0, 0.4, {"a": 0.4}), trial("ditto", 0, 0.6, {"a": 0.6}), label="2", config=config)
    (made,) = compare([one, two])
    assert [round(gains(made, m)[0].gain, 6) for m in made.methods if m.family == "ditto"] == [0.1, 0.2]


# The rule for calling a method best


def test_average_and_sample_standard_deviation() -> None:
    found = average({0: 1.0, 1: 2.0, 2: 6.0})
    assert found is not None
    assert found.mean == 3.0
    assert found.sd == pytest.approx(math.sqrt(7))
    assert average({}) is None
    one = average({4: 0.5})
    assert one is not None
    assert one.sd is None


def test_differences_are_taken_seed_by_seed() -> None:
    # The methods move together by far more than they differ: +1, +2, +3 points, mean 2, deviation 1.
    found = difference({0: 0.51, 1: 0.72, 2: 0.93}, {0: 0.50, 1: 0.70, 2: 0.90})
    assert found is not None
    assert (found.mean, found.spread, found.n, found.ahead) == (pytest.approx(0.02), pytest.approx(0.01), 3, 3)
    # Student's factor for two degrees of freedom is 4.3027.
    assert (found.likely.low, found.likely.high) == pytest.approx((0.02 - 0.024842, 0.02 + 0.024842), abs=1e-6)
    worse = difference({0: 0.51, 1: 0.72, 2: 0.93}, {0: 0.50, 1: 0.70, 2: 0.90}, lower_is_better=True)
    assert worse is not None
    assert (worse.mean, worse.ahead, worse.clear) == (pytest.approx(-0.02), 0, False)


def test_a_lead_is_clear_only_where_its_interval_excludes_zero() -> None:
    doubtful = difference({0: 0.51, 1: 0.72, 2: 0.93}, {0: 0.50, 1: 0.70, 2: 0.90})  # above its spread, but not surely
    assert doubtful is not None
    assert doubtful.mean > doubtful.spread
    assert doubtful.likely.low < 0
    assert not doubtful.clear
    sure = difference({0: 0.52, 1: 0.721, 2: 0.919}, {0: 0.50, 1: 0.70, 2: 0.90})
    assert sure is not None
    assert sure.likely.low > 0
    assert sure.clear


def test_without_shared_seeds_the_spreads_add_up() -> None:
    found = difference({0: 0.8, 1: 0.9}, {2: 0.5, 3: 0.6})
    assert found is not None
    assert found.spread == pytest.approx(math.sqrt(0.005 + 0.005))
    # Welch: two degrees of freedom, standard error sqrt(0.005 / 2 + 0.005 / 2).
    assert found.likely.low == pytest.approx(0.3 - 4.302653 * math.sqrt(0.005), abs=1e-6)
    assert (found.mean, found.ahead, found.clear) == (pytest.approx(0.3), None, False)
    assert difference({0: 0.9, 1: 0.9}, {1: 0.1}) is None


def test_a_best_must_lead_every_other_method_clearly() -> None:
    steady, noisy = {0: 0.80, 1: 0.81}, {0: 0.60, 1: 0.86}  # the first leads by 5 and 5 points, then by 25 and 0
    assert clear_winner({0: {0: 0.85, 1: 0.86}, 1: steady}) == 0
    assert clear_winner({0: {0: 0.85, 1: 0.86}, 1: steady, 2: noisy}) is None
    assert clear_winner({0: {0: 0.85, 1: 0.86}, 1: {}}) is None  # nobody to lead
    assert clear_winner({0: {0: 0.8, 1: 0.8}, 1: {0: 0.8, 1: 0.8}}) is None  # a tie
    assert clear_winner({0: {0: 0.3, 1: 0.3}, 1: {0: 0.2, 1: 0.2}}, lower_is_better=True) == 1


def test_a_diverged_method_neither_leads_nor_stands_in_the_way() -> None:
    diverged = {0: math.nan, 1: 0.99}
    assert leader({0: diverged, 1: {0: 0.5}}) == 1
    assert clear_winner({0: diverged, 1: {0: 0.5, 1: 0.6}}) == 1
    assert leader({0: diverged}) is None


accuracies = st.integers(0, 1000).map(lambda n: n / 1000)


@given(st.lists(accuracies, min_size=1, max_size=6))
def test_one_seed_never_makes_a_best(values: list[float]) -> None:
    assert clear_winner({i: {7: value} for i, value in enumerate(values)}) is None


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(accuracies, min_size=n, max_size=n), min_size=2, max_size=4),
            st.lists(st.integers(-500, 500), min_size=n, max_size=n),
        )
    )
)
def test_how_hard_a_seed_is_does_not_change_the_verdict(case: tuple[list[list[float]], list[int]]) -> None:
    """Paired: what a seed does to all methods alike cancels. 1/1024 keeps the shifted numbers exact enough."""
    values, shifts = case
    exact = {i: {s: round(v * 1000) / 1024 for s, v in enumerate(row)} for i, row in enumerate(values)}
    moved = {i: {s: v + shifts[s] / 1024 for s, v in row.items()} for i, row in exact.items()}
    for a, b in combinations(exact, 2):
        before, after = difference(exact[a], exact[b]), difference(moved[a], moved[b])
        assert before is not None
        assert after is not None
        assert (before.mean, before.spread, before.ahead) == pytest.approx((after.mean, after.spread, after.ahead))


def test_the_page_marks_a_best_only_where_the_rule_allows(tmp_path: Path, page: str) -> None:
    assert 'class="best' not in page  # three seeds, and methods that are close
    clear = write_run(tmp_path / "clear", algorithms=("local", "ditto"), clients=40, rounds=30, seeds=range(8))
    assert 'class="best' in build([clear]).read_text()
    one_seed = build([write_run(tmp_path / "r", **SMALL | {"seeds": (3,)})]).read_text()
    assert 'class="best' not in one_seed
    assert "one seed" in one_seed


def test_methods_at_different_rounds_are_not_ranked() -> None:
    early = [trial("fedavg", seed, 0.5, at=5) for seed in (0, 1)]
    late = [trial("ditto", seed, 0.9, at=10) for seed in (0, 1)]
    (made,) = compare([run_of(*early, *late)])
    assert not any(cell.best for row in method_tables.results_table(made).rows for cell in row)
    assert "so no best is marked" in cautions(made)[-1]
    assert "no verdict" in findings(made)[0]


# Gains over Local


def test_gains_are_counted_per_client_and_seed() -> None:
    alone = {"a": 0.5, "b": 0.7, "c": 0.9, "only local": 0.1}
    trials = (trial("local", 0, 0.7, alone), trial("ditto", 0, 0.8, {"a": 0.8, "b": 0.7, "c": 0.7, "new": 1.0}))
    (made,) = compare([run_of(*trials)])
    found = gains(made, made.methods[1])
    assert [(g.client, round(g.gain, 6)) for g in found] == [("a", 0.3), ("b", 0.0), ("c", -0.2)]
    s = summarize_gains(found)
    assert (s.helped, s.unchanged, s.hurt, s.n) == (1, 1, 1, 3)
    assert (s.mean, s.median, s.lowest) == (pytest.approx(0.1 / 3), pytest.approx(0.0), pytest.approx(-0.2))
    assert findings(made)[1].endswith("hurts 1: c.")


def test_clients_are_counted_once_whatever_the_number_of_seeds_and_named() -> None:
    values = {"Basel": 0.8, "Bern": 0.6}
    trials = [trial("local", seed, 0.7, {"Basel": 0.5, "Bern": 0.7}) for seed in (0, 1, 2)]
    trials += [trial("ditto", seed, 0.7, values) for seed in (0, 1, 2)]
    (made,) = compare([run_of(*trials)])
    assert re.findall(r"1 of 2|1: Bern|3 seeds", findings(made)[1]) == ["1 of 2", "1: Bern", "3 seeds"]
    table = method_tables.sites_table(made.methods[1], gains(made, made.methods[1]), made.style, {})
    assert table is not None
    assert [row[0].text for row in table.rows] == ["Basel", "Bern"]
    assert [row[5].text for row in table.rows] == ["+30.0", "\u221210.0"]


def test_rows_that_are_all_judged_alike_give_no_interval() -> None:
    """One test row, wrong alone and right together: drawing it anew has no spread, which is not certainty."""
    trials = (trial("local", 0, 0.5, {"a": 0.0, "b": 1.0}), trial("ditto", 0, 1.0, {"a": 1.0, "b": 1.0}))
    for one in trials:
        for client in one.clients:
            client.values["personal_error"] = 0.0
    (made,) = compare([run_of(*trials)])
    assert {g.client: g.error for g in gains(made, made.methods[1])} == {"a": None, "b": 0.0}


def test_rounding_in_the_file_is_no_gain() -> None:
    trials = (trial("local", 0, 0.7, {"a": 2 / 3}), trial("ditto", 0, 0.8, {"a": 0.66666667}))
    (made,) = compare([run_of(*trials)])
    assert summarize_gains(gains(made, made.methods[1])).unchanged == 1


def test_without_local_the_page_says_how_to_get_it(tmp_path: Path) -> None:
    text = build([write_run(tmp_path / "r", **SMALL | {"algorithms": ("fedavg", "ditto")})]).read_text()
    assert "add <code>local</code> to the algorithms of the run" in text


# Tables


def test_csv_holds_what_the_run_wrote(comparison: Comparison, finished: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(downloads.results_csv(comparison))))
    summary = json.loads((finished / "summary.json").read_text())["results"]
    ditto = [entry for entry in summary if entry["algorithm"] == "ditto"]
    row = next(row for row in rows if row["algorithm"] == "ditto")
    values = [entry["personal"]["worst10"] for entry in ditto]
    assert float(row["personal_worst10"]) == pytest.approx(np.mean(values))
    assert float(row["personal_worst10_sd"]) == pytest.approx(np.std(values, ddof=1))
    total = np.mean([entry["bytes_down"] + entry["bytes_up"] for entry in ditto]) / 1e6
    assert float(row["mb_total"]) == pytest.approx(total)
    assert float(row["mb_per_round"]) == pytest.approx(total / 60)
    assert rows[0]["server_accuracy"] == ""
    assert len(list(csv.DictReader(io.StringIO(downloads.seeds_csv(comparison))))) == 6 * 3
    assert len(list(csv.DictReader(io.StringIO(downloads.rounds_csv(comparison))))) == 6 * 3 * 60
    written = (finished / "clients.csv").read_text()
    again = csv.DictReader(io.StringIO(downloads.clients_csv(comparison)))
    for before, after in zip(csv.DictReader(io.StringIO(written)), sorted(again, key=_by_seed), strict=True):
        assert before["client"] == after["client"]
        assert float(before["personal_accuracy"]) == pytest.approx(float(after["personal_accuracy"]))


def test_names_of_clients_are_no_formulas_of_a_spreadsheet() -> None:
    (made,) = compare([run_of(trial("local", 0, 0.7, {"=1+1": 0.5}))])
    (row,) = csv.DictReader(io.StringIO(downloads.clients_csv(made)))
    assert row["client"] == "'=1+1"
    assert row["personal_accuracy"] == "0.5"


def _by_seed(row: dict[str, str]) -> int:
    return int(row["seed"])


def test_markdown_is_a_table_whatever_methods_are_called() -> None:
    trials = [trial(name, seed, value) for seed in (0, 1) for name, value in (("a|b\nc", 0.5), ("d", 0.75))]
    (made,) = compare([run_of(*trials)])
    lines = method_tables.results_table(made).markdown().splitlines()
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(method_tables.MAIN_COLUMNS) + 2}
    assert lines[2].startswith("| a\\|b c | 50.0 ± 0.0 |")
    assert lines[3].startswith("| d | **75.0 ± 0.0** |")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.0, 1, "0"), (87.349, 1, "87.3"), (-3.25, 1, "−3.2"), (0.004, 1, "0.004"), (12345.6, 1, "12\u202f346"),
     (math.inf, 1, "not finite"), (-0.0004, 2, "−0.0004")],
)  # fmt: skip
def test_numbers_are_written_as_people_write_them(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_configuration_in_a_few_words(comparison: Comparison) -> None:
    assert brief({"name": "classes", "classes": 2, "alpha": None}) == "classes (classes 2)"
    assert brief({"name": "digits"}) == "digits"
    assert brief([0.5, True, "x"]) == "0.5, yes, x"
    found = facts(comparison.runs[0])
    assert found["Participation"] == "50 % of the clients in a round"
    assert found["Local work"] == "lr 0.05, batch 20, steps 20"
    assert found["Methods"] == "Local, FedAvg, Ditto, Self-FL, FedFomo, CGPFL"


# Colours


def _linear(color: str) -> np.ndarray:
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _contrast(a: str, b: str) -> float:
    low, high = sorted(float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("dark", [False, True])
def test_methods_differ_for_every_eye_and_stand_out_from_the_page(vision: str, dark: bool) -> None:
    def in_theme(color: str) -> str:
        return looks.DARK[color] if dark else color

    colors = [in_theme(color) for color in (*looks.HUES, looks.LOCAL)]
    seen = [_lab(np.array(VISION[vision]) @ _linear(color)) for color in colors]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15
    assert min(_contrast(color, in_theme(looks.BACKGROUND)) for color in colors) >= 3


def test_styles_are_told_apart_and_local_is_gray() -> None:
    names = ["local", "selffl", *(f"method{i}" for i in range(26)), "fedavg"]
    made = looks.styles(names)
    assert len({(style.color, style.dash) for style in made}) == len(names)
    assert made[0].color == looks.LOCAL
    assert looks.LOCAL not in {style.color for style in made[1:]}
    assert made[-1] == looks.styles(["fedavg"])[0]
    assert len(set(looks.styles(["fedavg", "fedavg", "local", "local"]))) == 4


# Figures


def every_figure(comparison: Comparison) -> Iterator[Figure]:
    others = [(m, g) for m in comparison.methods if (g := gains(comparison, m)) and m.family != "local"]
    made = [
        figures.learning_curves(comparison),
        figures.bytes_against_accuracy(comparison),
        figures.distribution(comparison),
        figures.cumulative_shares(comparison),
        class_map(comparison.federations),
        sorted_gains(others, others[0][0]),
        gain_against_size(others, others[0][0]),
        *(figure for m in comparison.methods for panel in method_panels(m) for figure in panel.figures),
    ]
    for figure in made:
        assert figure is not None
        yield figure


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for entry in value.values() for text in _strings(entry))
    elif isinstance(value, list):
        yield from (text for entry in value for text in _strings(entry))


def test_figures_obey_plotlys_schema_and_take_their_colours_from_the_palette(comparison: Comparison) -> None:
    for figure in every_figure(comparison):
        graph_objects.Figure(data=figure.data, layout=figure.layout)
        json.dumps([figure.data, figure.layout], allow_nan=False)
        for text in _strings([figure.data, figure.layout]):
            if text.startswith("#"):
                assert text[:7] in looks.DARK, figure.description
        keys = {view.key for view in figure.views}
        assert {trace["meta"]["view"] for trace in figure.data if "view" in trace.get("meta", {})} <= keys


def test_a_curve_is_the_mean_over_seeds_with_its_band(comparison: Comparison) -> None:
    figure = figures.learning_curves(comparison)
    assert figure is not None
    method = comparison.methods[2]
    band, line = (t for t in figure.data if t["meta"] == {"method": 2, "view": "personal"})
    values = [[r.metrics["personal"]["accuracy"] for r in t.rounds if r.metrics] for t in method.trials]
    mean, sd = 100 * np.mean(values, axis=0), 100 * np.std(values, axis=0, ddof=1)
    assert line["x"] == [float(n) for n in range(5, 61, 5)]
    assert line["y"] == pytest.approx(mean, rel=1e-5)
    assert band["y"] == pytest.approx([*(mean + sd), *(mean - sd)[::-1]], rel=1e-5)


def test_methods_that_send_nothing_are_level_lines(comparison: Comparison) -> None:
    figure = figures.bytes_against_accuracy(comparison)
    assert figure is not None
    local = next(t for t in figure.data if t["meta"] == {"method": 0, "view": "personal"})
    assert local["y"][0] == local["y"][1]
    assert local["hovertemplate"] == "<b>Local</b><br>%{y:.1f} %, sends nothing<extra></extra>"  # no spread is drawn
    fedavg = [t for t in figure.data if t["meta"] == {"method": 1, "view": "personal"}][-1]
    last = comparison.methods[1].trials[0].final.bytes / 1e6
    assert fedavg["x"][-1] == pytest.approx(last, rel=1e-5)


def federation_of(clients: int, classes: int, groups: int | None = None) -> Description:
    generator = np.random.default_rng(clients)
    counts = tuple(tuple(int(n) for n in generator.integers(0, 9, classes)) for _ in range(clients))
    members = tuple(m % groups for m in range(clients)) if groups else None
    names = tuple(f"c{m}" for m in range(clients))
    return described(names, tuple(map(str, range(classes))), counts, members)


@given(st.integers(1, 240), st.integers(1, 40), st.none() | st.integers(1, 120))
def test_the_map_of_classes_shows_every_client_once(clients: int, classes: int, groups: int | None) -> None:
    federation = federation_of(clients, classes, groups)
    columns = client_columns(federation)
    assert len(columns) <= MAX_COLUMNS
    assert sorted(m for pool in columns for m in pool.clients) == list(range(clients))
    figure = class_map({0: federation})
    assert figure is not None
    bars, heat = figure.data
    assert len(heat["x"]) == len(heat["z"][0]) + 1
    cells = [cell for column in heat["customdata"] for cell in column if cell is not None]
    assert sum(cell[2] for cell in cells) == sum(federation.sizes())
    assert len(cells) == classes * len(bars["x"])


def test_groups_stand_apart_in_the_map() -> None:
    figure = class_map({0: federation_of(6, 3, groups=2)})
    assert figure is not None
    assert [row[3] for row in figure.data[1]["z"]] == [None, None, None]
    assert figure.views[0].patch["xaxis.ticktext"] == ["group 0", "group 1"]


@given(st.lists(st.integers(), max_size=60), st.integers(1, 20))
def test_thinning_keeps_the_ends(values: list[int], limit: int) -> None:
    kept = subsampled(values, limit)
    assert len(kept) <= limit + 1
    assert kept[:1] == values[:1]
    assert kept[-1:] == values[-1:]


@given(st.floats(1e-6, 1e6), st.floats(1.5, 1e9))
def test_a_logarithmic_axis_is_labelled_and_covers_its_data(low: float, ratio: float) -> None:
    made = log_axis("x", low, low * ratio)
    start, end = made["range"]
    assert start < math.log10(low) < math.log10(low * ratio) < end
    assert len(made["tickvals"]) == len(made["ticktext"]) <= 20


def test_numbers_without_a_value_are_gaps() -> None:
    assert numbers([100 / 3, math.nan, None, math.inf]) == [33.3333, None, None, None]


def test_a_task_without_accuracy_is_ranked_by_loss(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", **SMALL)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry in lines:
        for kind in ("personal", "server"):
            entry[kind] = entry[kind] and {"loss": entry[kind]["loss"]}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    (folder / "clients.csv").unlink()
    (folder / "summary.json").unlink()
    made = compare(load_runs([folder]))[0]
    assert made.metric == "loss"
    figure = figures.learning_curves(made)
    assert figure is not None
    assert figure.views[0].patch == {"annotations.0.text": "Personal models: loss"}
    assert "lowest loss of personal models" in findings(made)[0]
    build([folder])


# Panels


def test_plain_numbers_of_a_method_become_curves_and_constants_text(comparison: Comparison) -> None:
    (panel,) = method_panels(comparison.methods[3])  # selffl: two that change, one that does not, lists per client
    assert [figure.layout["annotations"][0]["text"] for figure in panel.figures] == ["sigma0_sq", "sigma_sq_mean"]
    assert "Unchanged throughout: smoothing = 0.5." in panel.sentence
    assert method_panels(comparison.methods[0]) == []


def test_a_registered_panel_is_on_the_page(finished: Path, tmp_path: Path) -> None:
    @PANELS.register("listeners", summary="who listens to whom")
    def listeners(method: Method) -> Panel | None:
        recorded = series(method, "affinity")
        if not recorded:
            return None
        assert recorded.keys() == {0, 1, 2}
        assert list(recorded[0]) == list(range(5, 61, 5))
        trace = {"type": "heatmap", "z": recorded[0][60]}
        figure = Figure("Affinities.", [trace], layout(axis(), axis(), "of"))
        return Panel("Who listens to whom <now>", "Rows listen.", (figure,))

    try:
        text = own_text(build([finished], tmp_path / "report.html").read_text())
    finally:
        PANELS.unregister("listeners")
    assert text.count("<h4>Who listens to whom &lt;now&gt;</h4>") == 1
    assert "Inside the methods" in text


# The page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every string a user can choose holds markup."""
    folder = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(3)>"
    labels = {"local": {"method": "local"}, "<b>bold</b>": {"method": "ditto", "note": HOSTILE}}
    names = [f"{HOSTILE}{m}" for m in range(12)]
    write_run(folder, **SMALL | {"algorithms": labels}, dataset=HOSTILE, names=names, settings={HOSTILE: HOSTILE})
    for seed in (0, 1):
        rewrite(folder / f"federation-{seed}.json", lambda f: f["class_names"].__setitem__(0, HOSTILE))
        rewrite(folder / f"federation-{seed}.json", lambda f: f["group_names"].__setitem__(0, HOSTILE))
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    recorded = [entry | {"method": {HOSTILE: entry["round"]}} for entry in lines]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in recorded))
    return build([folder])


def test_markup_in_names_stays_text(hostile_page: Path) -> None:
    text = own_text(hostile_page.read_text())
    assert "alert(1)" in text
    assert not re.search(r"<script>\s*alert|<img|<b>bold", text)
    assert text.count("<script>") == 1 + text.count("<script></script>")  # ours; plotly's was taken out
    assert escape("<b>&") == "&lt;b&gt;&amp;"
    assert short("<" * 30) == "&lt;" * 17 + "…"


class Outline(HTMLParser):
    """What a screen reader or a crawler would find."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))


def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(own_text(page))
    return parser


def test_the_page_is_accessible(page: str) -> None:
    seen = outline(page)
    assert seen.headings[0] == 1
    assert seen.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(seen.headings, seen.headings[1:], strict=False))
    for tag, attributes in seen.tags:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row", "colgroup")
        if "plot" in (attributes.get("class") or "").split():
            assert attributes["role"] == "img"
            assert attributes["aria-label"]
    targets = {attributes["id"] for _, attributes in seen.tags if "id" in attributes}
    links = [attributes["href"] for tag, attributes in seen.tags if tag == "a"]
    assert all(link[1:] in targets for link in links if link and link.startswith("#"))
    assert len([link for link in links if link and link.startswith("#")]) == 9


def test_every_metric_is_defined_where_its_column_is(page: str) -> None:
    for column in (entry.column for entry in method_tables.MAIN_COLUMNS):
        assert f'<abbr title="{column.definition.replace(chr(39), "&#39;")}">{column.heading}</abbr>' in page


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    for tag, attributes in outline(page).tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert not (tag in ("script", "img") and "src" in attributes)
        if tag == "a":
            assert (attributes["href"] or "").startswith(("#", "data:text/csv", "data:text/plain"))
    assert "url(" not in own_text(page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    for script in re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


def test_downloads_are_the_tables(page: str, comparison: Comparison) -> None:
    links = dict(re.findall(r'<a download="([^"]*)" href="data:text/csv;charset=utf-8;base64,([^"]*)">', page))
    assert base64.b64decode(links["methods.csv"]).decode() == downloads.results_csv(comparison)
    assert links.keys() == {"methods.csv", "seeds.csv", "rounds.csv", "clients.csv"}


def test_the_same_run_gives_the_same_page(finished: Path, page: str, tmp_path: Path) -> None:
    assert build([finished], tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_where_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (write_run(tmp_path / name, **SMALL) for name in ("one", "two"))
    assert build([one]) == one / "report.html"
    assert build([one, two]).resolve() == tmp_path / "comparison.html"
    assert build([one], tmp_path / "new" / "x.html").exists()
    with pytest.raises(StorageError, match=r"cannot create the folder .*config\.json"):
        build([one], one / "config.json" / "report.html")
    assert not list(tmp_path.rglob("*.tmp"))


# In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(url: str, profile: Path, *options: str) -> str:
    """The DOM after all scripts have run; any message on the console is an error."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={profile}"),
            *("--window-size=1280,4000", "--virtual-time-budget=15000", *options, "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_phone_draws_all_figures_without_running_strangers_scripts(hostile_page: Path, tmp_path: Path) -> None:
    frame = tmp_path / "frame.html"
    source = hostile_page.as_uri().replace("&", "&amp;")
    frame.write_text(
        f'<iframe src="{source}" style="width:390px;height:3000px;border:0"></iframe><p id="found"></p><script>'
        "setTimeout(() => { const page = document.querySelector('iframe').contentDocument;"
        "const count = (selector) => page.querySelectorAll(selector).length;"
        "document.getElementById('found').textContent = JSON.stringify({plots: count('.plot'),"
        "drawn: count('.plot[data-state=drawn] .main-svg:first-child'), strangers: count('img, b, iframe'),"
        "sideways: page.documentElement.scrollWidth - page.documentElement.clientWidth,"
        "widest: Math.max(...[...page.querySelectorAll('.main-svg')].map((svg) => svg.getBoundingClientRect().width)),"
        "text: [...page.querySelectorAll('.plot text')].map((text) => text.textContent).join(' ')}) }, 8000)</script>"
    )
    dom = browse(frame.as_uri(), tmp_path / "profile")
    match = re.search(r'<p id="found">(.*?)</p>', dom, flags=re.DOTALL)
    assert match is not None
    found = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["plots"] == found["drawn"] == 9
    assert found["strangers"] == 0
    assert found["sideways"] == 0
    assert found["widest"] < 390
    assert HOSTILE in found["text"]  # the name of a recorded figure, as the title above it


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_figures_follow_a_dark_system(finished: Path, page: str, tmp_path: Path) -> None:
    dom = browse((finished / "report.html").as_uri(), tmp_path / "profile", "--blink-settings=preferredColorScheme=0")
    assert dom.count('data-state="drawn"') == page.count('class="plot"')

    def drawn_with(color: str) -> bool:
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return f"stroke: rgb({red}, {green}, {blue})" in dom

    for method_color in (looks.HUES[0], looks.LOCAL):
        assert drawn_with(looks.DARK[method_color])
        assert not drawn_with(method_color)


def test_the_terminal_shows_the_headline_metric_of_the_run() -> None:
    import io

    from rich.console import Console

    from kinfed.cli.display import results_table

    result = {
        "algorithm": "ditto", "metric": "auroc", "rounds": 1, "clients": 2, "took_part": 2, "diverged": False,
        "bytes_down": 0, "bytes_up": 0, "seconds": 1.0, "server": None,
        "personal": {"accuracy": 0.5, "auroc": 0.876, "auroc_worst10": 0.754},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=120)
    console.print(results_table([result]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "AUROC %, last round" in text
    assert "87.6" in text
    assert "75.4" in text


def test_a_page_runs_no_code_from_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled template is read or left there, so nobody can put one in its place."""
    monkeypatch.setenv("KINFED_CACHE", str(tmp_path / "cache"))
    environment.cache_clear()
    build([write_run(tmp_path / "r", **SMALL)])
    assert environment().bytecode_cache is None
    assert not list(tmp_path.glob("cache/**/*.code"))
