"""Figures that set the methods side by side: over rounds, over bytes, over clients."""

from __future__ import annotations

from itertools import accumulate

from kinfed.report.chart import (
    Figure,
    Trace,
    View,
    axis,
    client_label,
    curve,
    layout,
    log_axis,
    numbers,
    safe,
    thinned,
    y_title,
)
from kinfed.report.comparison import Comparison, Method
from kinfed.report.palette import INK
from kinfed.report.statistics import average
from kinfed.runs.reader import Kind, finite

SCALES = {"accuracy": 100.0, "loss": 1.0}
UNITS = {"accuracy": " %", "loss": ""}
FORMATS = {"accuracy": ".1f", "loss": ".4g"}
MAX_DOTS = 4000  # beyond this, shapes instead of single clients


def over_rounds(method: Method, kind: Kind, metric: str) -> tuple[list[int], list[dict[int, float]]]:
    """The rounds in which every counted seed was evaluated, and the metric there by seed."""
    by_round: dict[int, dict[int, float]] = {}
    for trial in method.counted:
        for entry in trial.rounds:
            if metric in entry.metrics.get(kind, {}):
                by_round.setdefault(entry.number, {})[trial.seed] = entry.metrics[kind][metric]
    complete = sorted(number for number, values in by_round.items() if len(values) == len(method.counted))
    return complete, [by_round[number] for number in complete]


def _averages(values: list[dict[int, float]], metric: str) -> tuple[list[float], list[float | None]]:
    scale = SCALES[metric]
    averages = [entry for by_seed in values if (entry := average(by_seed)) is not None]
    return [scale * a.mean for a in averages], [None if a.sd is None else scale * a.sd for a in averages]


def reading(metric: str) -> str:
    """What hovering a curve says of its value: mean, spread where there is one, unit."""
    return f"%{{y:{FORMATS[metric]}}}%{{customdata}}{UNITS[metric]}"


def kind_views(comparison: Comparison) -> tuple[View, ...]:
    names: dict[Kind, str] = {"personal": "Personal models", "server": "Server model"}
    what = {"accuracy": "accuracy, %", "loss": "loss"}[comparison.metric]
    return tuple(View(kind, names[kind], y_title(f"{names[kind]}: {what}")) for kind in comparison.kinds)


def learning_curves(comparison: Comparison) -> Figure | None:
    data: list[Trace] = []
    metric = comparison.metric
    for kind in comparison.kinds:
        for method in comparison.methods:
            rounds, values = over_rounds(method, kind, metric)
            if not rounds:
                continue
            mean, sd = _averages(values, metric)
            hover = f"<b>{safe(method.label)}</b><br>round %{{x}}: {reading(metric)}<extra></extra>"
            for trace in curve(method, list(map(float, rounds)), mean, sd, hover):
                data.append(trace | {"meta": trace["meta"] | {"view": kind}})
    if not data:
        return None
    views = kind_views(comparison)
    return Figure(
        description=f"The {metric} on the clients' test examples after each evaluated round, one line per method.",
        data=data,
        layout=layout(axis("Round"), axis(), ""),
        height=400,
        views=views,
        methods=comparison.methods,
    )


def bytes_against_accuracy(comparison: Comparison) -> Figure | None:
    """Methods that send nothing appear as level lines at their final accuracy: the others must rise above them."""
    data: list[Trace] = []
    metric = comparison.metric
    totals = [
        total
        for m in comparison.methods
        if (a := average({t.seed: t.final.bytes for t in m.counted})) and (total := a.mean)
    ]
    if not totals:
        return None
    reach = max(totals) / 1e6
    logarithmic = max(totals) > 20 * min(totals)
    start = min(totals) / 1e6 / 50 if logarithmic else 0.0
    for kind in comparison.kinds:
        for method in comparison.methods:
            rounds, values = over_rounds(method, kind, metric)
            if not rounds:
                continue
            mean, sd = _averages(values, metric)
            sent = _megabytes_until(method, rounds)
            name = safe(method.label)
            if sent[-1] == 0:
                data.append(
                    {
                        "type": "scatter",
                        "x": [start, reach],
                        "y": numbers([mean[-1], mean[-1]]),
                        "mode": "lines",
                        "line": {"color": method.style.color, "width": 2, "dash": "dot"},
                        "hovertemplate": f"<b>{name}</b><br>{reading(metric)}, sends nothing<extra></extra>",
                        "name": name,
                        "meta": {"method": method.index, "view": kind},
                    }
                )
                continue
            hover = f"<b>{name}</b><br>after %{{x:,.4~r}} MB: {reading(metric)}<extra></extra>"
            seen = [i for i, megabytes in enumerate(sent) if megabytes >= start]
            parts = [sent[i] for i in seen], [mean[i] for i in seen], [sd[i] for i in seen]
            for trace in curve(method, *parts, hover):
                data.append(trace | {"meta": trace["meta"] | {"view": kind}})
    if not data:
        return None
    views = kind_views(comparison)
    title = "Megabytes sent so far, all clients together"
    x = log_axis(title, start, reach) if logarithmic else axis(title)
    return Figure(
        description=f"The {metric} against the bytes sent so far, one line per method.",
        data=data,
        layout=layout(x, axis(), ""),
        height=380,
        views=views,
        methods=comparison.methods,
    )


def _megabytes_until(method: Method, rounds: list[int]) -> list[float]:
    """Megabytes sent up to each of the (ascending) rounds, mean over the counted seeds."""
    totals = [0.0] * len(rounds)
    for trial in method.counted:
        sent = dict(zip((r.number for r in trial.rounds), accumulate(r.bytes for r in trial.rounds), strict=True))
        for i, number in enumerate(rounds):
            totals[i] += sent[number]
    return [total / len(method.counted) / 1e6 for total in totals]


def client_accuracies(method: Method, kind: Kind) -> list[tuple[float, str]]:
    """(accuracy in %, what to say about the client) of every client and counted seed."""
    found = []
    for trial in method.counted:
        for client in trial.clients:
            value = client.values.get(f"{kind}_accuracy")
            if value is not None and finite(value):
                about = f"{client_label(client.client)}, seed {trial.seed}<br>{client.n_test} test examples"
                found.append((100 * value, about))
    return found


def distribution(comparison: Comparison) -> Figure | None:
    """A row per method, a dot per client and seed, and a box around the middle half."""
    rows = {
        (kind, method.index): client_accuracies(method, kind)
        for kind in comparison.kinds
        for method in comparison.methods
    }
    shown = [m for m in comparison.methods if any(rows[kind, m.index] for kind in comparison.kinds)]
    if not shown:
        return None
    dotted = max(sum(len(rows[kind, m.index]) for m in shown) for kind in comparison.kinds) <= MAX_DOTS
    data: list[Trace] = []
    for kind in comparison.kinds:
        for row, method in enumerate(shown):
            values = rows[kind, method.index]
            if not values:
                continue
            trace: Trace = {
                "x": numbers(value for value, _ in values),
                "y0": row,
                "orientation": "h",
                "line": {"color": method.style.color, "width": 1.5},
                "fillcolor": method.style.faded(0.14),
                "name": safe(method.label),
                "meta": {"view": kind},
            }
            if dotted:
                trace |= {
                    "type": "box",
                    "text": [text for _, text in values],
                    "hovertemplate": "%{x:.1f} %<br>%{text}<extra></extra>",
                    "hoveron": "points",
                    "width": 0.42,
                    "boxpoints": "all",
                    "jitter": 0.9,
                    "pointpos": 0,
                    "whiskerwidth": 0,
                    "marker": {"color": method.style.faded(0.62), "size": 5},
                }
            else:
                trace |= {
                    "type": "violin",
                    "width": 0.56,
                    "points": False,
                    "box": {"visible": True, "width": 0.2},
                    "spanmode": "hard",
                    "hoverinfo": "skip",
                }
            data.append(trace)
    labels = [
        {
            "text": safe(method.label),
            "xref": "paper",
            "x": 0,
            "y": row - 0.22,
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"size": 13, "color": INK},
        }
        for row, method in enumerate(shown)
    ]
    y = axis(showticklabels=False, showgrid=False, showline=False, range=[len(shown) - 0.66, -0.62], ticks="")
    base = layout(axis("Accuracy of a client, %", showgrid=True, showline=False, ticks=""), y, "")
    views = kind_views(comparison)
    return Figure(
        description="Accuracies of the single clients, one row per method.",
        data=data,
        layout=base | {"annotations": labels, "margin": {"l": 8, "r": 16, "t": 8, "b": 46}},
        height=60 + 62 * len(shown),
        views=tuple(View(view.key, view.label) for view in views),
    )


def cumulative_shares(comparison: Comparison) -> Figure | None:
    data: list[Trace] = []
    for kind in comparison.kinds:
        for method in comparison.methods:
            values = sorted(value for value, _ in client_accuracies(method, kind))
            if not values:
                continue
            n = len(values)
            steps = thinned([(value, 100 * (i + 1) / n) for i, value in enumerate(values)])
            data.append(
                {
                    "type": "scatter",
                    "x": numbers([values[0], *(value for value, _ in steps)]),
                    "y": numbers([0, *(share for _, share in steps)]),
                    "mode": "lines",
                    "line": {
                        "color": method.style.color,
                        "width": 2,
                        "dash": method.style.dash,
                        "shape": "hv",
                    },
                    "hovertemplate": f"<b>{safe(method.label)}</b><br>%{{y:.0f}} % of the clients<br>"
                    "reach at most %{x:.1f} %<extra></extra>",
                    "name": safe(method.label),
                    "meta": {"method": method.index, "view": kind},
                }
            )
    if not data:
        return None
    views = [
        View(
            view.key,
            view.label,
            {"xaxis.range": [min(t["x"][0] for t in data if t["meta"]["view"] == view.key) - 1, 101]},
        )
        for view in kind_views(comparison)
        if any(trace["meta"]["view"] == view.key for trace in data)
    ]
    return Figure(
        description="Share of the clients at or below each accuracy, one line per method.",
        data=data,
        layout=layout(
            axis("Accuracy of a client, %"),
            axis(range=[0, 101]),
            "Clients at or below this accuracy, %",
        ),
        height=340,
        views=tuple(views),
        methods=comparison.methods,
    )
