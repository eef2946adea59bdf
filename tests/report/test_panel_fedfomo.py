"""The report's panel on who helps whom under FedFomo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects
from report_fixture import described

import kinfed
from kinfed.analysis.comparison import Method, slots
from kinfed.data.federations.description import Description
from kinfed.records.run_record import FinalRecord, RoundRecord, RunRecord, TrialRecord
from kinfed.report import build
from kinfed.report.drawing import looks
from kinfed.report.panels import Panel
from kinfed.report.panels.base import ClientGroups
from kinfed.report.panels.fedfomo_panel import MAX_STEPS, kin_found, who_helps_whom

TWO_GROUPS = ClientGroups(("a", "b", "c", "d"), (0, 0, 1, 1), (0, 0, 1, 1), None)


def matrix(size: int, scale: float) -> list[list[float]]:
    """Affinity of i to n: 10 i + n, times a scale."""
    return [[scale * (10 * i + n) for n in range(size)] for i in range(size)]


def federation(clients: int, groups: tuple[int, ...] | None, target_of: list[int] | None = None) -> Description:
    names = tuple(f"client <{m}>" for m in range(clients))
    description: dict[str, Any] = {} if target_of is None else {"target_of": target_of}
    counts = tuple((1,) for _ in names)
    return described(names, ("0",), counts, groups, description=description)


def method(clients: int, rounds: int, data: Description | None, recorded: bool = True) -> Method:
    def figures(number: int) -> dict[str, Any]:
        mix = [[1.0 if n == (i + 1) % clients else 0.0 for n in range(clients)] for i in range(clients)]
        return {"affinity": matrix(clients, number), "weights": mix} if recorded else {}

    lines = tuple(RoundRecord(r, 1.0, clients, 0, 1.0, 1.0, {}, figures(r)) for r in range(1, rounds + 1))
    trial = TrialRecord("fedfomo", 0, lines, (), FinalRecord(label="fedfomo", seed=0, rounds=rounds), True)
    run = RunRecord(Path("r"), "r", {}, "0", {}, "", (trial,), {} if data is None else {0: data})
    return Method("fedfomo", "FedFomo", 0, slots(["fedfomo"])[0], run, (trial,))


def made(*arguments: Any, **options: Any) -> Panel:
    panel = who_helps_whom(method(*arguments, **options))
    assert panel is not None
    return panel


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for entry in value.values() for text in strings(entry)]
    if isinstance(value, list | tuple):
        return [text for entry in value for text in strings(entry)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("groups", [(0, 1, 0, 1), None])
def test_figures_obey_plotlys_schema_and_the_palette(groups: tuple[int, ...] | None) -> None:
    panel = made(4, 3, federation(4, groups, [3, 2, 1, 0]))
    assert len(panel.figures) == (3 if groups else 2)
    for figure in panel.figures:
        graph_objects.Figure(data=figure.data, layout=figure.layout)
        json.dumps([figure.data, figure.layout], allow_nan=False)
        texts = strings([figure.data, figure.layout])
        assert all(text[:7] in looks.DARK for text in texts if text.startswith("#"))
        assert not any("client <" in text for text in texts)


def test_rows_stand_by_target_and_columns_by_training() -> None:
    """Clients 0 and 2 train in group 0, 1 and 3 in group 1; targets are reversed, so 3 and 1 are judged on group 0."""
    heat = made(4, 2, federation(4, (0, 1, 0, 1), [3, 2, 1, 0])).figures[0]
    rows, columns = [1, 3, 0, 2], [0, 2, 1, 3]
    expected = [[None if n == i else 2.0 * (10 * i + n) for n in columns] for i in rows]
    assert heat.data[0]["z"] == expected
    assert heat.layout["xaxis"]["tickvals"] == heat.layout["yaxis"]["tickvals"] == [0.5, 2.5]
    assert heat.layout["annotations"][0]["text"] == "Rows: judged on; columns: trained in"


def test_a_slider_steps_over_rounds() -> None:
    heat = made(4, 3, federation(4, (0, 0, 1, 1))).figures[0]
    (slider,) = heat.layout["sliders"]
    assert [step["label"] for step in slider["steps"]] == ["1", "2", "3"]
    assert slider["active"] == 2
    assert slider["steps"][2]["args"][0]["z"] == [heat.data[0]["z"]]
    assert slider["steps"][0]["args"][0]["z"][0][0] == [None, 1.0, 2.0, 3.0]
    assert (slider["steps"][0]["args"][0]["zmin"], slider["steps"][0]["args"][0]["zmax"]) == (1.0, 32.0)


def test_a_slider_steps_over_clients() -> None:
    lines = made(4, 3, federation(4, (0, 0, 1, 1), [3, 2, 1, 0])).figures[1]
    (slider,) = lines.layout["sliders"]
    first = slider["steps"][0]
    assert first["label"] == "client &lt;2&gt;: trains in group 1, judged on group 0"
    assert first["args"][0]["line.width"] == [3, 3, 1.2, 1.2]  # those who train in the group that it is judged on
    assert first["args"][0]["y"] == [[20, 40, 60], [21, 42, 63], [None] * 3, [23, 46, 69]]
    assert [trace["y"] for trace in lines.data] == first["args"][0]["y"]
    assert lines.data[0]["line"]["color"] != lines.data[2]["line"]["color"]


def test_shares_of_the_mix_add_up() -> None:
    """Everybody takes all from the next client: clients 0 and 2 find kin there, 1 and 3 do not."""
    shares = made(4, 2, federation(4, (0, 0, 1, 1))).figures[2]
    own, kin, others = (trace["y"] for trace in shares.data)
    assert (own, kin, others) == ([0, 0], [50, 50], [50, 50])


def test_kin_are_counted() -> None:
    perfect = [[9, 5, 1, 1], [5, 9, 1, 1], [0, 0, 9, 3], [0, 0, 3, 9]]
    assert kin_found(perfect, TWO_GROUPS) == (4, 4)
    assert kin_found([row[::-1] for row in perfect[::-1]], TWO_GROUPS) == (4, 4)
    half = [[9, 1, 5, 1], [5, 9, 1, 1], [3, 0, 9, 0], [0, 0, 3, 9]]
    assert kin_found(half, TWO_GROUPS) == (2, 4)
    moved = ClientGroups(TWO_GROUPS.names, (0, 0, 1, 1), (1, 1, 0, 0), None)
    assert kin_found(perfect, moved) == (4, 8)  # each has two kin, and one of them at its second place


def test_long_runs_are_thinned_and_large_federations_left_out() -> None:
    heat, lines = made(40, 60, None).figures
    for figure in (heat, lines):
        assert len(figure.layout["sliders"][0]["steps"]) <= MAX_STEPS + 1
    assert heat.layout["sliders"][0]["steps"][-1]["label"] == "60"
    assert who_helps_whom(method(101, 1, None)) is None
    assert who_helps_whom(method(1, 2, None)) is None
    assert who_helps_whom(method(4, 2, None, recorded=False)) is None


def test_a_run_has_the_panel(tmp_path: Path) -> None:
    kinfed.run(
        dataset="digits", partition={"name": "latent", "groups": 2}, clients=4, rounds=2, steps=2, seeds=(0, 1),
        participation=1.0, algorithms="fedfomo,fedfomo_ma", model="mlr", eval_every=1, out=tmp_path / "run",
        foreign_targets=True,
    )  # fmt: skip
    page = build([tmp_path / "run"]).read_text("utf-8")
    assert page.count("Who helps whom") == 2
    assert "whose group they are judged on" in page
    assert "Shown is seed 0." in page
