"""The map of classes: who holds how many examples, and of which classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from kinfed.data import Description
from kinfed.report.drawing import Figure, Layout, Trace, View, axis, escape, layout
from kinfed.report.drawing.chart import client_label, group_name, group_ticks, short
from kinfed.report.drawing.looks import MUTED, faded
from kinfed.report.drawing.marks import bars, heat, in_view, ramp

MAX_COLUMNS = 100  # clients shown one by one
POOLED_COLUMNS = 50
MAX_NAMED_GROUPS = 10
GAP = 0.3  # between groups, in columns
BLANK = "\u00a0"  # a label that keeps the title of the axis below the map


@dataclass(frozen=True)
class ClientColumn:
    """Clients that share a column of the map: one alone, a group, or neighbours with a similar mix of classes."""

    label: str  # escaped for plotly
    clients: tuple[int, ...]
    group: int | None


def client_columns(federation: Description) -> list[ClientColumn]:
    """Columns of the map in reading order: by group if groups are known, then by main class, then by its share."""
    groups = federation.groups

    def reading_order(client: int) -> tuple[int, int, float]:
        counts = federation.train[client]
        main = max(range(len(counts)), key=lambda c: counts[c])
        return groups[client] if groups else 0, main, -counts[main] / max(sum(counts), 1)

    ordered = sorted(range(len(federation.names)), key=reading_order)
    named = {g: escape(group_name(federation.group_names, g)) for g in sorted(set(groups or ()))}
    if len(ordered) <= MAX_COLUMNS:
        names = {m: client_label(federation.names[m]) for m in ordered}
        if groups is None:
            return [ClientColumn(name, (m,), None) for m, name in names.items()]
        return [ClientColumn(f"{name} ({named[groups[m]]})", (m,), groups[m]) for m, name in names.items()]
    if groups and len(named) <= MAX_COLUMNS:
        members = {g: tuple(m for m in ordered if groups[m] == g) for g in named}
        return [ClientColumn(f"{named[g]}, {len(ms)} clients", ms, None) for g, ms in members.items()]
    cuts = [round(i * len(ordered) / POOLED_COLUMNS) for i in range(POOLED_COLUMNS + 1)]
    parts = [tuple(ordered[a:b]) for a, b in pairwise(cuts)]
    return [ClientColumn(f"{len(part)} clients of similar mix", part, None) for part in parts]


def class_map(federations: dict[int, Description]) -> Figure | None:
    """Above: how many examples; below: of which classes. One column per client, or per pool of many clients."""
    by_seed = {seed: f for seed, f in sorted(federations.items()) if f.names and f.class_labels}
    if not by_seed:
        return None
    data: list[Trace] = []
    views: list[View] = []
    for seed, one in by_seed.items():
        columns = client_columns(one)
        middles = _middles(columns)
        data += in_view(f"seed-{seed}", _marks(one, columns, middles))
        views.append(View(f"seed-{seed}", f"Seed {seed}", _named_groups(one, columns, middles)))
    federation = next(iter(by_seed.values()))
    classes, pooled = len(federation.class_labels), len(federation.names) > MAX_COLUMNS
    height = 230 + min(max(classes, 6) * 22, 480)
    upper = 100 / (height - 100)  # the share of the plot area above the map
    ticks = range(0, classes, math.ceil(classes / 26))
    x = axis("Pools of clients" if pooled else "Clients", ticks="", showline=False, tickvals=[0], ticktext=[BLANK])
    x["title"]["standoff"] = 14
    names: Layout = {"tickvals": list(ticks), "ticktext": [short(federation.class_labels[c]) for c in ticks]}
    y = axis(domain=[0, 1 - upper - 0.04], range=[classes - 0.5, -0.5], showgrid=False, **names)
    sizes = axis(domain=[1 - upper, 1], nticks=4, rangemode="tozero")
    above = "Training examples" + (", median of the pool" if pooled else "")
    shape = layout(x, y, above, yaxis2=sizes, margin={"l": 44, "r": 16, "t": 56, "b": 46})
    description = "How many training examples each client holds, and the share of each class among them."
    return Figure(description, data, shape, height, tuple(views))


def _middles(columns: Sequence[ClientColumn]) -> list[float]:
    """The middle of each column; groups stand a little apart."""
    gaps = [0.0, *(GAP if a.group != b.group else 0.0 for a, b in pairwise(columns))]
    return [sum(gaps[: i + 1]) + i + 0.5 for i in range(len(columns))]


def _named_groups(federation: Description, columns: Sequence[ClientColumn], middles: list[float]) -> dict[str, Any]:
    """Names of the groups below their columns, as long as there is room for them."""
    groups = [column.group for column in columns if column.group is not None]
    if not 1 < len(set(groups)) <= MAX_NAMED_GROUPS:
        return {}
    return {f"xaxis.{key}": value for key, value in group_ticks(groups, federation.group_names, middles).items()}


def _marks(federation: Description, columns: Sequence[ClientColumn], middles: list[float]) -> list[Trace]:
    """Bars of sizes and the map of shares. The map is given by the edges of its cells; gaps are cells without value."""
    sizes = federation.sizes()
    edges = [0.0]
    cells: list[ClientColumn | None] = []
    for column, middle in zip(columns, middles, strict=True):
        if middle - 0.5 > edges[-1] + GAP / 2:
            edges.append(middle - 0.5)
            cells.append(None)
        edges.append(middle + 0.5)
        cells.append(column)
    shares: list[list[float | None]] = [[] for _ in federation.class_labels]
    details: list[list[list[Any] | None]] = [[] for _ in federation.class_labels]
    for cell in cells:
        total = 0 if cell is None else sum(sizes[m] for m in cell.clients)
        for c, name in enumerate(federation.class_labels):
            count = 0 if cell is None else sum(federation.train[m][c] for m in cell.clients)
            shares[c].append(None if cell is None else 100 * count / max(total, 1))
            details[c].append(None if cell is None else [cell.label, escape(name), count])
    return [
        bars(
            middles, [median(sizes[m] for m in column.clients) for column in columns], faded(MUTED, 0.75),
            "%{text}<br>%{y:,} training examples", width=0.86, text=[column.label for column in columns], yaxis="y2",
        ),
        heat(
            shares, "%{customdata[0]}<br>class %{customdata[1]}: %{customdata[2]:,} examples (%{z:.0f} %)", x=edges,
            low=0, details=details, colors=ramp(0.3), colorbar="% of the examples",
        ),
    ]  # fmt: skip
