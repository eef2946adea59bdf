"""Marks: the few kinds of drawing that figures are composed of, each as one plotly trace.

    figure = Figure(
        "Accuracy over rounds.",
        [band(x, low, high, color), line(x, y, color, "round %{x}: %{y:.1f} %", name="Ditto", dots=True)],
        layout(axis("Round"), axis(), "Accuracy, %"),
    )

`hover` is plotly's template of what pointing at a mark says; `%{text}` and `%{customdata}` in it stand for the entries
of `text` and `details`. Names are escaped here; texts from outside within `hover`, `text` and `details` pass through
`chart.escape` first. Colours come from `kinfed.report.drawing.looks`, so that they follow the reader's light or dark
theme.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from kinfed.analysis import Average, Method
from kinfed.report.drawing.chart import Trace, escape, numbers, subsampled
from kinfed.report.drawing.looks import HEAT_HIGH, HEAT_LOW, INK, MUTED, SURFACE, faded, style_of

MAX_DOTTED = 25  # points of a line that are marked one by one
MAX_GAPPED = 60  # rows or columns of a map with a gap between them

Coordinates = Iterable[float | None] | Sequence[str]


def _trace(kind: str, hover: str, name: str, **more: Any) -> Trace:
    pointing = {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    return {"type": kind, **pointing, "name": escape(name)} | {key: v for key, v in more.items() if v is not None}


def _coordinates(values: Coordinates) -> list[Any]:
    entries = list(values)
    return entries if entries and isinstance(entries[0], str) else numbers(entries)  # type: ignore[arg-type]  # mixed


def line(
    x: Coordinates, y: Coordinates, color: str, hover: str, *, name: str = "", width: float = 2, dash: str = "solid",
    shape: str = "linear", dots: bool = False, symbol: str = "circle", size: float = 6,
    text: Sequence[str] | None = None, details: Sequence[Any] | None = None, error: Iterable[float] | None = None,
) -> Trace:  # fmt: skip
    """dots: mark the points too, while they are few; a line of one point is a dot in any case.
    error: half the length of a bar through each point."""
    xs, ys = _coordinates(x), _coordinates(y)
    marked = len(xs) <= (MAX_DOTTED if dots else 1)
    return _trace(
        "scatter", hover, name, x=xs, y=ys, text=text, customdata=details, error_y=_error(error),
        mode="lines+markers" if marked else "lines",
        line={"color": color, "width": width, "dash": dash, "shape": shape},
        marker={"color": color, "symbol": symbol, "size": size} if marked else None,
    )  # fmt: skip


def dots(
    x: Coordinates, y: Coordinates, color: str, hover: str, *, name: str = "", size: float = 7, symbol: str = "circle",
    text: Sequence[str] | None = None, error: Iterable[float] | None = None, error_x: Iterable[float] | None = None,
    outline: dict[str, Any] | None = None,
) -> Trace:  # fmt: skip
    marker = {"color": color, "size": size, "symbol": symbol} | ({"line": outline} if outline else {})
    return _trace(
        "scatter", hover, name, x=_coordinates(x), y=_coordinates(y), text=text, mode="markers", marker=marker,
        error_y=_error(error), error_x=_error(error_x),
    )  # fmt: skip


def _error(lengths: Iterable[float] | None) -> dict[str, Any] | None:
    array = None if lengths is None else numbers(lengths)
    return {"type": "data", "array": array, "color": INK, "thickness": 1, "width": 3} if array and any(array) else None


def level(ends: tuple[float, float], y: float, color: str, hover: str, name: str = "") -> Trace:
    """A dotted line across the figure."""
    return line(ends, (y, y), color, hover, name=name, dash="dot")


def method_level(method: Method, ends: tuple[float, float], y: float, hover: str) -> Trace:
    """A dotted line in the method's colour, switched by the legend."""
    return of_method(method, [level(ends, y, style_of(method).color, hover, method.label)])[0]


def band(x: Sequence[float], low: Sequence[float], high: Sequence[float], color: str, name: str = "") -> Trace:
    """The area between two curves."""
    return _trace(
        "scatter", "", name, x=numbers([*x, *reversed(x)]), y=numbers([*high, *reversed(low)]), mode="lines",
        line={"width": 0}, fill="toself", fillcolor=color,
    )  # fmt: skip


def area(x: Coordinates, y: Coordinates, color: str, hover: str, name: str = "") -> Trace:
    """The area between a stepped curve and zero."""
    outline = {"width": 0, "shape": "hvh"}
    filled = {"fill": "tozeroy", "fillcolor": color, "mode": "lines", "line": outline}
    return _trace("scatter", hover, name, x=_coordinates(x), y=_coordinates(y), **filled)


def stacked(
    x: Sequence[float], y: Iterable[float], color: str, hover: str, name: str = "", shape: str = "linear"
) -> Trace:
    """One layer of a stack of areas; of bars where x is a single value, as an area over it has no width."""
    if len(x) == 1:
        return bars(x, y, color, hover, name=name)
    outline = {"width": 0.5, "color": color[:7], "shape": shape}
    filled = {"stackgroup": "all", "fillcolor": color, "mode": "lines", "line": outline}
    return _trace("scatter", hover, name, x=numbers(x), y=numbers(y), **filled)


def bars(
    x: Coordinates, y: Coordinates, color: str | Sequence[str], hover: str, *, name: str = "",
    width: float | None = None, text: Sequence[str] | None = None, yaxis: str | None = None,
) -> Trace:  # fmt: skip
    return _trace(
        "bar", hover, name, x=_coordinates(x), y=_coordinates(y), width=width, text=text, textposition="none",
        marker={"color": color}, yaxis=yaxis,
    )  # fmt: skip


def heat(
    z: Sequence[Sequence[float | None]], hover: str, *, colors: list[list[Any]] | None = None,
    x: Sequence[Any] | None = None, y: Sequence[Any] | None = None, low: float | None = None,
    high: float | None = None, details: Sequence[Sequence[Any]] | None = None, colorbar: str = "",
    numerals: str = "",
) -> Trace:  # fmt: skip
    """A map of coloured squares; None is left empty. colorbar: its title, above the map on the right; none without.
    numerals: plotly's format of numbers written into the squares."""
    return _trace(
        "heatmap", hover, "", x=x, y=y, z=[numbers(row) for row in z], zmin=low, zmax=high, customdata=details,
        colorscale=colors or ramp(), showscale=bool(colorbar), colorbar=_colorbar(colorbar) if colorbar else None,
        xgap=int(len(z[0]) <= MAX_GAPPED), ygap=int(len(z) <= MAX_GAPPED), hoverongaps=False,
        texttemplate=f"%{{z:{numerals}}}" if numerals else None, textfont={"size": 12} if numerals else None,
    )  # fmt: skip


def ramp(middle: float = 0.5) -> list[list[Any]]:
    """The scale from the empty colour to the strongest; `middle` is where the light one stands."""
    return [[0, SURFACE], [middle, HEAT_LOW], [1, HEAT_HIGH]]


def flat(colors: Sequence[str]) -> list[list[Any]]:
    """A colour for each whole number from 0, in a map from low -0.5 to high len(colors) - 0.5."""
    return [[(i + edge) / len(colors), color] for i, color in enumerate(colors) for edge in (0, 1)]


def _colorbar(title: str) -> dict[str, Any]:
    return {
        "title": {"text": title, "side": "top", "font": {"size": 12, "color": MUTED}},
        **{"orientation": "h", "thickness": 8, "len": 150, "lenmode": "pixels", "outlinewidth": 0, "nticks": 4},
        **{"x": 1, "xanchor": "right", "xpad": 34, "y": 1, "yanchor": "bottom", "ypad": 2},
        "tickfont": {"size": 11, "color": MUTED},
    }


def spread(values: Iterable[float], row: float, color: str, *, name: str = "", text: Sequence[str] | None) -> Trace:
    """A row of values: a dot for each, which says its text, around a box of the middle half; without texts, for many
    values, the shape of their distribution."""
    look: Trace = {"line": {"color": color, "width": 1.5}, "fillcolor": faded(color, 0.14), "orientation": "h"}
    if text is None:
        shape = {"width": 0.56, "points": False, "box": {"visible": True, "width": 0.2}, "spanmode": "hard"}
        return _trace("violin", "", name, x=numbers(values), y0=row, **look, **shape)
    points = {"boxpoints": "all", "jitter": 0.9, "pointpos": 0, "marker": {"color": faded(color, 0.62), "size": 5}}
    box = {"width": 0.42, "whiskerwidth": 0, "hoveron": "points"}
    return _trace("box", "%{x:.1f} %<br>%{text}", name, x=numbers(values), y0=row, text=text, **look, **points, **box)


def in_view(view: str, traces: Iterable[Trace]) -> list[Trace]:
    """The traces, shown only while the view is chosen."""
    return [trace | {"meta": trace.get("meta", {}) | {"view": view}} for trace in traces]


def of_method(method: Method, traces: Iterable[Trace]) -> list[Trace]:
    """The traces, switched by the legend's entry of the method."""
    return [trace | {"meta": trace.get("meta", {}) | {"method": method.index}} for trace in traces]


def curve(method: Method, points: Iterable[tuple[float, Average]], hover: str) -> list[Trace]:
    """A line in the method's look through means over seeds, (x, average) each, with a band of one standard deviation
    with several seeds. `%{customdata}` in `hover` stands for the deviation."""
    sample: list[tuple[float, Average]] = subsampled(list(points))
    look = style_of(method)
    traces: list[Trace] = []
    wide = [(x, y.mean, y.sd) for x, y in sample if y.sd is not None and math.isfinite(y.mean)]
    if any(sd for _, _, sd in wide):
        low, high = [mean - sd for _, mean, sd in wide], [mean + sd for _, mean, sd in wide]
        traces.append(band([x for x, _, _ in wide], low, high, look.faded(0.13), method.label))
    traces.append(
        line(
            [x for x, _ in sample], [y.mean for _, y in sample], look.color, hover, name=method.label, dash=look.dash,
            symbol=look.symbol, dots=True, details=[f" ± {y.sd:.2g}" if y.sd is not None else "" for _, y in sample],
        )
    )  # fmt: skip
    return of_method(method, traces)
