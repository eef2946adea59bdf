"""The report's panels about contexts: from what CGPFL and CGPFL-Heur write into a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from kinfed.analysis.comparison import Comparison, Method, compare
from kinfed.records.reader import load_runs, read_parameters
from kinfed.report import build
from kinfed.report.drawing import looks
from kinfed.report.panels import Panel, method_panels
from kinfed.report.panels.cgpfl_panel import accuracy_by_number, choice_of_number, distances
from kinfed.report.panels.clusters_panel import clusters
from kinfed.runs.experiment import run

METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "k1": {"method": "cgpfl", "contexts": 1},
    "cgpfl": {"contexts": 3},
    "cgpfl_heur": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("contexts") / "run"
    run(
        dataset="digits", partition={"name": "classes", "classes": 2}, clients=10, model="mlr", rounds=3, lr=0.02,
        steps=5, participation=0.6, seeds=(0, 1), algorithms=METHODS, eval_every=1, out=out, workers=1,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    return compare(load_runs([folder]))[0]


def method(comparison: Comparison, label: str) -> Method:
    return next(m for m in comparison.methods if m.algorithm == label)


def made(panel: Panel | None) -> Panel:
    assert panel is not None
    return panel


def altered(one: Method, **figures: Any) -> Method:
    """The method with other recorded figures in every round."""
    trials = tuple(
        replace(trial, rounds=tuple(replace(r, method={**r.method, **figures}) for r in trial.rounds))
        for trial in one.trials
    )
    return replace(one, trials=trials)


def test_contexts_are_shown_client_by_client(comparison: Comparison) -> None:
    panel = made(clusters(method(comparison, "cgpfl")))
    assert panel.title == "Contexts of clients"
    assert "After round 3 the clients form 3 contexts" in panel.sentence
    strip = panel.figures[0].data[0]
    assert strip["type"] == "heatmap"
    assert len(strip["z"]) == 10
    assert len(strip["z"][0]) == 3
    assert any("no context yet" in cell for row in strip["customdata"] for cell in row)  # not all were called at once


def test_distances_between_contexts(comparison: Comparison) -> None:
    one = method(comparison, "cgpfl")
    panel = made(distances(one))
    drawn, curve = panel.figures
    recorded = one.complete_trials[0].rounds[-1].method["distances"]
    z = drawn.data[0]["z"]
    assert [z[i][i] for i in range(3)] == [None, None, None]
    assert z[0][1] == pytest.approx(recorded[0][1], rel=1e-5)
    least = min(recorded[i][j] for i in range(3) for j in range(i))
    assert f"are {least:.2g} apart" in panel.sentence
    assert "Shown is seed 0" in panel.sentence
    assert curve.data[0]["x"] == [1, 2, 3]


def test_the_cost_is_weighed_by_examples(comparison: Comparison) -> None:
    one = method(comparison, "cgpfl")
    sizes = one.run.federations[0].sizes()
    figures = altered(one, clients={"squared_distance_to_context": [1.0] + [0.0] * 9})
    cost = sizes[0] / sum(sizes)
    panel = made(distances(figures))
    assert panel.figures[1].data[0]["y"][-1] == pytest.approx(cost, rel=1e-5)
    assert f"a personal model is about {math.sqrt(cost):.2g} from its context" in panel.sentence
    assert f"cost at most {cost:.2g} times an unknown constant" in panel.sentence


def test_terms_of_the_bound_are_said(comparison: Comparison) -> None:
    """d = 650 parameters of the run's model; its clients' examples are m."""
    one = method(comparison, "cgpfl")
    m = sum(one.run.federations[0].sizes())
    text = made(distances(one)).sentence
    assert f"with 3 contexts: confidence {2 * math.sqrt(math.log(10 / 0.05) / m):.2g}" in text
    assert f"complexity {math.sqrt(3 * 650 / m * math.log(math.e * m / 650)):.2g}" in text
    assert "labels of training and test examples differ by 0." in text


def test_one_context_has_no_distances(comparison: Comparison) -> None:
    panel = made(distances(method(comparison, "k1")))
    assert len(panel.figures) == 1
    assert "nearest" not in panel.sentence
    assert "with 1 context: confidence" in panel.sentence


def test_without_a_description_of_the_model_the_bound_is_left_out(comparison: Comparison, tmp_path: Path) -> None:
    one = method(comparison, "cgpfl")
    for content in (None, "{", "[]", '{"parameters": "many"}'):
        if content is not None:
            (tmp_path / "model.json").write_text(content)
        panel = made(distances(replace(one, run=replace(one.run, parameters=read_parameters(tmp_path / "model.json")))))
        assert "bound" not in panel.sentence


def test_the_choice_is_drawn_with_both_terms(comparison: Comparison) -> None:
    one = method(comparison, "cgpfl_heur")
    panel = made(choice_of_number(one))
    first, cost, e, star = panel.figures[0].data
    recorded = one.complete_trials[0].rounds[0].method
    assert first["y"] == pytest.approx(recorded["complexity"], rel=1e-5)
    assert cost["y"] == pytest.approx([recorded["mu"] * c for c in recorded["cost"]], rel=1e-5)
    assert e["y"] == pytest.approx([a + b for a, b in zip(first["y"], cost["y"], strict=True)], rel=1e-4)
    chosen = recorded["contexts"]
    assert star["x"] == [chosen]
    assert star["y"][0] == pytest.approx(min(e["y"]), rel=1e-5)
    assert f"is kept: {chosen} of at most 5." in panel.sentence
    assert f"it was {one.complete_trials[1].rounds[0].method['contexts']} with seed 1" in panel.sentence


@pytest.mark.parametrize(
    "figures", [{"complexity": []}, {"cost": [1.0]}, {"mu": None}, {"contexts": 99}, {"contexts": 0}, {"cost": "x"}]
)
def test_a_choice_that_was_not_made_is_not_drawn(comparison: Comparison, figures: dict[str, Any]) -> None:
    assert choice_of_number(altered(method(comparison, "cgpfl_heur"), **figures)) is None


def test_accuracy_against_the_number_stands_beside_the_method_that_chooses(comparison: Comparison) -> None:
    panel = made(accuracy_by_number(method(comparison, "cgpfl_heur")))
    given, stars = panel.figures[0].data
    assert given["x"] == [1.0, 3.0]
    accuracy = [100 * sum(method(comparison, m).final("personal", "accuracy").values()) / 2 for m in ("k1", "cgpfl")]
    assert given["y"] == pytest.approx(accuracy, rel=1e-5)
    heur = method(comparison, "cgpfl_heur")
    assert stars["x"] == [sum(t.rounds[-1].method["contexts"] for t in heur.complete_trials) / 2]
    assert any(given["error_y"]["array"])
    assert "did best" in panel.sentence
    for label in ("local", "k1", "cgpfl"):
        assert accuracy_by_number(method(comparison, label)) is None


def test_without_a_method_that_chooses_the_first_shows_the_accuracies(comparison: Comparison) -> None:
    one = method(comparison, "k1")
    kept = tuple(trial for trial in one.run.trials if trial.algorithm != "cgpfl_heur")
    panel = made(accuracy_by_number(replace(one, run=replace(one.run, trials=kept))))
    assert len(panel.figures[0].data) == 1
    alone = tuple(trial for trial in kept if trial.algorithm != "cgpfl")
    assert accuracy_by_number(replace(one, run=replace(one.run, trials=alone))) is None


def test_other_methods_have_none_of_these(comparison: Comparison) -> None:
    assert method_panels(method(comparison, "local")) == []


def test_figures_obey_plotlys_schema_and_the_palette(comparison: Comparison) -> None:
    known = {*looks.DARK, *looks.DARK.values()}

    def colours(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value[:7]] if value.startswith("#") else []
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [colour for part in parts for colour in colours(part)]

    for one in comparison.methods:
        for panel in method_panels(one):
            for figure in panel.figures:
                graph_objects.Figure(data=figure.data, layout=figure.layout)
                json.dumps([figure.data, figure.layout], allow_nan=False)
                assert set(colours([figure.data, figure.layout])) <= known


def test_all_is_on_the_page(folder: Path, tmp_path: Path) -> None:
    text = build([folder], tmp_path / "report.html").read_text()
    for title in ("Contexts of clients", "Context models", "How many contexts", "Accuracy and the number of contexts"):
        assert title in text
