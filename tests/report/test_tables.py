"""One table as Markdown, LaTeX, CSV, HTML and on a terminal."""

from __future__ import annotations

import csv
import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kinfed.report.drawing.looks import HUES, Style
from kinfed.report.html import environment
from kinfed.report.tables import TableCell, TableColumn, TextTable, csv_text

TABLE = TextTable.of(
    "Results [1] of <all>",
    [
        TableColumn("Method", "name"),
        TableColumn("Accuracy", group="Personal", unit="%", definition='Share of "right" answers', sortable=True),
        TableColumn("Loss", group="Personal"),
        TableColumn("Seconds", group="Cost"),
        TableColumn("Remark", "text", group="Cost"),
    ],
    [
        [
            TableCell("a|b_c", style=Style(HUES[0], "solid", "circle")),
            TableCell("61.5", spread="2.9", best=True, sort_value=0.615),
            "−0.2",
            "3",
            TableCell("<b>yes</b>", tone="yes"),
        ],
        [TableCell("d", link="d/index.html"), "50", "–", "4", TableCell("[bold]no[/]", tone="no")],
    ],
)


def test_markdown() -> None:
    assert TABLE.markdown().splitlines() == [
        "| Method | Personal: Accuracy (%) | Personal: Loss | Cost: Seconds | Cost: Remark |",
        "|---|---:|---:|---:|---|",
        "| a\\|b_c | **61.5 ± 2.9** | −0.2 | 3 | <b>yes</b> |",
        "| [d](d/index.html) | 50 | – | 4 | [bold]no[/] |",
    ]


def test_latex_escapes_what_has_a_meaning_there() -> None:
    text = TABLE.latex()
    assert r"\begin{tabular}{lrrrl}" in text
    assert r"a|b\_c & \textbf{61.5 $\pm$ 2.9} & $-$0.2 & 3 & <b>yes</b> \\" in text
    names, rules, heads = text.splitlines()[3:6]
    assert names.startswith(r" & \multicolumn{")
    assert r"{Personal}" in names
    assert rules.startswith(r"\cmidrule(lr){2-")
    assert heads.startswith(r"Method & Accuracy (\%) & ")


def test_csv_has_the_texts() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.csv())))
    assert rows[0] == ["Method", "Personal: Accuracy (%)", "Personal: Loss", "Cost: Seconds", "Cost: Remark"]
    assert rows[1] == ["a|b_c", "61.5 ± 2.9", "−0.2", "3", "<b>yes</b>"]


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-x", "@SUM(A1)", "\t=1", '=HYPERLINK("x")'])
def test_no_cell_is_a_formula_of_a_spreadsheet(text: str) -> None:
    (row,) = csv.reader(io.StringIO(csv_text(["name"], [[text]]).split("\n", 1)[1]))
    assert row == [f"'{text}"]


@given(st.floats() | st.integers())
def test_numbers_are_no_formulas(value: float) -> None:
    assert csv_text(["x"], [[value]]) == f"x\n{value}\n"


def test_a_page_has_groups_sorting_marks_and_links() -> None:
    page = environment().from_string('{% import "elements.html" as ui %}{{ ui.table(table) }}').render(table=TABLE)
    assert '<th colspan="2" scope="colgroup">Personal</th>' in page
    assert '<th scope="col" class="opens"><button type="button" value="1">' in page
    assert '<abbr title="Share of &#34;right&#34; answers">Accuracy</abbr>' in page
    best = '<td class="best opens" data-value="0.615">61.5 <span class="spread">± 2.9</span>'
    assert best in page
    assert '<td class="text yes">&lt;b&gt;yes&lt;/b&gt;</td>' in page
    assert f'<span class="swatch solid" style="--light:{HUES[0]};' in page
    assert '<th scope="row"><a href="d/index.html">d</a></th>' in page


def test_a_terminal_shows_texts_as_they_are() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(TABLE)
    text = console.export_text()
    for part in ("Results [1] of <all>", "Personal: Accuracy (%)", "61.5 ± 2.9", "[bold]no[/]"):
        assert part in text


def test_tables_without_groups_have_no_row_of_them() -> None:
    plain = TextTable.of("x", ["a", "b"], [["1", "2"]])
    assert plain.groups == []
    assert plain.openings == set()


def test_a_table_needs_neither_torch_nor_plotly() -> None:
    code = "import sys, kinfed.report.tables; print(sorted({'torch', 'plotly', 'jinja2'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("interval", "drawn"),
    [
        ((1.0, 2.0, 3.0), "········┊··├─●──┤"),
        ((0.01, 4.0, 8.0), "········┊├──●───┤"),  # above zero, if only just
        ((-0.01, 4.0, 8.0), "·······├┼───●───┤"),  # across it, if only just
        ((-8.0, -4.0, -0.01), "├───●──┤┊········"),
        ((-8.0, -4.0, 0.01), "├───●───┼┤·······"),
        ((-1.0, 0.0, 1.0), "├───────●───────┤"),
        ((0.0, 0.0, 0.0), "········●········"),
    ],
)
def test_a_drawn_interval_crosses_zero_if_it_does(interval: tuple[float, float, float], drawn: str) -> None:
    assert TableCell("", interval=interval).interval_text == drawn


@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=3, max_size=3))
def test_the_ends_of_a_drawn_interval_lie_on_their_side_of_zero(ends: list[float]) -> None:
    low, mean, high = sorted(ends)
    reach = max(abs(low), abs(high))
    if reach == 0 or any(0 < abs(value) / reach < 1e-5 for value in ends):  # nearer to zero than a page can draw
        return
    text = TableCell("", interval=(low, mean, high)).interval_text
    middle = len(text) // 2
    marked = [column for column, mark in enumerate(text) if mark in "├●┤"]
    assert (marked[0] < middle, marked[-1] > middle) == (low < 0, high > 0)
