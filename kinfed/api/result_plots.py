"""Figures of the report as plotly figures of their own, for notebooks and scripts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from kinfed.analysis import Comparison
from kinfed.errors import ConfigError, unknown_name
from kinfed.records import KINDS, Kind
from kinfed.report import bytes_against_accuracy, distribution, learning_curves
from kinfed.report.drawing import BACKGROUND, Figure

PLOTS: dict[str, Callable[[Comparison], Figure | None]] = {
    "rounds": learning_curves,
    "bytes": bytes_against_accuracy,
    "clients": distribution,
}


def plot(comparison: Comparison, what: str, kind: Kind) -> go.Figure:
    if what not in PLOTS:
        raise unknown_name("plot", what, PLOTS)
    if kind not in KINDS:
        raise unknown_name("kind of model", kind, KINDS)
    figure = PLOTS[what](comparison)
    if figure is None or not any(_is_shown(trace, kind) for trace in figure.data):
        raise ConfigError(
            f"there is nothing to plot of the {kind} models over {what}: no method has been evaluated so, or sent "
            "anything; `result.to_frame()` shows what there is"
        )
    return plotly_figure(figure, kind)


def plotly_figure(figure: Figure, view: str) -> go.Figure:
    """One view of a figure of the report, with a legend and a background of its own: a page has these around it."""
    layout = copy.deepcopy(figure.layout)
    for entry in figure.views:
        for path, value in entry.patch.items() if entry.key == view else ():
            *keys, last = (int(key) if key.isdecimal() else key for key in path.split("."))
            place: Any = layout
            for key in keys:
                place = place[key]
            place[last] = value
    legend = bool(figure.methods)
    layout |= {"paper_bgcolor": BACKGROUND, "plot_bgcolor": BACKGROUND, "height": figure.height, "showlegend": legend}
    if legend:
        layout["legend"] = layout["legend"] | {"y": -0.2}
        layout["margin"] = layout["margin"] | {"b": 80}
    traces = [_with_legend(trace) for trace in figure.data if _is_shown(trace, view)]
    return go.Figure(traces, layout)


def _is_shown(trace: dict[str, object], view: str) -> bool:
    meta = trace.get("meta")
    return not isinstance(meta, dict) or meta.get("view") in (None, view)


def _with_legend(trace: dict[str, object]) -> dict[str, object]:
    """Entries of a legend are lines, not the bands around them."""
    return trace if "showlegend" in trace else trace | {"showlegend": trace.get("fill") is None}
