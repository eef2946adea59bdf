"""Clusters: who trains with whom, over rounds, and, where clusters are split from one another, as a tree.

A run records, at evaluated rounds, which server model every client has (`assignment`), for every method whose server
holds several. A method may record it itself, with −1 for a client that has none yet.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from kinfed.analysis import Method, adjusted_rand
from kinfed.report.drawing.chart import Figure, Trace, axis, layout, note, round_axis, subsampled
from kinfed.report.drawing.looks import GRID, HUES, INK, MUTED, faded, plural
from kinfed.report.drawing.marks import flat, heat, line, stacked
from kinfed.report.panels.base import ClientGroups, Panel, first_series, seed_note, series

MAX_ROWS = 150  # clients shown one by one
MAX_COLUMNS = 120  # rounds
MAX_BRANCHES = 60

NONE = -1  # the cluster of a client that has none yet


@dataclass(frozen=True)
class ClusterHistory:
    """The clusters of all clients of one seed, at every evaluated round."""

    seed: int
    rounds: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]  # by round, then by client
    clients: ClientGroups
    noun: str  # what the method calls a cluster

    @property
    def last(self) -> tuple[int, ...]:
        return self.labels[-1]

    @property
    def clusters(self) -> list[int]:
        """All that ever had a member."""
        return sorted({label for labels in self.labels for label in labels} - {NONE})

    @property
    def columns(self) -> list[tuple[int, tuple[int, ...]]]:
        """(round, clusters of all clients), no more than can be drawn."""
        return subsampled(list(zip(self.rounds, self.labels, strict=True)), MAX_COLUMNS)

    def name(self, cluster: int) -> str:
        return f"no {self.noun} yet" if cluster == NONE else f"{self.noun} {cluster}"


def clusters(method: Method) -> Panel | None:
    history = cluster_history(method)
    if history is None:
        return None
    figures = [_strip(history)] if len(history.last) <= MAX_ROWS else []
    figures.append(_members(history))
    if tree := _tree(method, history):
        figures.append(tree)
    sentence = _sentence(history) + seed_note(method, history.seed)
    return Panel(f"{history.noun.capitalize()}s of clients", sentence, tuple(figures))


def cluster_history(method: Method) -> ClusterHistory | None:
    """Clusters of the first complete trial; rounds with anything but one whole number per client are left out."""
    if (recorded := first_series(method, "assignment")) is None:
        return None
    seed, by_round = recorded
    noun = "context" if series(method, "contexts") else "cluster"
    number = series(method, f"{noun}s").get(seed, {})
    rows = [
        (n, tuple(NONE if label == number.get(n) else label for label in assignment))
        for n, assignment in sorted(by_round.items())
        if isinstance(assignment, list) and assignment and all(type(m) is int and m >= NONE for m in assignment)
    ]
    if not rows:
        return None
    count = len(rows[-1][1])
    rounds, labels = zip(*(row for row in rows if len(row[1]) == count), strict=True)
    return ClusterHistory(seed, rounds, labels, ClientGroups.of(method.run.federations.get(seed), count), noun)


def _sentence(history: ClusterHistory) -> str:
    sizes = sorted(Counter(label for label in history.last if label != NONE).values(), reverse=True)
    noun, groups = history.noun, history.clients.groups
    text = f"After round {history.rounds[-1]} the clients form {plural(len(sizes), noun)}"
    ends = f", the largest with {sizes[0]} and the smallest with {sizes[-1]}" if len(sizes) > 1 else ""
    text += f"{ends} of {len(history.last)} clients." if ends else "."
    if waiting := history.last.count(NONE):
        text += f" {plural(waiting, 'client')} had no {noun} yet."
    moves = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairwise(history.labels)]
    if moves:
        calm = next((i for i, moved in enumerate(reversed(moves)) if moved), len(moves))
        if calm == len(moves):
            text += f" No client changed {noun} between the evaluated rounds."
        elif calm:
            text += f" No client has changed {noun} since round {history.rounds[-1 - calm]}."
        else:
            text += f" {moves[-1]} changed {noun} between the last two evaluated rounds."
    placed = [m for m, label in enumerate(history.last) if label != NONE]
    if groups is not None and len(sizes) > 1 and len({groups[m] for m in placed}) > 1:
        score = adjusted_rand([groups[m] for m in placed], [history.last[m] for m in placed])
        text += (
            f" They agree with the groups that the data were made of by {score:.2f} (adjusted Rand index: 1 if they "
            "are the same, about 0 if there is no relation)."
        )
    return text


def color(cluster: int) -> str:
    """Clusters keep their colour over rounds and figures; beyond seven, colours come again, lighter."""
    if cluster == NONE:
        return GRID
    hue = HUES[cluster % len(HUES)]
    return hue if cluster < len(HUES) else faded(hue, max(0.25, 0.7 - 0.2 * (cluster // len(HUES) - 1)))


def _strip(history: ClusterHistory) -> Figure:
    """A row per client, a column per evaluated round, coloured by cluster. Clients stand by group, then by where they
    ended."""
    clients, groups, columns = history.clients, history.clients.groups, history.columns
    order = sorted(clients.order(None), key=lambda m: (groups[m] if groups else 0, history.last[m], m))
    present = [NONE, *history.clusters]
    names = [clients.client(m) + (f" ({clients.group(groups[m])})" if groups else "") for m in order]
    details = [
        [f"{name}, round {number}: {history.name(labels[m])}" for number, labels in columns]
        for m, name in zip(order, names, strict=True)
    ]
    cells = [[present.index(labels[m]) for _, labels in columns] for m in order]
    colors = flat([color(label) for label in present])
    squares = heat(cells, "%{customdata}", colors=colors, low=-0.5, high=len(present) - 0.5, details=details)
    ticks = subsampled(range(len(columns)), 8)
    x = axis("Round", showline=False, tickvals=ticks, ticktext=[str(columns[i][0]) for i in ticks])
    y = axis(showgrid=False, range=[len(order) - 0.5, -0.5], ticks="", **clients.ticks(groups, order))
    shape = layout(x, y, f"Colours: {history.noun}s; rows: clients" + (" by group" if groups else ""))
    description = f"The {history.noun} of every client over rounds, one row per client."
    return Figure(description, [squares], shape, 110 + min(max(14 * len(order), 150), 460))


def _members(history: ClusterHistory) -> Figure:
    """The number of clients of each cluster, stacked over rounds."""
    rounds = [number for number, _ in history.columns]
    counts = [Counter(labels) for _, labels in history.columns]
    data = [
        stacked(
            rounds, [count[label] for count in counts], color(label),
            f"round %{{x}}: %{{y}} clients in {history.name(label)}", history.name(label), shape="hv",
        )
        for label in (*history.clusters, NONE)
        if any(count[label] for count in counts)
    ]  # fmt: skip
    shape = layout(round_axis(rounds), axis(nticks=5, rangemode="tozero"), f"Clients by {history.noun}")
    return Figure(f"How many clients each {history.noun} has, over rounds.", data, shape, 260)


def _tree(method: Method, history: ClusterHistory) -> Figure | None:
    """The tree of splits, where a method records of each cluster its `parent` and the round it was `born` in."""
    end = history.rounds[-1]
    parent, born = (series(method, key).get(history.seed, {}).get(end) for key in ("parent", "born"))
    if not isinstance(parent, list) or not isinstance(born, list):
        return None
    if not 1 < len(parent) <= MAX_BRANCHES or len(born) != len(parent):
        return None
    order: list[int] = [0]
    for child in range(1, len(parent)):
        order.insert(order.index(parent[child]) + 1, child)  # later splits nearer the parent: no lines cross
    size = Counter(history.last)

    def branch(cluster: int) -> Trace:
        row, start = order.index(cluster), born[cluster]
        x, y = [start, end], [row, row]
        about = f"{history.name(cluster)}: {plural(size[cluster], 'client')}"
        if cluster:
            x, y = [start, *x], [order.index(parent[cluster]), *y]
            about += f"; split from {history.name(parent[cluster])} in round {start}"
        width = 1.5 + 6 * size[cluster] / max(len(history.last), 1)
        return line(x, y, color(cluster), about, name=history.name(cluster), width=width)

    shape = layout(
        axis("Round of the split", rangemode="tozero"),
        axis(showticklabels=False, showgrid=False, range=[len(order) - 0.5, -0.5], ticks=""),
        f"Splits; on the right: clients in each {history.noun}",
        margin={"l": 16, "r": 44, "t": 30, "b": 46},
    )
    shape["annotations"] += [
        note(str(size[cluster]), end, row, xshift=8, font={"size": 12, "color": INK if size[cluster] else MUTED})
        for row, cluster in enumerate(order)
    ]
    description = f"The tree of splits of {method.label}: which {history.noun} was split from which, and when."
    return Figure(description, [branch(cluster) for cluster in order], shape, 110 + min(max(30 * len(order), 120), 420))
