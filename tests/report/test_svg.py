"""Still figures: where a value stands, what every kind of mark becomes, and that nothing from outside is markup."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ET
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinfed.report.drawing.chart import Figure, Trace, View, axis, escape, layout, log_axis
from kinfed.report.drawing.looks import HUES, INK
from kinfed.report.drawing.marks import area, band, bars, dots, heat, in_view, line, spread, stacked
from kinfed.report.drawing.svg import css_color, make_scale, nice_numbers, palette_rules, stepped, still_picture

BLUE, ORANGE = HUES[:2]


def drawn(*traces: Trace, x: dict | None = None, y: dict | None = None, **more: object) -> ET.Element:
    shape = layout(x or axis("x"), y or axis(), "above", margin={"l": 0, "r": 0, "t": 0, "b": 0})
    return ET.fromstring(str(still_picture(Figure("", list(traces), shape, height=100, **more), 100)))


def paths(picture: ET.Element, style: str) -> list[str]:
    return [node.attrib["d"] for node in picture.iter("path") if node.get("style") == style]


def texts(picture: ET.Element) -> list[str]:
    return [node.text or "" for node in picture.iter("text")]


RANGE = {"x": axis(range=[0, 10]), "y": axis(range=[0, 10])}  # ten pixels for one


def test_a_line_goes_through_its_points() -> None:
    picture = drawn(line([0, 5, 10], [0, 10, 5], BLUE, "", width=3, dash="dash"), **RANGE)
    assert paths(picture, f"stroke:{css_color(BLUE)}") == ["M0.0 100.0L50.0 0.0L100.0 50.0"]


def test_points_without_a_value_are_left_out() -> None:
    picture = drawn(dots([0, 5, 10], [0, None, 5], [BLUE, BLUE, ORANGE], ""), **RANGE)
    assert paths(picture, f"stroke:{css_color(BLUE)}") == ["M0.0 100.0h0"]
    assert paths(picture, f"stroke:{css_color(ORANGE)}") == ["M100.0 50.0h0"]


def test_bars_stand_on_each_other_and_hang_from_zero() -> None:
    y = axis(range=[-10, 10])
    picture = drawn(
        bars([2, 6], [4, -2], BLUE, "", width=2), bars([2, 6], [2, -4], ORANGE, "", width=2), x=RANGE["x"], y=y
    )
    assert paths(picture, f"fill:{css_color(BLUE)}") == ["M10.0 50.0H30.0V30.0H10.0ZM50.0 50.0H70.0V60.0H50.0Z"]
    assert paths(picture, f"fill:{css_color(ORANGE)}") == ["M10.0 30.0H30.0V20.0H10.0ZM50.0 60.0H70.0V80.0H50.0Z"]


def test_areas() -> None:
    picture = drawn(
        band([0, 10], [1, 1], [3, 3], BLUE),
        stacked([0, 10], [2, 2], ORANGE, ""),
        stacked([0, 10], [3, 3], INK, ""),
        area([0, 10], [4, 4], HUES[2], ""),
        **RANGE,
    )
    assert paths(picture, f"fill:{css_color(BLUE)}") == ["M0.0 70.0L100.0 70.0L100.0 90.0L0.0 90.0Z"]
    assert paths(picture, f"fill:{css_color(INK)}") == ["M0.0 50.0L100.0 50.0L100.0 80.0L0.0 80.0Z"]
    (filled,) = paths(picture, f"fill:{css_color(HUES[2])}")
    assert filled.startswith("M0.0 100.0L0.0 60.0")
    assert filled.endswith("L100.0 100.0Z")


def test_a_map_leaves_out_cells_without_a_value() -> None:
    picture = drawn(heat([[0, None], [1, 1]], "", low=0, high=1))
    squares = [node.attrib["d"] for node in picture.iter("path") if "color-mix" in node.attrib["style"]]
    assert sorted(square.count("Z") for square in squares) == [1, 2]


def test_named_cells_are_named() -> None:
    picture = drawn(heat([[0, 1]], "", x=["u", "v"], y=["w"]))
    assert {"u", "v", "w"} <= set(texts(picture))


@pytest.mark.parametrize("text", [["a", "b", "c", "d"], None])
def test_a_row_of_values_has_its_middle_half_in_a_box(text: list[str] | None) -> None:
    picture = drawn(spread([0, 4, 6, 10], 1, BLUE, text=text), x=RANGE["x"], y=axis(range=[2, 0]))
    (box,) = [node.attrib["d"] for node in picture.iter("path") if "fill" in node.attrib["style"]]
    assert box.startswith("M0.0 50.0H100.0")
    assert "M30.0 60.5H70.0V39.5H30.0Z" in box or "M30.0 39.5H70.0V60.5H30.0Z" in box


def test_the_view_that_the_figure_begins_with_is_shown() -> None:
    views = (View("one", "One"), View("two", "Two", {"annotations.0.text": "patched"}))
    traces = [*in_view("one", [line([0, 1], [0, 1], BLUE, "")]), *in_view("two", [line([0, 1], [1, 0], ORANGE, "")])]
    picture = drawn(*traces, views=views, initial="two")
    assert not paths(picture, f"stroke:{css_color(BLUE)}")
    assert paths(picture, f"stroke:{css_color(ORANGE)}")
    assert "patched" in texts(picture)


def test_text_from_outside_is_text() -> None:
    hostile = "<script>alert(1)</script>&amp;"
    x = axis(escape(hostile), tickvals=[0], ticktext=[escape(hostile)])
    picture = still_picture(Figure("", [line([0, 1], [0, 1], BLUE, "")], layout(x, axis(), escape(hostile))), 100)
    assert "<script" not in picture
    assert texts(ET.fromstring(str(picture))).count(hostile) == 3


def test_logarithmic_axes() -> None:
    scale = make_scale(log_axis("", 1, 1000), [1, 1000], 0, 90)
    ends = [scale.place(value) for value in (1, 1000)]
    assert scale.place(0) is None
    assert scale.place(10) == pytest.approx(ends[0] + (ends[1] - ends[0]) / 3)
    assert [text for _, text in scale.ticks][:3] == ["1", "10", "100"]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 12))
def test_ticks_are_few_round_and_inside(low: float, span: float, most: int) -> None:
    ticks = nice_numbers(low, low + span, most)
    assert len(ticks) <= most + 1
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)


def test_corners() -> None:
    assert stepped([(0, 0), (2, 1)], "hv") == [(0, 0), (2, 0), (2, 1), (2, 1)]
    assert stepped([(0, 0), (2, 1)], "hvh") == [(0, 0), (1, 0), (1, 1), (2, 1)]


def test_every_colour_of_the_palette_has_a_variable() -> None:
    rules = palette_rules()
    for color in (*HUES, INK):
        assert str(rules).count(f"{css_color(color)[4:-1]}:") == 2


def test_the_script_is_the_one_that_its_note_names() -> None:
    folder = files("kinfed.report").joinpath("plotly")
    script, note = (folder.joinpath(name).read_bytes() for name in ("plotly-cartesian.min.js", "README.md"))
    digest = re.search(rb"SHA-256: (\w{64})", note)
    assert digest is not None
    assert hashlib.sha256(script).hexdigest().encode() == digest[1]
