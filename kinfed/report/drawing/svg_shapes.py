"""What still figures are drawn with: colours in the reader's theme, corners of lines, edges of cells, plain text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from kinfed.report.drawing.chart import Trace
from kinfed.report.drawing.palette import DARK

TAGS = re.compile(r"<[^>]*>")


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
    """Of the cells of a map along an axis: as given, around given middles, or around whole numbers."""
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
    return html.escape(html.unescape(TAGS.sub(" ", text)))
