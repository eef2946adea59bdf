"""Figures about the clients: who gains over training alone, and who holds which data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kinfed.report.chart import Figure, Trace, View, axis, client_label, layout, log_axis, numbers, safe, short, thinned
from kinfed.report.comparison import Method
from kinfed.report.palette import HEAT_HIGH, HEAT_LOW, INK, LOCAL, MUTED, SURFACE, faded
from kinfed.report.statistics import Gain
from kinfed.runs.reader import Federation

MAX_BARS = 240
MAX_COLUMNS = 100  # clients shown one by one in the map of classes
POOLED_COLUMNS = 50
MAX_NAMED_GROUPS = 10
GAP = 0.3  # between groups, in columns
BLANK = "\u00a0"  # a label that keeps the title of the axis below the map


def sorted_gains(by_method: list[tuple[Method, list[Gain]]], first: Method) -> Figure:
    """One bar per client and seed, largest gain first; an area where bars would be thinner than a pixel."""
    data: list[Trace] = []
    for method, values in by_method:
        ranks = [i + 0.5 for i in range(len(values))]
        heights = numbers((g.gain for g in values), 100)
        meta = {"view": str(method.index)}
        if len(values) <= MAX_BARS:
            data.append(
                {
                    "type": "bar",
                    "x": ranks,
                    "y": heights,
                    "width": 0.84 if len(values) <= 120 else 1,
                    "marker": {"color": [method.style.color if g.gain > 0 else faded(INK, 0.7) for g in values]},
                    "text": [_about(g) for g in values],
                    "textposition": "none",
                    "hovertemplate": "%{text}<extra></extra>",
                    "name": safe(method.label),
                    "meta": meta,
                }
            )
        else:
            for positive, color in ((True, method.style.color), (False, faded(INK, 0.7))):
                part = [(x, g.gain if (g.gain > 0) == positive else 0.0) for x, g in zip(ranks, values, strict=True)]
                part = thinned(part)
                data.append(
                    {
                        "type": "scatter",
                        "x": numbers(x for x, _ in part),
                        "y": numbers((y for _, y in part), 100),
                        "mode": "lines",
                        "line": {"width": 0, "shape": "hvh"},
                        "fill": "tozeroy",
                        "fillcolor": color,
                        "hovertemplate": "%{y:+.1f} points<extra></extra>",
                        "name": safe(method.label),
                        "meta": meta,
                    }
                )
    y = axis(zeroline=True, zerolinecolor=INK, zerolinewidth=1)
    x = axis("Clients, sorted from most helped to most hurt", showline=False, ticks="", showticklabels=False)
    return Figure(
        description="Gain of every client over training alone, sorted.",
        data=data,
        layout=layout(x, y, "Gain over Local, percentage points"),
        height=340,
        views=tuple(View(str(method.index), method.label) for method, _ in by_method),
        chosen=str(first.index),
    )


def gain_against_size(by_method: list[tuple[Method, list[Gain]]], first: Method) -> Figure:
    """Dots are clients; the line joins medians of clients of similar size. The other methods' lines stay in gray."""
    data: list[Trace] = []
    medians = {method.index: _medians_by_size(values) for method, values in by_method}
    for chosen, values in by_method:
        view = {"view": str(chosen.index)}
        for method, _ in by_method:
            if method is not chosen:
                data.append(_median_line(medians[method.index], faded(LOCAL, 0.45), 1.2, method.label) | {"meta": view})
        dots = thinned(values, 1500)
        data.append(
            {
                "type": "scatter",
                "x": [g.n_train for g in dots],
                "y": numbers((g.gain for g in dots), 100),
                "text": [_about(g) for g in dots],
                "mode": "markers",
                "marker": {"color": chosen.style.faded(0.5 if len(dots) <= 200 else 0.25), "size": 7},
                "hovertemplate": "%{text}<extra></extra>",
                "name": safe(chosen.label),
                "meta": view,
            }
        )
        data.append(_median_line(medians[chosen.index], chosen.style.color, 3, chosen.label) | {"meta": view})
    y = axis(zeroline=True, zerolinecolor=INK, zerolinewidth=1)
    sizes = [g.n_train for _, values in by_method for g in values if g.n_train > 0]
    wide = bool(sizes) and max(sizes) > 8 * min(sizes)
    title = "Training examples of the client"
    x = log_axis(title, min(sizes), max(sizes)) if wide else axis(title)
    return Figure(
        description="Gain over training alone against the number of training examples of the client.",
        data=data,
        layout=layout(x, y, "Gain over Local, percentage points"),
        height=360,
        views=tuple(View(str(method.index), method.label) for method, _ in by_method),
        chosen=str(first.index),
    )


def _about(g: Gain) -> str:
    return (
        f"<b>{client_label(g.client)}</b>, seed {g.seed}<br>{100 * g.gain:+.1f} points"
        f"<br>{g.n_train} training, {g.n_test} test examples"
    )


def _medians_by_size(values: list[Gain], bins: int = 6) -> list[tuple[float, float]]:
    """(size, gain) medians of up to six equally large groups of clients of neighbouring size, at least five each."""
    ordered = sorted(values, key=lambda g: g.n_train)
    count = max(1, min(bins, len(ordered) // 5))
    cuts = [round(i * len(ordered) / count) for i in range(count + 1)]
    parts = [ordered[a:b] for a, b in pairwise(cuts)]
    return [(_median([g.n_train for g in part]), _median([g.gain for g in part])) for part in parts if part]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _median_line(points: list[tuple[float, float]], color: str, width: float, label: str) -> Trace:
    return {
        "type": "scatter",
        "x": numbers(x for x, _ in points),
        "y": numbers((y for _, y in points), 100),
        "mode": "lines+markers" if width > 2 else "lines",
        "line": {"color": color, "width": width},
        "marker": {"color": color, "size": 6},
        "hovertemplate": f"<b>{safe(label)}</b><br>clients of about %{{x:.0f}} examples: "
        "median %{y:+.1f}<extra></extra>",
        "name": safe(label),
    }


@dataclass(frozen=True)
class Pool:
    """Clients that share a column of the map: one alone, a group, or neighbours with a similar mix of classes."""

    label: str
    clients: tuple[int, ...]
    group: int | None


def pools(federation: Federation) -> list[Pool]:
    """Columns of the map in reading order: by group if groups are known, then by main class, then by its share."""
    groups = federation.groups

    def reading_order(client: int) -> tuple[int, int, float]:
        counts = federation.train[client]
        main = max(range(len(counts)), key=lambda c: counts[c])
        return groups[client] if groups else 0, main, -counts[main] / max(sum(counts), 1)

    ordered = sorted(range(len(federation.names)), key=reading_order)
    if len(ordered) <= MAX_COLUMNS:
        return [Pool(_client_label(federation, m), (m,), groups[m] if groups else None) for m in ordered]
    if groups and len(set(groups)) <= MAX_COLUMNS:
        members = {g: tuple(m for m in ordered if groups[m] == g) for g in sorted(set(groups))}
        return [Pool(f"{safe(_group_name(federation, g))}, {len(ms)} clients", ms, None) for g, ms in members.items()]
    cuts = [round(i * len(ordered) / POOLED_COLUMNS) for i in range(POOLED_COLUMNS + 1)]
    parts = [tuple(ordered[a:b]) for a, b in pairwise(cuts)]
    return [Pool(f"{len(part)} clients of similar mix", part, None) for part in parts]


def _client_label(federation: Federation, client: int) -> str:
    """Safe for plotly, as are all labels of pools."""
    name = client_label(federation.names[client])
    return f"{name} ({safe(_group_name(federation, federation.groups[client]))})" if federation.groups else name


def _group_name(federation: Federation, group: int) -> str:
    names = federation.group_names
    return names[group] if names is not None and 0 <= group < len(names) else f"group {group}"


def class_map(federations: dict[int, Federation]) -> Figure | None:
    """Above: how many examples; below: of which classes. One column per client, or per pool of many clients."""
    shown = {seed: f for seed, f in sorted(federations.items()) if f.names and f.class_names}
    if not shown:
        return None
    data: list[Trace] = []
    views: list[View] = []
    for seed, one in shown.items():
        columns = pools(one)
        places = _places(columns)
        data += [trace | {"meta": {"view": f"seed-{seed}"}} for trace in _map_traces(one, columns, places)]
        views.append(View(f"seed-{seed}", f"Seed {seed}", _group_ticks(one, columns, places)))
    federation = next(iter(shown.values()))
    classes = len(federation.class_names)
    height = 230 + min(max(classes, 6) * 22, 480)
    bars = 100 / (height - 100)  # the share of the plot area above the map
    labelled = range(0, classes, math.ceil(classes / 26))
    pooled = len(federation.names) > MAX_COLUMNS
    base = layout(
        axis("Pools of clients" if pooled else "Clients", ticks="", showline=False, tickvals=[0], ticktext=[BLANK]),
        axis(
            domain=[0, 1 - bars - 0.04],
            range=[classes - 0.5, -0.5],
            showgrid=False,
            tickvals=list(labelled),
            ticktext=[short(federation.class_names[c]) for c in labelled],
        ),
        "Training examples" + (", median of the pool" if pooled else ""),
        yaxis2=axis(domain=[1 - bars, 1], nticks=4, rangemode="tozero"),
        margin={"l": 44, "r": 16, "t": 56, "b": 46},
    )
    base["xaxis"]["title"]["standoff"] = 14
    return Figure(
        description="How many training examples each client holds, and the share of each class among them.",
        data=data,
        layout=base,
        height=height,
        views=tuple(views),
    )


def _places(columns: list[Pool]) -> list[float]:
    """The middle of each column; groups stand a little apart."""
    x = 0.0
    places = []
    for before, pool in zip([*columns[:1], *columns], columns, strict=False):
        x += GAP if before.group != pool.group else 0.0
        places.append(x + 0.5)
        x += 1
    return places


def _group_ticks(federation: Federation, columns: list[Pool], places: list[float]) -> dict[str, Any]:
    """Names of the groups below their columns, as long as there is room for them."""
    by_group: dict[int, list[float]] = {}
    for pool, place in zip(columns, places, strict=True):
        if pool.group is not None:
            by_group.setdefault(pool.group, []).append(place)
    if not 1 < len(by_group) <= MAX_NAMED_GROUPS:
        return {}
    return {
        "xaxis.tickvals": [(middles[0] + middles[-1]) / 2 for middles in by_group.values()],
        "xaxis.ticktext": [short(_group_name(federation, group)) for group in by_group],
    }


def _map_traces(federation: Federation, columns: list[Pool], places: list[float]) -> list[Trace]:
    """Bars of sizes and the map of shares. The map is given by the edges of its cells; gaps are cells without value."""
    sizes = federation.sizes
    totals = [max(sum(sizes[m] for m in pool.clients), 1) for pool in columns]
    edges = [0.0]
    shares: list[list[float | None]] = [[] for _ in federation.class_names]
    details: list[list[list[Any] | None]] = [[] for _ in federation.class_names]
    for pool, place, total in zip(columns, places, totals, strict=True):
        if place - 0.5 > edges[-1] + GAP / 2:
            edges.append(place - 0.5)
            for c in range(len(shares)):
                shares[c].append(None)
                details[c].append(None)
        edges.append(place + 0.5)
        for c, name in enumerate(federation.class_names):
            count = sum(federation.train[m][c] for m in pool.clients)
            shares[c].append(100 * count / total)
            details[c].append([pool.label, safe(name), count])
    return [
        {
            "type": "bar",
            "x": places,
            "width": 0.86,
            "y": [_median([sizes[m] for m in pool.clients]) for pool in columns],
            "yaxis": "y2",
            "text": [pool.label for pool in columns],
            "textposition": "none",
            "marker": {"color": faded(MUTED, 0.75)},
            "hovertemplate": "%{text}<br>%{y:,} training examples<extra></extra>",
        },
        {
            "type": "heatmap",
            "x": edges,
            "z": [numbers(row) for row in shares],
            "customdata": details,
            "zmin": 0,
            "xgap": 1 if len(columns) <= 60 else 0,
            "ygap": 1 if len(shares) <= 30 else 0,
            "hoverongaps": False,
            "colorscale": [[0, SURFACE], [0.001, SURFACE], [0.3, HEAT_LOW], [1, HEAT_HIGH]],
            "colorbar": {
                "title": {"text": "% of the examples", "side": "top", "font": {"size": 12, "color": MUTED}},
                "orientation": "h",
                "thickness": 8,
                "len": 150,
                "lenmode": "pixels",
                "x": 1,
                "xanchor": "right",
                "xpad": 34,
                "y": 1,
                "yanchor": "bottom",
                "ypad": 2,
                "outlinewidth": 0,
                "tickfont": {"size": 11, "color": MUTED},
                "nticks": 4,
            },
            "hovertemplate": "%{customdata[0]}<br>class %{customdata[1]}: %{customdata[2]:,} examples (%{z:.0f} %)"
            "<extra></extra>",
        },
    ]
