"""The page of contributions, contributions.html: who gives what to whom, and who gains."""

from __future__ import annotations

from pathlib import Path

from kinfed.algorithms import ALGORITHMS
from kinfed.analysis import MetricStyle, metric_style
from kinfed.report import TableCell, TableColumn, TextTable, render
from kinfed.report import write_page as write_file
from kinfed.report.drawing import signed
from kinfed.tabular.coalitions import PAGE, Contribution, Contributions
from kinfed.version import __version__

HEADING = "Who gives and who gains"
PAIRS = (
    "A line for each giver, a column for each receiver: what the receiver gains by the giver, positive is better "
    "(Shapley values of all coalitions), with the 95 % interval of the receiver's test rows. The last line is what the "
    "receiver gains over learning alone: the sum of its column. Coloured where the interval excludes zero."
)


def write_page(result: Contributions, folder: Path) -> None:
    write_file(folder / PAGE, page(result))


def page(result: Contributions) -> str:
    title = ALGORITHMS[result.algorithm].title
    tables = [("pairs", "Who gives what to whom", PAIRS, pair_table(result))]
    return render(
        "tables.html", title=HEADING, kicker="kinfed contributions", heading=HEADING,
        links=[(name, heading) for name, heading, _, _ in tables],
        footer=[f"kinfed {__version__} · seed {result.settings['seed']} · all figures: contributions.json"],
        figures=False, notes=few_rows(result), tables=tables,
        lead=f"{title} was trained by all {2 ** len(result.sites) - len(result.sites) - 1} coalitions of "
        f"{len(result.sites)} sites. " + " ".join(sentences(result)),
    )  # fmt: skip


def sentences(result: Contributions) -> list[str]:
    """What every site gains and gives, in a sentence each."""
    style = _style(result)
    return [
        f"{name} gains {_with_interval(result.gains(name), style)} and gives the others "
        f"{_with_interval(result.gives(name), style)} on average."
        for name in result.names
    ]


def pair_table(result: Contributions) -> TextTable:
    style, group = _style(result), f"Gain in {metric_style(result.metric).noun} at"
    every = [part for one in result.sites for part in (*one.parts.values(), one.gain)]
    reach = max((max(abs(part.low), abs(part.high)) for part in every if part.error == part.error), default=0.0)
    columns = [TableColumn("Giver", "name"), *(TableColumn(name, group=group) for name in result.names)]
    columns.append(TableColumn("others, on average"))
    rows: list[list[TableCell | str]] = []
    for giver in result.names:
        cells = [
            TableCell("", tone="open") if giver == one.site else _cell(one.parts[giver], style, reach)
            for one in result.sites
        ]
        rows.append([giver, *cells, _cell(result.gives(giver), style, reach)])
    rows.append(["gain over alone", *(_cell(one.gain, style, reach) for one in result.sites), ""])
    return TextTable.of("Who gives what to whom", columns, rows)


def few_rows(result: Contributions) -> list[str]:
    few = [f"{one.site} ({one.test_rows})" for one in result.sites if one.test_rows < 50]
    return [f"Few test rows: {', '.join(few)}; read their columns with the intervals."] if few else []


def _style(result: Contributions) -> MetricStyle:
    style = metric_style(result.metric)
    return style if style.in_percent else style.for_values([one.gain.value for one in result.sites])


def _cell(part: Contribution, style: MetricStyle, reach: float) -> TableCell:
    if part.value != part.value or part.error != part.error:
        return TableCell("–", tone="open")
    tone = ("yes" if part.value > 0 else "no") if part.is_clear else "open"
    return TableCell(signed(part.value, style), tone=tone, interval=(part.low, part.value, part.high), reach=reach)


def _with_interval(part: Contribution, style: MetricStyle) -> str:
    points = " points" if style.in_percent else ""
    if part.error != part.error:
        return f"{signed(part.value, style)}{points}"
    return f"{signed(part.value, style)}{points} ({signed(part.low, style)} to {signed(part.high, style)})"
