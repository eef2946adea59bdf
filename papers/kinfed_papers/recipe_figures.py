"""Figures that recipes draw of what was measured, and of ours beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, product

from kinfed.analysis import average
from kinfed.report.drawing import (
    HUES,
    MUTED,
    Figure,
    Layout,
    Style,
    Trace,
    View,
    axis,
    dots,
    escape,
    in_view,
    layout,
    level,
    line,
    y_title,
)
from kinfed_papers.recipe import BySeed
from kinfed_papers.result_tables import FilledTable

_LETTERS_IN_A_ROW = 130  # of a legend below a figure


def line_chart(
    x: Layout,
    series: Mapping[str, Sequence[tuple[float, BySeed]]],
    above: str,
    description: str,
    *,
    factor: float = 100.0,
    unit: str = " %",
    levels: Mapping[str, float] | None = None,
    styles: Sequence[Style] | None = None,
    from_zero: bool = False,
) -> Figure:
    """One line per series through the means over seeds of its points (x, values by seed), with their deviations.

    x: the axis; above: what y is; factor: from the stored to the shown unit; levels: values drawn across the figure;
    styles: of the lines, in the order of the series.
    """
    looks = cycle((hue, dash, "circle") for dash, hue in product(("solid", "dash", "dot", "dashdot"), HUES))
    if styles is not None:
        looks = cycle((style.color, style.dash, style.symbol) for style in styles)
    data: list[Trace] = []
    for (name, points), (color, dash, symbol) in zip(series.items(), looks, strict=False):
        means = [(place, entry) for place, by_seed in points if (entry := average(by_seed)) is not None]
        trace = line(
            [place for place, _ in means],
            [entry.mean * factor for _, entry in means],
            color,
            f"{escape(name)}, %{{x}}: %{{y:.4g}}{unit}",
            name=name,
            dash=dash,
            dots=True,
            symbol=symbol,
            size=7,
            error=[(entry.sd or 0.0) * factor for _, entry in means],
        )
        if "error_y" in trace:
            trace["error_y"]["color"] = color  # lines lie close together: whose spread is it?
        data.append(trace)
    ends = [place for points in series.values() for place, _ in points]
    for name, value in (levels or {}).items():
        hover = f"{escape(name)}: %{{y:.4g}}{unit}"
        data.append(level((min(ends), max(ends)), value * factor, MUTED, hover, name))
    y = axis(ticksuffix=unit, nticks=6, **({"rangemode": "tozero"} if from_zero else {}))
    shape = layout(x, y, escape(above), legend_below=True)
    rows = math.ceil(sum(len(name) + 10 for name in (*series, *(levels or {}))) / _LETTERS_IN_A_ROW)
    shape["margin"] = {**shape["margin"], "b": 64 + 22 * rows}
    return Figure(description, data, shape, height=358 + 22 * rows)


def beside_published(table: FilledTable) -> Figure | None:
    """A dot for ours and a ring for the paper's, row by row; one view for every column that the paper has too."""
    names = [escape(name) for name, _ in table.rows]
    data: list[Trace] = []
    views: list[View] = []
    for number, column in enumerate(table.columns):
        if not table.is_published(number):
            continue
        views.append(View(column.heading, column.heading, y_title(escape(column.heading))))
        cells = [row[number] for _, row in table.rows]
        published = [None if cell.published is None else cell.published.value for cell in cells]
        ours = [None if cell.ours is None else cell.ours.mean * column.factor for cell in cells]
        spread = [0.0 if cell.ours is None else (cell.ours.sd or 0.0) * column.factor for cell in cells]
        rings = dots(
            published,
            names,
            MUTED,
            "%{y}, paper: %{x:.4g}",
            name="paper",
            symbol="circle-open",
            size=11,
            outline={"width": 2},
        )
        discs = dots(ours, names, HUES[0], "%{y}, ours: %{x:.4g}", name="ours", size=10, error_x=spread)
        data += in_view(column.heading, [rings, discs])
    if not views:
        return None
    return Figure(
        description="Ours beside the paper's, for every method.",
        data=data,
        layout=layout(axis(), axis(autorange="reversed"), escape(views[0].label)),
        height=90 + 26 * len(names),
        views=tuple(views),
    )
