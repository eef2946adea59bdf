"""The parts that all figures are made of. Figures are plain plotly dictionaries; the page draws them.

A trace may carry `meta`: {"method": index} lets the legend switch it, {"view": key} shows it only while that view is
chosen. All text that comes from outside passes through `safe`, because plotly reads tags in text.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinfed.report.comparison import Method
from kinfed.report.palette import AXIS, GRID, INK, MUTED

Trace = dict[str, Any]
Layout = dict[str, Any]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

MAX_POINTS_OF_A_CURVE = 400


@dataclass(frozen=True)
class View:
    """One choice of what a figure shows."""

    key: str
    label: str
    patch: dict[str, Any] = field(default_factory=dict)  # of the layout, by path: {"xaxis.tickvals": [...]}


@dataclass(frozen=True)
class Figure:
    description: str  # what a screen reader says in place of the picture
    data: list[Trace]
    layout: Layout
    height: int = 380
    views: tuple[View, ...] = ()
    chosen: str | None = None  # the view shown first, if not the first of them
    methods: tuple[Method, ...] = field(default=())  # listed in a legend if given


def safe(text: str) -> str:
    return html.escape(text, quote=False)


def short(text: str, limit: int = 18) -> str:
    """Safe for plotly, and no longer than an axis can take."""
    return safe(text if len(text) <= limit else text[: limit - 1] + "…")


def client_label(name: str) -> str:
    """Safe for plotly; a client that is only a number is called one."""
    return f"client {name}" if name.isdecimal() else safe(name)


def numbers(values: Iterable[float | None], scale: float = 1.0) -> list[float | None]:
    """JSON has no NaN; six significant digits are finer than any screen."""
    return [float(f"{v * scale:.6g}") if v is not None and math.isfinite(v) else None for v in values]


def axis(title: str = "", **more: Any) -> Layout:
    base: Layout = {
        "title": {"text": title, "font": {"size": 13, "color": MUTED}, "standoff": 8},
        "gridcolor": GRID,
        "linecolor": AXIS,
        "tickcolor": AXIS,
        "tickfont": {"size": 12, "color": MUTED},
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,  # a finger that scrolls the page must not zoom the figure
    }
    return base | more


def log_axis(title: str, low: float, high: float) -> Layout:
    """From low to high, labelled at 1, 2, 5, 10, ... or, over many decades, at powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low / 1.3 <= tick <= high * 1.3]
    margin = 0.04 * math.log10(high / low) + 0.01
    return axis(
        f"{title} (logarithmic)",
        type="log",
        range=[math.log10(low) - margin, math.log10(high) + margin],
        tickvals=ticks,
        ticktext=[f"{tick:,.6g}".replace(",", "\u202f") for tick in ticks],
    )


def y_title(text: str) -> dict[str, Any]:
    """The patch by which a view replaces the title of the y axis."""
    return {"annotations.0.text": text}


def layout(x: Layout, y: Layout, above: str, **more: Any) -> Layout:
    """The title of the y axis stands above it, upright, where it is read first and takes no width."""
    base: Layout = {
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 44, "r": 16, "t": 30, "b": 46},
        "showlegend": False,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": AXIS, "activecolor": MUTED},
        "hovermode": "closest",
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left"},
        "xaxis": {"showgrid": False, "ticks": "outside", "showline": True} | x,
        "yaxis": y,
        "annotations": [
            {
                "text": above,
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": 1,
                "xanchor": "left",
                "yanchor": "bottom",
                "yshift": 8,
                "showarrow": False,
                "font": {"size": 13, "color": MUTED},
            }
        ],
    }
    return base | more


def thinned(values: Sequence[Any], limit: int = MAX_POINTS_OF_A_CURVE) -> list[Any]:
    """Every k-th entry, and the last one always."""
    step = math.ceil(len(values) / limit)
    kept = list(values[::step]) if step > 1 else list(values)
    return kept if not values or (len(values) - 1) % max(step, 1) == 0 else [*kept, values[-1]]


@dataclass(frozen=True)
class CurvePoint:
    x: float
    mean: float
    sd: float | None


def curve(method: Method, x: list[float], mean: list[float], sd: list[float | None], hover: str) -> list[Trace]:
    """A line through the means over seeds, with a band of one standard deviation where there are several."""
    points = thinned([CurvePoint(*point) for point in zip(x, mean, sd, strict=True)])
    meta = {"method": method.index}
    traces: list[Trace] = []
    banded = [p for p in points if p.sd is not None and math.isfinite(p.mean)]
    if any(p.sd for p in banded):
        upper = [p.mean + (p.sd or 0.0) for p in banded]
        lower = [p.mean - (p.sd or 0.0) for p in banded]
        traces.append(
            {
                "type": "scatter",
                "x": numbers([p.x for p in banded] + [p.x for p in reversed(banded)]),
                "y": numbers(upper + lower[::-1]),
                "mode": "lines",
                "line": {"width": 0},
                "fill": "toself",
                "fillcolor": method.style.faded(0.13),
                "hoverinfo": "skip",
                "name": safe(method.label),
                "meta": meta,
            }
        )
    spread = [f" ± {p.sd:.2g}" if p.sd is not None else "" for p in points]
    traces.append(
        {
            "type": "scatter",
            "x": numbers(p.x for p in points),
            "y": numbers(p.mean for p in points),
            "customdata": spread,
            "mode": "lines+markers" if len(points) <= 25 else "lines",
            "line": {"color": method.style.color, "width": 2, "dash": method.style.dash},
            "marker": {"color": method.style.color, "symbol": method.style.symbol, "size": 6},
            "hovertemplate": hover,
            "name": safe(method.label),
            "meta": meta,
        }
    )
    return traces
