"""Figures: what is drawn (traces, see `kinfed.report.drawing.marks`), its axes and layout, and the views a reader may
choose.

A figure holds plain plotly dictionaries; the page draws them. A trace may carry `meta`: {"method": index} lets the
legend switch it, {"view": key} shows it only while that view is chosen. All text that comes from outside passes
through `escape`, because plotly reads tags in text.
"""

import copy
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinfed.analysis import Method
from kinfed.report.drawing.looks import AXIS, GRID, INK, MUTED

Trace = dict[str, Any]
Layout = dict[str, Any]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
CLEAR = "rgba(0,0,0,0)"

MAX_POINTS_OF_A_CURVE = 400
MAX_NAMED_ROUNDS = 6


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
    initial: str | None = None  # key of the view to begin with; None: the first
    methods: tuple[Method, ...] = ()  # entries of a legend above the figure

    @property
    def initial_view(self) -> str | None:
        return self.initial or (self.views[0].key if self.views else None)

    def shown(self, view: str | None) -> tuple[list[Trace], Layout]:
        """The traces of a view, or all for None, and the layout with the view's patch."""
        patched = copy.deepcopy(self.layout)
        for path, value in (entry for one in self.views if one.key == view for entry in one.patch.items()):
            *keys, last = (int(key) if key.isdecimal() else key for key in path.split("."))
            place: Any = patched
            for key in keys:
                place = place[key]
            place[last] = value
        traces = [trace for trace in self.data if view is None or trace.get("meta", {}).get("view") in (None, view)]
        return traces, patched

    @property
    def payload(self) -> dict[str, Any]:
        """The values that the page's script draws."""
        views = [{"key": view.key, "patch": view.patch} for view in self.views]
        shape = {"data": self.data, "layout": self.layout, "height": self.height}
        return shape | {"views": views, "view": self.initial_view}


def escape(text: str) -> str:
    return html.escape(text, quote=False)


def short(text: str, limit: int = 18) -> str:
    """Escaped for plotly, and no longer than an axis can take."""
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


def client_label(name: str) -> str:
    """Escaped for plotly; a client that is only a number is called one."""
    return f"client {name}" if name.isdecimal() else escape(name)


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """Values for JSON, which has no NaN; six significant digits are finer than any screen. Whole numbers stay."""
    return [_number(value) for value in values]


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def tick_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.6g}".replace(",", "\u202f")


def subsampled(values: Sequence[Any], limit: int = MAX_POINTS_OF_A_CURVE) -> list[Any]:
    """Every k-th entry, and the last one always."""
    step = max(math.ceil(len(values) / limit), 1)
    subset = list(values[::step])
    return subset if not values or (len(values) - 1) % step == 0 else [*subset, values[-1]]


def axis(title: str = "", **more: Any) -> Layout:
    base: Layout = {
        "title": {"text": title, "font": {"size": 13, "color": MUTED}, "standoff": 8},
        **{"gridcolor": GRID, "linecolor": AXIS, "tickcolor": AXIS, "tickfont": {"size": 12, "color": MUTED}},
        **{"zeroline": False, "automargin": True},
        "fixedrange": True,  # a finger that scrolls the page must not zoom the figure
    }
    return base | more


def log_axis(title: str, low: float, high: float) -> Layout:
    """The axis from low to high, labelled at 1, 2, 5, 10, ... or, over many decades, at powers of ten."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low / 1.3 <= tick <= high * 1.3]
    margin = 0.04 * math.log10(high / low) + 0.01
    return axis(
        f"{title} (logarithmic)", type="log", range=[math.log10(low) - margin, math.log10(high) + margin],
        tickvals=ticks, ticktext=[tick_text(tick) for tick in ticks],
    )  # fmt: skip


def round_axis(rounds: Iterable[float], title: str = "Round") -> Layout:
    """The axis of these rounds, which are labelled one by one while they are few: there is no round 2.5."""
    each = sorted(set(rounds))
    return axis(title, tickvals=each) if len(each) <= MAX_NAMED_ROUNDS else axis(title)


def size_axis(sizes: Iterable[int]) -> Layout:
    """The axis of clients by the number of their training examples; logarithmic where sizes differ much."""
    title, positive = "Training examples of the client", [size for size in sizes if size > 0]
    wide = bool(positive) and max(positive) > 8 * min(positive)
    return log_axis(title, min(positive), max(positive)) if wide else axis(title)


def group_ticks(groups: Sequence[int], names: Sequence[str] | None, places: Sequence[float]) -> Layout:
    """Names of groups in the middle of their members, for an axis along which members of a group are neighbours.

    groups: of the member at each of the places along the axis; names: of the groups.
    """
    by_group: dict[int, list[float]] = {}
    for group, place in zip(groups, places, strict=True):
        by_group.setdefault(group, []).append(place)
    return {
        "tickvals": [(members[0] + members[-1]) / 2 for members in by_group.values()],
        "ticktext": [short(group_name(names, group)) for group in by_group],
    }


def group_name(names: Sequence[str] | None, group: int) -> str:
    return names[group] if names is not None and 0 <= group < len(names) else f"group {group}"


def y_title(text: str) -> dict[str, Any]:
    """The patch by which a view replaces the title of the y axis."""
    return {"annotations.0.text": text}


def layout(x: Layout, y: Layout, above: str, legend_below: bool = False, **more: Any) -> Layout:
    """The title of the y axis stands above it, upright, where it is read first and takes no width.

    legend_below: plotly's own legend, for figures whose lines are no methods.
    """
    muted = {"size": 13, "color": MUTED}
    base: Layout = {
        **{"font": {"family": FONT, "size": 13, "color": INK}, "paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR},
        **{"margin": {"l": 44, "r": 16, "t": 30, "b": 80 if legend_below else 46}, "showlegend": legend_below},
        "legend": {"orientation": "h", "y": -0.24, "font": {"size": 12, "color": MUTED}},
        "modebar": {"bgcolor": CLEAR, "color": AXIS, "activecolor": MUTED},
        **{"hovermode": "closest", "barmode": "stack"},
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left"},
        **{"xaxis": {"showgrid": False, "ticks": "outside", "showline": True} | x, "yaxis": y},
        "annotations": [note(above, 0, 1, xref="paper", yref="paper", yanchor="bottom", yshift=8, font=muted)],
    }
    return base | more


def note(text: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    """A text in the figure, to the right of (x, y)."""
    base = {"text": text, "x": x, "y": y, "xanchor": "left", "showarrow": False, "font": {"size": 13, "color": INK}}
    return base | more
