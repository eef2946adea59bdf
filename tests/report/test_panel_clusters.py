"""Panels on clusters and on APFL's α: from records made by hand, and from a run of every method that has one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from method_bench import linear
from plotly import graph_objects
from report_fixture import described
from sklearn.metrics import adjusted_rand_score

import kinfed
from kinfed.analysis.comparison import Method, compare, slots
from kinfed.analysis.statistics import adjusted_rand
from kinfed.records.reader import load_runs
from kinfed.records.run_record import FinalRecord, RoundRecord, RunRecord, TrialRecord
from kinfed.report import build
from kinfed.report.drawing import looks
from kinfed.report.drawing.chart import Figure
from kinfed.report.drawing.looks import HUES
from kinfed.report.panels import method_panels
from kinfed.report.panels.clusters_panel import MAX_ROWS, cluster_history, clusters, color
from kinfed.report.panels.shares_panel import mixing
from kinfed.testing import tiny_federation

NAMES = ("anna", "<b>bert", "carl", "dora")


def method(
    figures: dict[int, dict[str, Any]],
    *,
    family: str = "ifca",
    names: tuple[str, ...] = NAMES,
    groups: tuple[int, ...] | None = None,
    seeds: tuple[int, ...] = (4,),
) -> Method:
    """A method that recorded these figures, by round."""
    rounds = tuple(RoundRecord(n, 1.0, 4, 0, 1.0, 1.0, {}, own) for n, own in figures.items())
    last = max(figures)
    finals = [FinalRecord(label=family, seed=seed, rounds=last) for seed in seeds]
    trials = tuple(TrialRecord(family, final.seed, rounds, (), final, True) for final in finals)
    counts = tuple((m + 1, 20) for m in range(len(names)))
    data = described(names, ("a", "b"), counts, groups, ("east", "west") if groups else None)
    run = RunRecord(
        Path("r"), "r", {"algorithms": {family: {"method": family}}}, "0", {}, "", trials, dict.fromkeys(seeds, data)
    )
    return Method(family, family, 0, slots([family])[0], run, trials)


def drawable(figures: tuple[Figure, ...]) -> None:
    """Plotly accepts them, JSON can hold them, and all colours are the palette's."""
    for figure in figures:
        graph_objects.Figure(data=figure.data, layout=figure.layout)
        json.dumps([figure.data, figure.layout], allow_nan=False)
        for text in _strings([figure.data, figure.layout]):
            assert "<b>" not in text
            assert not text.startswith("#") or text[:7] in looks.DARK


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _strings(entry)


WALK = {
    5: {"assignment": [-1, 0, 0, 0]},
    10: {"assignment": [1, 0, 0, 0]},
    15: {"assignment": [1, 0, 1, 0]},
    20: {"assignment": [1, 0, 1, 0]},
}


def test_the_strip_shows_every_client_in_every_evaluated_round() -> None:
    found = clusters(method(WALK))
    assert found is not None
    strip, members = found.figures
    drawable(found.figures)
    (cells,) = strip.data
    assert cells["z"] == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 2, 2, 2], [1, 1, 2, 2]]  # rows: bert, dora, anna, carl
    assert cells["customdata"][2][0] == "anna, round 5: no cluster yet"
    assert cells["customdata"][0][3] == "&lt;b&gt;bert, round 20: cluster 0"
    assert strip.layout["yaxis"]["ticktext"] == ["&lt;b&gt;bert", "dora", "anna", "carl"]
    assert strip.layout["xaxis"]["ticktext"] == ["5", "10", "15", "20"]
    by_name = {trace["name"]: trace["y"] for trace in members.data}
    assert by_name == {"cluster 0": [3, 3, 2, 2], "cluster 1": [0, 1, 2, 2], "no cluster yet": [1, 0, 0, 0]}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (WALK, "form 2 clusters, the largest with 2 and the smallest with 2 of 4 clients. No client has changed "
               "cluster since round 15."),
        ({n: WALK[n] for n in (5, 10, 15)}, "1 changed cluster between the last two evaluated rounds."),
        ({n: WALK[n] for n in (15, 20)}, "No client changed cluster between the evaluated rounds."),
        ({5: WALK[5]}, "form 1 cluster. 1 client had no cluster yet."),
    ],
)  # fmt: skip
def test_what_the_sentence_says(figures: dict[int, dict[str, Any]], words: str) -> None:
    found = clusters(method(figures))
    assert found is not None
    assert words in found.sentence
    assert "seed" not in found.sentence
    drawable(found.figures)


def test_clusters_are_held_against_known_groups() -> None:
    same = clusters(method(WALK, groups=(0, 1, 0, 1)))
    other = clusters(method(WALK, groups=(0, 0, 1, 1), seeds=(4, 5)))
    assert same is not None
    assert other is not None
    assert "made of by 1.00" in same.sentence
    assert "made of by -0.50" in other.sentence
    assert other.sentence.endswith("Shown is seed 4.")
    assert same.figures[0].layout["yaxis"]["ticktext"] == ["east", "west"]
    assert "anna (east)" in same.figures[0].data[0]["customdata"][0][0]


def test_a_tree_of_splits_has_no_crossing_lines() -> None:
    """0 splits off 1 in round 3 and 2 in round 7; 1 splits off 3 in round 9: from the top 0, 2, 1, 3."""
    figures = {10: {"assignment": [0, 1, 2, 3], "parent": [-1, 0, 0, 1], "born": [0, 3, 7, 9]}}
    found = clusters(method(figures, family="cfl"))
    assert found is not None
    tree = found.figures[-1]
    drawable(found.figures)
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in tree.data}
    assert lines == {
        "cluster 0": ([0, 10], [0, 0]),
        "cluster 1": ([3, 3, 10], [0, 2, 2]),
        "cluster 2": ([7, 7, 10], [0, 1, 1]),
        "cluster 3": ([9, 9, 10], [2, 3, 3]),
    }
    assert "cluster 3: 1 client; split from cluster 1 in round 9" in tree.data[3]["hovertemplate"]
    alone = clusters(method({10: {"assignment": [0] * 4, "parent": [-1], "born": [0]}}, family="cfl"))
    assert alone is not None
    assert len(alone.figures) == 2  # nothing was split


def test_many_clients_are_counted_and_not_drawn_one_by_one() -> None:
    names = tuple(str(m) for m in range(MAX_ROWS + 1))
    found = clusters(method({1: {"assignment": [m % 9 for m in range(MAX_ROWS + 1)]}}, names=names))
    assert found is not None
    assert len(found.figures) == 1
    drawable(found.figures)
    assert {trace["type"] for trace in found.figures[0].data} == {"bar"}  # one round: an area has no width


def test_methods_with_contexts_call_them_so() -> None:
    found = clusters(method({1: {"assignment": [0, 1, 1, 0], "contexts": 2}}))
    assert found is not None
    assert found.title == "Contexts of clients"
    assert "form 2 contexts" in found.sentence


@pytest.mark.parametrize("noun", ["cluster", "context"])
def test_the_model_after_the_last_is_that_of_clients_without_a_cluster(noun: str) -> None:
    """Their number may change from round to round; so does what comes after them."""
    figures = {
        1: {"assignment": [2, 0, 1, 2], f"{noun}s": 2},
        2: {"assignment": [2, 0, 1, 3], f"{noun}s": 3},
        3: {"assignment": [2, 0, 1, 1], f"{noun}s": 3},
    }
    history = cluster_history(method(figures))
    assert history is not None
    assert history.labels == ((-1, 0, 1, -1), (2, 0, 1, -1), (2, 0, 1, 1))
    assert history.name(history.labels[0][0]) == f"no {noun} yet"
    assert history.clusters == [0, 1, 2]


@pytest.mark.parametrize("value", [3, [], ["a"], [0.5, 1.0], [True, False], [-2, 0], {"x": 1}])
def test_records_that_are_no_assignment_are_passed_over(value: Any) -> None:
    assert cluster_history(method({1: {"assignment": value}})) is None
    kept = cluster_history(method({1: {"assignment": value}, 2: {"assignment": [0, 1, 0, 1]}}))
    assert kept is not None
    assert kept.rounds == (2,)


def test_data_of_other_clients_give_no_names() -> None:
    found = cluster_history(method({1: {"assignment": [0, 1]}}))
    assert found is not None
    assert found.clients.client(1) == "client 1"


def test_colours_are_told_apart() -> None:
    assert len({color(c) for c in range(14)}) == 14
    assert color(3) == HUES[3]


# APFL


def alphas(*rows: list[float]) -> dict[int, dict[str, Any]]:
    return {5 * (i + 1): {"clients": {"alpha": row}} for i, row in enumerate(rows)}


def test_apfl_shows_every_clients_share_and_the_median() -> None:
    found = mixing(method(alphas([0.5] * 4, [0.4, 0.9, 0.6, 0.1]), family="apfl"))
    assert found is not None
    drawable(found.figures)
    assert "After round 10 it is 50 % for the median client, from 10 % at dora to 90 % at <b>bert." in found.sentence
    lines = {trace["name"]: trace["y"] for trace in found.figures[0].data}
    assert lines["anna"] == [0.5, 0.4]
    assert lines["median"] == [0.5, 0.5]
    dots = found.figures[1].data[0]
    assert dots["x"] == [21, 22, 23, 24]
    assert dots["y"] == [0.4, 0.9, 0.6, 0.1]


def test_apfl_with_many_clients_shows_the_middle() -> None:
    names = tuple(str(m) for m in range(100))
    row = [m / 99 for m in range(100)]
    found = mixing(method(alphas(row, row), family="apfl", names=names, seeds=(1, 2)))
    assert found is not None
    drawable(found.figures)
    band, middle = found.figures[0].data
    assert band["y"] == pytest.approx([0.9, 0.9, 0.1, 0.1])
    assert middle["y"] == pytest.approx([0.5, 0.5])
    assert found.sentence.endswith("Shown is seed 1.")


def test_apfl_needs_its_own_records() -> None:
    assert mixing(method(alphas([0.5] * 4), family="selffl")) is None
    assert mixing(method({1: {"clients": {"beta": [1]}}, 2: {}}, family="apfl")) is None


# Real runs


def test_panels_of_real_runs_are_on_the_page(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "ifca": {"method": "ifca", "clusters": 2},
        "cfl": {"method": "cfl", "eps1": 1e3, "eps2": 1e-6, "t_min": 1, "min_size": 2},
        "flhc": {"method": "flhc", "n1": 2},
        "apfl": {"method": "apfl"},
    }
    out = tmp_path / "run"
    kinfed.run(
        federation=tiny_federation(), model=linear, algorithms=settings, rounds=6, eval_every=2, seeds=[0],
        participation=1.0, batch=5, steps=3, out=out,
    )  # fmt: skip
    (comparison,) = compare(load_runs([out]))
    titles = {m.algorithm: [p.title for p in method_panels(m)] for m in comparison.methods}
    for name in ("ifca", "cfl", "flhc"):
        assert "Clusters of clients" in titles[name]
    assert "Own or server model" in titles["apfl"]
    made = {m.algorithm: clusters(m) for m in comparison.methods}
    assert made["cfl"] is not None
    assert len(made["cfl"].figures) == 3
    for found in made.values():
        drawable(() if found is None else found.figures)
    page = build([out]).read_text(encoding="utf-8")
    assert "The tree of splits of CFL" in page
    assert "Own or server model" in page


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12))
def test_agreement_of_groups_is_the_adjusted_rand_index(pairs: list[tuple[int, int]]) -> None:
    one, other = zip(*pairs, strict=True)
    assert adjusted_rand(one, other) == pytest.approx(adjusted_rand_score(one, other), abs=1e-12)
