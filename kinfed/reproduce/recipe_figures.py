"""Figures that recipes draw of what was measured: means over seeds with their deviation, against a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kinfed.report.chart import Figure, Layout, Trace, axis, escape, layout, numbers
from kinfed.report.palette import HUES, MUTED
from kinfed.report.statistics import average
from kinfed.reproduce.recipe import BySeed

_DASHES = ("solid", "dash", "dot", "dashdot")


def against(
    x: Layout,
    series: Mapping[str, Sequence[tuple[float, BySeed]]],
    above: str,
    description: str,
    *,
    factor: float = 100.0,
    unit: str = " %",
    levels: Mapping[str, float] | None = None,
) -> Figure:
    """One line per series through the means of its points (x, values by seed). `levels` are drawn across the figure."""
    data: list[Trace] = []
    for number, (name, points) in enumerate(series.items()):
        known = [(place, entry) for place, by_seed in points if (entry := average(by_seed)) is not None]
        colour, dash = HUES[number % len(HUES)], _DASHES[number // len(HUES) % len(_DASHES)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(name),
                "x": numbers(place for place, _ in known),
                "y": numbers(entry.mean * factor for _, entry in known),
                "error_y": {
                    "type": "data", "color": colour, "thickness": 1.2, "width": 3,
                    "array": numbers((entry.sd or 0.0) * factor for _, entry in known),
                },
                "line": {"color": colour, "width": 2, "dash": dash},
                "marker": {"color": colour, "size": 7},
                "hovertemplate": f"{escape(name)}, %{{x}}: %{{y:.4g}}{unit}<extra></extra>",
            }
        )  # fmt: skip
    for name, level in (levels or {}).items():
        ends = [place for points in series.values() for place, _ in points]
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": escape(name), "x": [min(ends), max(ends)],
                "y": numbers([level * factor] * 2), "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
                "hovertemplate": f"{escape(name)}: %{{y:.4g}}{unit}<extra></extra>",
            }
        )  # fmt: skip
    legend = {"orientation": "h", "y": -0.24, "font": {"size": 12, "color": MUTED}}
    shape = layout(x, axis(ticksuffix=unit, nticks=6), escape(above), showlegend=True, legend=legend)
    shape["margin"] = {**shape["margin"], "b": 86}
    return Figure(description=description, data=data, layout=shape, height=380)
