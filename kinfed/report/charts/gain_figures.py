"""Figures about gains: who is better off than with training alone."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from kinfed.analysis import Gain, Method, MetricStyle, metric_style
from kinfed.report.drawing.chart import (
    Figure,
    Layout,
    Trace,
    View,
    axis,
    client_label,
    escape,
    layout,
    size_axis,
    subsampled,
)
from kinfed.report.drawing.marks import area, bars, dots, in_view, line
from kinfed.report.drawing.palette import INK, LOCAL, faded, style_of

MAX_BARS = 240
ACCURACY = metric_style("accuracy")
LOST = faded(INK, 0.7)

Gains = list[tuple[Method, list[Gain]]]


def sorted_gains(by_method: Gains, first: Method, style: MetricStyle = ACCURACY) -> Figure:
    """One bar per client and seed, largest gain first; an area where bars would be thinner than a pixel."""
    data: list[Trace] = []
    by_scale = style.scale
    for method, values in by_method:
        ranks, color = [i + 0.5 for i in range(len(values))], style_of(method).color
        if len(values) <= MAX_BARS:
            colors = [color if g.gain > 0 else LOST for g in values]
            width = 0.84 if len(values) <= 120 else 1
            text = [_about(g, style) for g in values]
            heights = [by_scale * g.gain for g in values]
            marks = [bars(ranks, heights, colors, "%{text}", name=method.label, width=width, text=text)]
        else:
            points = subsampled([(rank, by_scale * g.gain) for rank, g in zip(ranks, values, strict=True)])
            x, hover = [rank for rank, _ in points], f"%{{y:+.3~g}} {style.gain_unit}"
            marks = [
                area(x, [max(gain, 0.0) for _, gain in points], color, hover, method.label),
                area(x, [min(gain, 0.0) for _, gain in points], LOST, hover, method.label),
            ]
        data += in_view(str(method.index), marks)
    x_axis = axis("Clients, sorted from most helped to most hurt", showline=False, ticks="", showticklabels=False)
    return _figure("Gain of every client over training alone, sorted.", data, x_axis, by_method, first, 340, style)


def gain_against_size(by_method: Gains, first: Method, style: MetricStyle = ACCURACY) -> Figure:
    """Dots are clients; the line joins medians of clients of similar size. The other methods' lines stay in gray."""
    data: list[Trace] = []
    by_scale = style.scale
    for method, values in by_method:
        sample: list[Gain] = subsampled(values, 1500)
        color = style_of(method).faded(0.5 if len(sample) <= 200 else 0.25)
        others = [(other, gains) for other, gains in by_method if other is not method]
        x, y = [g.n_train for g in sample], [by_scale * g.gain for g in sample]
        marks = [
            *(_medians(other, gains, faded(LOCAL, 0.45), 1.2, by_scale) for other, gains in others),
            dots(x, y, color, "%{text}", name=method.label, text=[_about(g, style) for g in sample]),
            _medians(method, values, style_of(method).color, 3, by_scale),
        ]
        data += in_view(str(method.index), marks)
    description = "Gain over training alone against the number of training examples of the client."
    sizes = size_axis(g.n_train for _, values in by_method for g in values)
    return _figure(description, data, sizes, by_method, first, 360, style)


def _figure(
    description: str, data: list[Trace], x: Layout, by_method: Gains, first: Method, height: int, style: MetricStyle
) -> Figure:
    y = axis(zeroline=True, zerolinecolor=INK, zerolinewidth=1)
    views = tuple(View(str(method.index), method.label) for method, _ in by_method)
    shape = layout(x, y, f"Gain over Local, {style.gain_unit}")
    return Figure(description, data, shape, height, views, str(first.index))


def _about(g: Gain, style: MetricStyle) -> str:
    return (
        f"<b>{client_label(g.client)}</b>, seed {g.seed}<br>{style.scale * g.gain:+.3g} {style.gain_unit}"
        f"<br>{g.n_train} training, {g.n_test} test examples"
    )


def _medians(method: Method, values: list[Gain], color: str, width: float, by_scale: float) -> Trace:
    """A line through median sizes and gains of up to six equal groups of clients of neighbouring size, at least five
    each."""
    ordered = sorted(values, key=lambda g: g.n_train)
    count = max(1, min(6, len(ordered) // 5))
    cuts = [round(i * len(ordered) / count) for i in range(count + 1)]
    parts = [ordered[a:b] for a, b in pairwise(cuts)]
    hover = f"<b>{escape(method.label)}</b><br>clients of about %{{x:.0f}} examples: median %{{y:+.3~g}}"
    return line(
        [median(g.n_train for g in part) for part in parts],
        [by_scale * median(g.gain for g in part) for part in parts],
        color, hover, name=method.label, width=width, dots=width > 2,
    )  # fmt: skip
