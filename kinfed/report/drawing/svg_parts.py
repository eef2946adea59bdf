"""Parts of still figures: scales and ticks of axes, colours in the reader's theme, corners of lines, plain text.

Reads the same plotly dictionaries as the page's script (kinfed.report.drawing.chart), as far as the report uses them.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kinfed.report.drawing.chart import Trace, tick_text
from kinfed.report.drawing.palette import DARK

TICKS = 7  # about this many where the figure does not say
PADDING = 0.05  # of the range that is free on both sides


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
    given = trace.get(letter)
    if given is not None and len(given) == count + 1:
        return list(given)
    if given is None or isinstance(given[0], str):
        return [place - 0.5 for place in range(count + 1)]
    half = least_distance(list(given)) / 2
    return [given[0] - half, *((a + b) / 2 for a, b in pairwise(given)), given[-1] + half]


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
