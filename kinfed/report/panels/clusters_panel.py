"""Who trains with whom, for methods that sort clients into clusters: over rounds, and, where clusters are split from
one another, as a tree.

A method takes part by recording, at evaluated rounds, the cluster of every client (−1 while there is none). Methods
that call clusters by another name pass their key and word to `membership`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sklearn.metrics import adjusted_rand_score

from kinfed.report.chart import Figure, Trace, axis, client_label, layout, safe, short, thinned
from kinfed.report.comparison import Method
from kinfed.report.palette import GRID, HUES, INK, MUTED, faded
from kinfed.report.panels.panel import Panel, panel, series
from kinfed.runs.reader import Federation

MAX_ROWS = 150  # clients shown one by one
MAX_COLUMNS = 120  # rounds
MAX_NAMED_GROUPS = 12
MAX_BRANCHES = 60

NONE = -1  # the cluster of a client that has none yet


@dataclass(frozen=True)
class History:
    """The clusters of all clients of one seed, at every evaluated round."""

    seed: int
    rounds: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]  # by round, then by client
    federation: Federation | None
    noun: str  # what the method calls a cluster

    @property
    def last(self) -> tuple[int, ...]:
        return self.labels[-1]

    @property
    def clusters(self) -> list[int]:
        """All that ever had a member."""
        return sorted({label for labels in self.labels for label in labels} - {NONE})

    @property
    def groups(self) -> tuple[int, ...] | None:
        return None if self.federation is None else self.federation.groups

    def name(self, client: int) -> str:
        """Safe for plotly."""
        return f"client {client}" if self.federation is None else client_label(self.federation.names[client])

    def group(self, number: int) -> str:
        names = None if self.federation is None else self.federation.group_names
        return names[number] if names is not None and 0 <= number < len(names) else f"group {number}"

    def called(self, cluster: int) -> str:
        return f"no {self.noun} yet" if cluster == NONE else f"{self.noun} {cluster}"


@panel
def clusters(method: Method) -> Panel | None:
    return membership(method, "cluster", "cluster")


def membership(method: Method, key: str, noun: str) -> Panel | None:
    """The panel for a method that records the cluster of every client under `key` and calls it a `noun`."""
    history = recorded(method, key, noun)
    if history is None:
        return None
    figures = [members(method, history)]
    if len(history.last) <= MAX_ROWS:
        figures.insert(0, strip(method, history))
    branches = tree(method, history)
    if branches is not None:
        figures.append(branches)
    return Panel(f"{noun.capitalize()}s of clients", _sentence(method, history), tuple(figures))


def recorded(method: Method, key: str, noun: str) -> History | None:
    """What the first of the counted seeds recorded; rounds with anything but one whole number per client are left
    out."""
    found = series(method, key)
    if not found:
        return None
    seed = min(found)
    federation = method.run.federations.get(seed)
    rows = [(number, tuple(value)) for number, value in sorted(found[seed].items()) if _is_assignment(value)]
    rows = [row for row in rows if len(row[1]) == len(rows[-1][1])]
    if not rows:
        return None
    if federation is not None and len(federation.names) != len(rows[-1][1]):
        federation = None
    return History(seed, tuple(n for n, _ in rows), tuple(labels for _, labels in rows), federation, noun)


def _is_assignment(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(label) is int and label >= NONE for label in value)


def _sentence(method: Method, history: History) -> str:
    sizes = sorted(Counter(label for label in history.last if label != NONE).values(), reverse=True)
    noun, count = history.noun, len(sizes)
    text = f"After round {history.rounds[-1]} the clients form {count} {noun}{'' if count == 1 else 's'}"
    if count > 1:
        text += f", the largest with {sizes[0]} and the smallest with {sizes[-1]} of {len(history.last)} clients"
    text += "."
    waiting = sum(label == NONE for label in history.last)
    if waiting:
        text += f" {waiting} client{'' if waiting == 1 else 's'} had no {noun} yet."
    moves = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairwise(history.labels)]
    if moves:
        calm = next((i for i, moved in enumerate(reversed(moves)) if moved), len(moves))
        if calm == len(moves):
            text += f" Nobody changed {noun} between the evaluated rounds."
        elif calm:
            text += f" Nobody has changed {noun} since round {history.rounds[-1 - calm]}."
        else:
            text += f" {moves[-1]} changed {noun} between the last two evaluated rounds."
    placed = [m for m, label in enumerate(history.last) if label != NONE]
    if history.groups is not None and count > 1 and len({history.groups[m] for m in placed}) > 1:
        score = adjusted_rand_score([history.groups[m] for m in placed], [history.last[m] for m in placed])
        text += (
            f" They agree with the groups that the data were made of by {score:.2f} (adjusted Rand index: 1 if they "
            "are the same, about 0 if there is no relation)."
        )
    if len(method.counted) > 1:
        text += f" Shown is seed {history.seed}."
    return text


def color(cluster: int) -> str:
    """Clusters keep their colour over rounds and figures; beyond seven, colours come again, lighter."""
    hue = HUES[cluster % len(HUES)]
    return hue if cluster < len(HUES) else faded(hue, max(0.25, 0.7 - 0.2 * (cluster // len(HUES) - 1)))


def strip(method: Method, history: History) -> Figure:
    """A row per client, a column per evaluated round, coloured by cluster. Clients stand by group, then by where they
    ended."""
    groups = history.groups
    order = sorted(range(len(history.last)), key=lambda m: (groups[m] if groups else 0, history.last[m], m))
    columns = thinned(list(zip(history.rounds, history.labels, strict=True)), MAX_COLUMNS)
    shown = [NONE, *history.clusters]
    place = {label: i for i, label in enumerate(shown)}
    colors = [GRID, *(color(label) for label in history.clusters)]
    steps = [[(i + edge) / len(colors), tone] for i, tone in enumerate(colors) for edge in (0, 1)]
    trace: Trace = {
        "type": "heatmap",
        "x": list(range(len(columns))),
        "y": list(range(len(order))),
        "z": [[place[labels[m]] for _, labels in columns] for m in order],
        "customdata": [
            [f"{history.name(m)}{_of_group(history, m)}, round {number}: {history.called(labels[m])}"
             for number, labels in columns]
            for m in order
        ],
        "zmin": -0.5,
        "zmax": len(colors) - 0.5,
        "colorscale": steps,
        "showscale": False,
        "xgap": 1 if len(columns) <= 40 else 0,
        "ygap": 1 if len(order) <= 60 else 0,
        "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip
    ticks = thinned(list(range(len(columns))), 8)
    x = axis("Round", showline=False, tickvals=ticks, ticktext=[str(columns[i][0]) for i in ticks])
    names = _row_names(history, order)
    y = axis(showgrid=False, range=[len(order) - 0.5, -0.5], ticks="", **names)
    return Figure(
        description=f"The {history.noun} of every client over rounds, one row per client.",
        data=[trace],
        layout=layout(x, y, f"Colours: {history.noun}s; rows: clients" + (" by group" if groups else "")),
        height=110 + min(max(14 * len(order), 150), 460),
    )


def _of_group(history: History, client: int) -> str:
    return "" if history.groups is None else f" ({safe(history.group(history.groups[client]))})"


def _row_names(history: History, order: Sequence[int]) -> dict[str, Any]:
    """Names of groups in the middle of their rows, or of clients while they are few."""
    groups = history.groups
    if groups is not None and 1 < len(set(groups)) <= MAX_NAMED_GROUPS:
        rows: dict[int, list[int]] = {}
        for row, client in enumerate(order):
            rows.setdefault(groups[client], []).append(row)
        return {
            "tickvals": [(found[0] + found[-1]) / 2 for found in rows.values()],
            "ticktext": [short(history.group(group)) for group in rows],
        }
    if len(order) <= 25:
        return {"tickvals": list(range(len(order))), "ticktext": [history.name(m) for m in order]}
    return {"showticklabels": False}


def members(method: Method, history: History) -> Figure:
    """How many clients each cluster has, stacked over rounds."""
    columns = thinned(list(zip(history.rounds, history.labels, strict=True)), MAX_COLUMNS)
    counts = [Counter(labels) for _, labels in columns]
    shown = [label for label in (*history.clusters, NONE) if any(count[label] for count in counts)]
    data: list[Trace] = [
        {
            "type": "scatter",
            "x": [number for number, _ in columns],
            "y": [count[label] for count in counts],
            "stackgroup": "all",
            "mode": "lines",
            "line": {"width": 0.5, "color": GRID if label == NONE else color(label), "shape": "hv"},
            "fillcolor": GRID if label == NONE else color(label),
            "hovertemplate": f"round %{{x}}: %{{y}} clients in {history.called(label)}<extra></extra>",
            "name": history.called(label),
        }
        for label in shown
    ]
    if len(columns) == 1:  # an area over one round has no width
        for trace in data:
            trace.update(type="bar", marker={"color": trace.pop("fillcolor")})
            for area in ("stackgroup", "mode", "line"):
                trace.pop(area)
    return Figure(
        description=f"How many clients each {history.noun} has, over rounds.",
        data=data,
        layout=layout(axis("Round"), axis(nticks=5, rangemode="tozero"), f"Clients by {history.noun}", barmode="stack"),
        height=260,
    )


def tree(method: Method, history: History) -> Figure | None:
    """Where a method records from which cluster (`parent`) and in which round (`born`) each one was split."""
    parent, born = (series(method, key).get(history.seed, {}).get(history.rounds[-1]) for key in ("parent", "born"))
    if not isinstance(parent, list) or not isinstance(born, list):
        return None
    if not 1 < len(parent) <= MAX_BRANCHES or len(born) != len(parent):
        return None
    order: list[int] = [0]
    for child in range(1, len(parent)):
        order.insert(order.index(parent[child]) + 1, child)  # later splits nearer the parent: no lines cross
    row = {cluster: i for i, cluster in enumerate(order)}
    size, end = Counter(history.last), history.rounds[-1]
    data: list[Trace] = []
    for cluster in order:
        start = born[cluster]
        about = f"{history.called(cluster)}: {size[cluster]} client{'' if size[cluster] == 1 else 's'}"
        if cluster:
            about += f"; split from {history.called(parent[cluster])} in round {start}"
        x, y = [start, end], [row[cluster], row[cluster]]
        if cluster:
            x, y = [start, *x], [row[parent[cluster]], *y]
        data.append(
            {
                "type": "scatter",
                "x": x,
                "y": y,
                "mode": "lines",
                "line": {"color": color(cluster), "width": 1.5 + 6 * size[cluster] / max(len(history.last), 1)},
                "hovertemplate": f"{about}<extra></extra>",
                "name": history.called(cluster),
            }
        )
    labels = [
        {
            "text": f"{size[cluster]}",
            "x": end,
            "y": row[cluster],
            "xanchor": "left",
            "xshift": 8,
            "showarrow": False,
            "font": {"size": 12, "color": INK if size[cluster] else MUTED},
        }
        for cluster in order
    ]
    base = layout(
        axis("Round of the split", rangemode="tozero"),
        axis(showticklabels=False, showgrid=False, range=[len(order) - 0.5, -0.5], ticks=""),
        f"Splits; on the right: clients in each {history.noun}",
        margin={"l": 16, "r": 44, "t": 30, "b": 46},
    )
    base["annotations"] += labels
    return Figure(
        description=f"The tree of splits of {method.label}: which {history.noun} was split from which, and when.",
        data=data,
        layout=base,
        height=110 + min(max(30 * len(order), 120), 420),
    )
