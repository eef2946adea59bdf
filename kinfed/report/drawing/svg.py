"""Still figures: what a page shows of its figures before its script has run, where scripts are off, and to programs
that only read HTML.

    still_picture(figure, 960)        an <svg> of the view that the figure begins with

Draws the marks of `kinfed.report.drawing.marks`, each as the page's script would, without what takes a pointer: no
hover, no choice of views. Colours of the palette are CSS variables (`palette_rules`), so that they follow the reader's
theme. Reads the same plotly dictionaries as the page's script (kinfed.report.drawing.chart), as far as the report uses
them.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import quantiles
from typing import Any

from markupsafe import Markup

from kinfed.report.drawing.chart import Figure, Trace, axis, layout, tick_text
from kinfed.report.drawing.looks import AXIS, DARK, GRID, HUES, INK, MUTED
from kinfed.report.drawing.marks import ramp

DASH_LENGTHS = {"dash": "8 5", "dot": "2 4", "dashdot": "8 4 2 4"}
LEVELS = 16  # of colour in a map
TICKS = 7  # about this many where the figure does not say
PADDING = 0.05  # of the range that is free on both sides


def still_picture(figure: Figure, width: int) -> Markup:
    """`width` in the unit of the figure's height: pixels, for a page on which it is as wide as that."""
    return Markup(_Still(figure, width).svg())


def palette_rules() -> Markup:
    """CSS: a variable for every colour of the palette, by theme."""
    light = ";".join(f"{css_variable(color)}:{color}" for color in DARK)
    dark = ";".join(f"{css_variable(color)}:{other}" for color, other in DARK.items())
    return Markup(f":root{{{light}}}@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}")


class _Still:
    def __init__(self, figure: Figure, width: int) -> None:
        self.traces, patched = figure.shown(figure.initial_view)
        self.layout = layout(axis(), axis(), "") | patched
        self.width, self.height = width, figure.height
        margin = self.layout["margin"]
        self.left, self.right = margin["l"], width - margin["r"]
        self.top, self.bottom = margin["t"], figure.height - margin["b"]
        self.x = make_scale(self.layout["xaxis"], self._values("x"), self.left, self.right, self._has_map("yaxis"))
        y_axes: tuple[str, ...] = ("yaxis", "yaxis2")
        self.y = {name: self._y_scale(name) for name in y_axes if name in self.layout}

    def svg(self) -> str:
        marks = (part for trace in self._stacked() for part in self._mark(trace))
        parts = [*self._axes(), *marks, *self._notes(), *self._legend()]
        return (
            f'<svg class="still" viewBox="0 0 {self.width} {self.height}" preserveAspectRatio="xMinYMin" '
            f'aria-hidden="true" font-size="{self.layout["font"]["size"]}">{"".join(parts)}</svg>'
        )

    def _values(self, letter: str, axis: str = "") -> Iterable[Any]:
        """All that is drawn along an axis; along a y axis, by its name."""
        for trace in self.traces:
            if axis and axis_name(trace) != axis:
                continue
            if trace["type"] == "heatmap":
                names = trace.get(letter) or [None]
                yield from names if isinstance(names[0], str) else cell_edges(trace, letter)
            elif letter == "y" and trace["type"] in ("box", "violin"):
                yield trace.get("y0", 0)
            else:
                yield from trace[letter]
                error = trace.get(f"error_{letter}", {}).get("array", [])
                for value, length in zip(trace[letter], error, strict=False):
                    if value is not None and length is not None:
                        yield from (value - length, value + length)
        if letter == "y":
            yield from self._sums(axis)

    def _sums(self, axis: str) -> Iterable[float]:
        """The tops of stacks, which begin at zero."""
        tops: dict[Any, float] = {}
        for trace in self.traces:
            if axis_name(trace) == axis and (trace["type"] == "bar" or "stackgroup" in trace):
                for x, y in zip(trace["x"], trace["y"], strict=True):
                    tops[x] = tops.get(x, 0.0) + (y or 0.0)
        if tops or any(trace.get("fill") == "tozeroy" for trace in self.traces):
            yield from (0.0, *tops.values())

    def _has_map(self, name: str) -> bool:
        """Tell whether a map, which fills its axes to the edge, stands at a y axis."""
        return any(trace["type"] == "heatmap" and axis_name(trace) == name for trace in self.traces)

    def _y_scale(self, name: str) -> Scale:
        shape, height = self.layout[name], self.bottom - self.top
        start, end = (self.bottom - share * height for share in shape.get("domain", (0, 1)))
        return make_scale(shape, self._values("y", name), start, end, self._has_map(name))

    def _axes(self) -> Iterable[str]:
        grid, ink = (f'stroke="{color}" style="stroke:{css_color(color)}"' for color in (GRID, AXIS))
        text = f'font-size="12" style="fill:{css_color(MUTED)}"'
        for name, scale in self.y.items():
            for pixel, label in scale.ticks:
                if self.layout[name].get("showgrid", True):
                    yield f'<path d="M{self.left} {pixel:.1f}H{self.right}" {grid}/>'
                where = f'x="{self.left - 6}" y="{pixel + 4:.1f}" text-anchor="end"'
                yield f"<text {where} {text}>{plain_text(label)}</text>"
            zero = scale.place(0.0)
            if self.layout[name].get("zeroline") and zero is not None:
                yield f'<path d="M{self.left} {zero:.1f}H{self.right}" style="stroke:{css_color(INK)}"/>'
        bottom = self.layout["xaxis"]
        for pixel, label in self.x.ticks:
            if bottom.get("showgrid"):
                yield f'<path d="M{pixel:.1f} {self.top}V{self.bottom}" {grid}/>'
            where = f'x="{pixel:.1f}" y="{self.bottom + 18}" text-anchor="middle"'
            yield f"<text {where} {text}>{plain_text(label)}</text>"
        if bottom.get("showline"):
            yield f'<path d="M{self.left} {self.bottom}H{self.right}" {ink}/>'
        title = bottom.get("title", {}).get("text", "")
        middle = (self.left + self.right) / 2
        yield f'<text x="{middle:.0f}" y="{self.bottom + 38}" text-anchor="middle" {text}>{plain_text(title)}</text>'

    def _notes(self) -> Iterable[str]:
        for entry in self.layout.get("annotations", ()):
            x, below = self.x.place(entry["x"]), self.y["yaxis"].place(entry["y"])
            if entry.get("xref") == "paper":
                x = self.left + entry["x"] * (self.right - self.left)
            if entry.get("yref") == "paper":
                below = self.bottom - entry["y"] * (self.bottom - self.top)
            if x is None or below is None or not entry["text"]:
                continue
            anchor = {"left": "start", "right": "end"}.get(entry.get("xanchor", "left"), "middle")
            shift = 4 if entry.get("yanchor") != "bottom" else -1
            font = entry.get("font", {})
            yield (
                f'<text x="{x + entry.get("xshift", 0):.1f}" y="{below + shift - entry.get("yshift", 0):.1f}" '
                f'text-anchor="{anchor}" font-size="{font.get("size", 13)}" '
                f'style="fill:{css_color(font.get("color", INK))}">{plain_text(entry["text"])}</text>'
            )

    def _legend(self) -> Iterable[str]:
        """Names of lines that are no methods, side by side below the figure; those of methods stand above it."""
        if not self.layout.get("showlegend"):
            return
        x = float(self.left)
        for trace in self.traces:
            color = trace.get("line", {}).get("color") or trace.get("marker", {}).get("color")
            if trace.get("name") and isinstance(color, str) and trace.get("showlegend", True):
                place, look = self.height - 10, f'font-size="12" style="fill:{css_color(MUTED)}"'
                yield f'<path d="M{x:.0f} {place - 4}h14" stroke-width="3" style="stroke:{css_color(color)}"/>'
                yield f'<text x="{x + 20:.0f}" y="{place}" {look}>{plain_text(trace["name"])}</text>'
                x += 36 + 7 * len(trace["name"])

    def _stacked(self) -> Iterable[Trace]:
        """Traces in their order, layers of a stack as the area between two sums: {"base": ..., "y": ...}."""
        bases: dict[tuple[str, Any], float] = {}
        for trace in self.traces:
            if trace["type"] != "bar" and "stackgroup" not in trace:
                yield trace
                continue
            low, high = [], []
            for x, y in zip(trace["x"], trace["y"], strict=True):
                sign = "-" if (y or 0) < 0 else "+"
                base = bases.get((sign, x), 0.0)
                bases[sign, x] = base + (y or 0.0)
                low.append(base)
                high.append(bases[sign, x])
            yield trace | {"base": low, "y": high}

    def _mark(self, trace: Trace) -> Iterable[str]:
        kinds = {"heatmap": self._map, "box": self._box, "violin": self._box, "bar": self._bars, "scatter": self._curve}
        return kinds[trace["type"]](trace) if trace["type"] in kinds else ()  # a stranger's mark needs the script

    def _curve(self, trace: Trace) -> Iterable[str]:
        y, line = self.y[axis_name(trace)], trace.get("line", {})
        points = [(self.x.place(a), y.place(b)) for a, b in zip(trace["x"], trace["y"], strict=True)]
        corners = stepped(without_gaps(points), line.get("shape", "linear"))
        if "stackgroup" in trace or trace.get("fill") in ("toself", "tozeroy"):
            if "stackgroup" in trace:
                floor = [(self.x.place(a), y.place(b)) for a, b in zip(trace["x"], trace["base"], strict=True)]
                corners += stepped(without_gaps(floor), line.get("shape", "linear"))[::-1]
            elif trace["fill"] == "tozeroy" and corners:
                zero = y.place(0.0) or 0.0
                corners = [(corners[0][0], zero), *corners, (corners[-1][0], zero)]
            yield f'<path d="{line_path(corners)}Z" style="fill:{css_color(trace.get("fillcolor", HUES[0]))}"/>'
        elif "lines" in trace.get("mode", "lines"):
            dash = DASH_LENGTHS.get(line.get("dash", ""), "")
            yield (
                f'<path d="{line_path(corners)}" fill="none" stroke-width="{line.get("width", 2)}"'
                + (f' stroke-dasharray="{dash}"' if dash else "")
                + f' style="stroke:{css_color(line.get("color", HUES[0]))}"/>'
            )
        yield from self._errors(trace, y)
        if "markers" in trace.get("mode", ""):
            yield from self._dots(points, {"color": HUES[0]} | trace.get("marker", {}))

    def _dots(self, points: Iterable[tuple[float | None, float | None]], marker: dict[str, Any]) -> Iterable[str]:
        every, colors = list(points), marker["color"]
        each = colors if isinstance(colors, (list, tuple)) else [colors] * len(every)
        spots: dict[str, list[str]] = {}
        for (x, y), color in zip(every, each, strict=True):
            if x is not None and y is not None:
                spots.setdefault(color, []).append(f"M{x:.1f} {y:.1f}h0")
        look = f'stroke-linecap="round" stroke-width="{marker.get("size", 6):g}"'
        for color, places in spots.items():
            yield f'<path d="{"".join(places)}" {look} style="stroke:{css_color(color)}"/>'

    def _errors(self, trace: Trace, y: Scale) -> Iterable[str]:
        bars = []
        for letter in ("y", "x"):
            lengths = trace.get(f"error_{letter}", {}).get("array", ())
            for a, b, length in zip(trace["x"], trace["y"], lengths, strict=False):
                x, height = self.x.place(a), y.place(b)
                if x is None or height is None or length is None:
                    continue
                if letter == "y":
                    bars.append(f"M{x:.1f} {y.place(b - length):.1f}V{y.place(b + length):.1f}")
                else:
                    bars.append(f"M{self.x.place(a - length):.1f} {height:.1f}H{self.x.place(a + length):.1f}")
        if bars:
            yield f'<path d="{"".join(bars)}" style="stroke:{css_color(INK)}"/>'

    def _bars(self, trace: Trace) -> Iterable[str]:
        y = self.y[axis_name(trace)]
        numbers = [self.x.number(value) for value in trace["x"]]
        width = trace.get("width") or 0.8 * least_distance(numbers)
        colors = trace.get("marker", {}).get("color", HUES[0])
        each = [colors] * len(numbers) if isinstance(colors, str) else list(colors)
        shapes: dict[str, list[str]] = {}
        for number, low, high, color in zip(numbers, trace["base"], trace["y"], each, strict=True):
            ends = y.place(low), y.place(high)
            if number is None or ends[0] is None or ends[1] is None:
                continue
            left, right = self.x.pixel(number - width / 2), self.x.pixel(number + width / 2)
            shapes.setdefault(color, []).append(f"M{left:.1f} {ends[0]:.1f}H{right:.1f}V{ends[1]:.1f}H{left:.1f}Z")
        return [f'<path d="{"".join(paths)}" style="fill:{css_color(color)}"/>' for color, paths in shapes.items()]

    def _map(self, trace: Trace) -> Iterable[str]:
        y, z = self.y[axis_name(trace)], trace["z"]
        columns, rows = (
            [s.pixel(edge) for edge in cell_edges(trace, letter)] for s, letter in ((self.x, "x"), (y, "y"))
        )
        values = [value for row in z for value in row if value is not None]
        low, high = trace.get("zmin", min(values, default=0.0)), trace.get("zmax", max(values, default=1.0))
        paths: dict[int, list[str]] = {}
        for (top, bottom), line in zip(pairwise(rows), z, strict=True):
            for (left, right), value in zip(pairwise(columns), line, strict=True):
                if value is not None:
                    share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
                    level = round(share * (LEVELS - 1))
                    paths.setdefault(level, []).append(f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}Z")
        for level, squares in sorted(paths.items()):
            color = color_at(trace.get("colorscale") or ramp(), level / (LEVELS - 1))
            yield f'<path d="{"".join(squares)}" style="fill:{color}"/>'

    def _box(self, trace: Trace) -> Iterable[str]:
        values = sorted(value for value in trace["x"] if value is not None)
        if not values:
            return
        y, color, row = self.y[axis_name(trace)], trace.get("line", {}).get("color", HUES[0]), trace.get("y0", 0)
        first, middle, third = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        top, bottom = y.pixel(row - 0.21), y.pixel(row + 0.21)
        left, centre, right = (self.x.pixel(value) for value in (first, middle, third))
        ends = f"M{self.x.pixel(values[0]):.1f} {y.pixel(row):.1f}H{self.x.pixel(values[-1]):.1f}"
        box = f"M{left:.1f} {top:.1f}H{right:.1f}V{bottom:.1f}H{left:.1f}ZM{centre:.1f} {top:.1f}V{bottom:.1f}"
        look = f"fill:{css_color(trace.get('fillcolor', '#ffffff00'))};stroke:{css_color(color)}"
        yield f'<path d="{ends}{box}" stroke-width="1.5" style="{look}"/>'
        if trace["type"] == "box":
            marker = {"color": color} | trace.get("marker", {})
            # Spread over the height of the box by position: the same picture every time.
            spots = [(self.x.pixel(v), y.pixel(row + 0.36 * ((i * 0.618) % 1 - 0.5))) for i, v in enumerate(trace["x"])]
            yield from self._dots(spots, marker)


@dataclass(frozen=True)
class Scale:
    """The map from values to pixels. `low` and `high` are where the axis starts and ends: logarithms on a logarithmic
    axis, places in `categories` where values are texts; low > high on a reversed axis."""

    low: float
    high: float
    start: float  # pixel of `low`
    end: float  # pixel of `high`
    logarithmic: bool = False
    categories: tuple[str, ...] = ()
    ticks: tuple[tuple[float, str], ...] = ()  # pixel and text

    def number(self, value: Any) -> float | None:
        """The value in the unit of `low`; None for what has no place on this axis."""
        if self.categories:
            return float(self.categories.index(value)) if value in self.categories else None
        if value is None or isinstance(value, str) or not math.isfinite(value):
            return None
        if self.logarithmic:
            return math.log10(value) if value > 0 else None
        return float(value)

    def pixel(self, number: float) -> float:
        span = self.high - self.low
        share = (number - self.low) / span if span else 0.5
        return self.start + share * (self.end - self.start)

    def place(self, value: Any) -> float | None:
        number = self.number(value)
        return None if number is None else self.pixel(number)


def make_scale(axis: dict[str, Any], values: Iterable[Any], start: float, end: float, tight: bool = False) -> Scale:
    """`values`: all that is drawn along the axis. tight: a map fills its axis to the edge."""
    present = [value for value in values if value is not None]
    texts = tuple(dict.fromkeys(value for value in present if isinstance(value, str)))
    logarithmic = axis.get("type") == "log"
    if texts:
        low, high = -0.5, len(texts) - 0.5
    else:
        low, high = _span([float(value) for value in present if math.isfinite(value)], axis, logarithmic, tight)
    if "range" in axis:
        low, high = axis["range"]
    elif axis.get("autorange") == "reversed":
        low, high = high, low
    bare = Scale(low, high, start, end, logarithmic, texts)
    return replace(bare, ticks=tuple(_ticks(axis, bare)))


def _span(values: Sequence[float], axis: dict[str, Any], logarithmic: bool, tight: bool) -> tuple[float, float]:
    if logarithmic:
        values = [math.log10(value) for value in values if value > 0]
    if axis.get("rangemode") == "tozero" and not logarithmic:
        values = [*values, 0.0]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if tight:
        return low, high
    padding = PADDING * (high - low) or 0.5 * abs(high) or 0.5
    from_zero = axis.get("rangemode") == "tozero"
    return low if from_zero and low == 0 else low - padding, high if from_zero and high == 0 else high + padding


def _ticks(axis: dict[str, Any], scale: Scale) -> Iterable[tuple[float, str]]:
    if axis.get("showticklabels") is False:
        return
    if "tickvals" in axis:
        texts = axis.get("ticktext") or [tick_text(value) for value in axis["tickvals"]]
        numbers = [(scale.number(value), text) for value, text in zip(axis["tickvals"], texts, strict=True)]
    elif scale.categories:
        numbers = [(float(place), name) for place, name in enumerate(scale.categories)]
    else:
        nice = nice_numbers(min(scale.low, scale.high), max(scale.low, scale.high), axis.get("nticks", TICKS))
        numbers = [(value, tick_text(10**value if scale.logarithmic else value)) for value in nice]
    low, high = sorted((scale.low, scale.high))
    for number, text in numbers:
        if number is not None and low <= number <= high:
            yield scale.pixel(number), text


def nice_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers, at most `most` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def css_variable(color: str) -> str:
    return f"--k{color[1:]}"


def css_color(color: str) -> str:
    """A colour of a figure, "#rrggbb" or "#rrggbbaa", in the reader's theme."""
    base, alpha = color[:7], color[7:9]
    themed = f"var({css_variable(base)})" if base in DARK else base
    return f"color-mix(in srgb,{themed} {100 * int(alpha, 16) / 255:.0f}%,transparent)" if alpha else themed


def axis_name(trace: Trace) -> str:
    return "yaxis2" if trace.get("yaxis") == "y2" else "yaxis"


def cell_edges(trace: Trace, letter: str) -> list[Any]:
    """Edges of the cells of a map along an axis: as given, around given middles, or around whole numbers."""
    count = len(trace["z"][0]) if letter == "x" else len(trace["z"])
    centers = trace.get(letter)
    if centers is not None and len(centers) == count + 1:
        return list(centers)
    if centers is None or isinstance(centers[0], str):
        return [place - 0.5 for place in range(count + 1)]
    half = least_distance(list(centers)) / 2
    return [centers[0] - half, *((a + b) / 2 for a, b in pairwise(centers)), centers[-1] + half]


def least_distance(numbers: Sequence[float | None]) -> float:
    ordered = sorted({number for number in numbers if number is not None})
    return min((b - a for a, b in pairwise(ordered)), default=1.0)


def without_gaps(points: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if x is not None and y is not None]


def stepped(points: list[tuple[float, float]], shape: str) -> list[tuple[float, float]]:
    """Corners between points: hv goes sideways first, hvh half of the way."""
    if shape == "linear":
        return points
    corners = points[:1]
    for (a, b), (c, d) in pairwise(points):
        turn = c if shape == "hv" else (a + c) / 2
        corners += [(turn, b), (turn, d), (c, d)]
    return corners


def line_path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def color_at(scale: Sequence[Sequence[Any]], share: float) -> str:
    """The colour of a scale [[share, colour], ...] at this share."""
    for (low, first), (high, second) in pairwise(scale):
        if share <= high:
            part = 100 * (share - low) / (high - low) if high > low else 100.0
            return f"color-mix(in srgb,{css_color(second)} {part:.0f}%,{css_color(first)})"
    return css_color(scale[-1][1])


def plain_text(text: str) -> str:
    """Plotly's texts have tags and entities; what is left is escaped again."""
    return html.escape(html.unescape(re.sub(r"<[^>]*>", " ", text)))
