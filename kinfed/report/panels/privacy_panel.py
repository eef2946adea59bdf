"""What a private run promises to whom, and what it costs in accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kinfed.report.chart import Figure, Trace, axis, client_label, curve, layout, log_axis, numbers, safe
from kinfed.report.comparison import Comparison, Method
from kinfed.report.figures import SCALES, kind_views, over_rounds, reading
from kinfed.report.panels.panel import Panel, panel, series
from kinfed.report.statistics import average
from kinfed.runs.reader import ClientResult, Kind

MAX_BARS = 200


@panel
def privacy(method: Method) -> Panel | None:
    recorded = series(method, "privacy")
    if not recorded:
        return None
    last = [by_round[max(by_round)] for by_round in recorded.values()]
    clients = [client for trial in method.counted for client in trial.clients if "epsilon" in client.values]
    return Panel("Privacy", _in_words(last, clients), (_each_client(method, clients),) if clients else ())


def _in_words(last: Sequence[dict[str, Any]], clients: Sequence[ClientResult]) -> str:
    """`last`: what every seed recorded at its last evaluation."""
    one = last[0]
    settings = f"clipping norm {one['clip']:g}, noise {_range([float(entry['noise']) for entry in last])} times that"
    largest = [entry["epsilon_max"] for entry in last]
    if None in largest:
        text = f"Gradients were clipped, but no noise was added ({settings}): there is no privacy, ε is infinite."
    else:
        delta = f"{one['delta']:g}".replace("e-0", "e-")
        text = f"No client’s ε exceeds {max(largest):.3g} at δ = {delta} ({settings})"
        if clients:
            text += f"; the mean over clients is {sum(c.values['epsilon'] for c in clients) / len(clients):.3g}"
        text += (
            ". This covers every gradient of a client’s training examples in all rounds, against whoever sees all that "
            "the client sent, and its model."
        )
    if refused := max(int(entry["refused"]) for entry in last):
        text += f" {_clients(refused)} had to stop early to stay within the budget."
    if one["not_covered"]:
        text += f" Not covered by ε: {'; '.join(map(str, one['not_covered']))}."
    return text


def _clients(count: int) -> str:
    return "One client" if count == 1 else f"{count} clients"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _each_client(method: Method, clients: Sequence[ClientResult]) -> Figure:
    ordered = sorted(clients, key=lambda client: client.values["epsilon"], reverse=True)
    step = math.ceil(len(ordered) / MAX_BARS)
    shown = ordered[::step]
    data: list[Trace] = [
        {
            "type": "bar",
            "x": list(range(1, len(shown) + 1)),
            "y": numbers(client.values["epsilon"] for client in shown),
            "text": [f"{client_label(client.client)}, {client.n_train} training examples" for client in shown],
            "textposition": "none",
            "marker": {"color": method.style.color},
            "hovertemplate": "ε = %{y:.3g}<br>%{text}<extra></extra>",
            "name": safe(method.label),
        }
    ]
    of = "" if step == 1 else f", every {step}th"
    seeds = " of all seeds" if len(method.counted) > 1 else ""
    return Figure(
        description=f"ε of every client under {method.label}, sorted.",
        data=data,
        layout=layout(
            axis(f"Clients{seeds}{of}", showticklabels=False, ticks=""),
            axis(nticks=5, rangemode="tozero"),
            "ε of each client, least private first",
        ),
        height=280,
    )


def accuracy_against_epsilon(comparison: Comparison) -> Figure | None:
    """Private methods as lines over the ε spent so far, the others as level lines where they end."""
    spent = {method.index: _spent(method) for method in comparison.methods}
    everything = [value for by_round in spent.values() for value in by_round.values()]
    if not everything:
        return None
    low, high = min(everything), max(everything)
    data: list[Trace] = []
    for kind in comparison.kinds:
        for method in comparison.methods:
            for trace in _line(method, kind, comparison.metric, spent[method.index], (low, high)):
                data.append(trace | {"meta": trace["meta"] | {"view": kind}})
    title = "Largest ε of any client so far"
    return Figure(
        description=f"The {comparison.metric} against the ε spent so far, one line per method.",
        data=data,
        layout=layout(log_axis(title, low, high) if high > 10 * low else axis(title), axis(), ""),
        height=380,
        views=kind_views(comparison),
        methods=comparison.methods,
    )


def _spent(method: Method) -> dict[int, float]:
    """{round: ε_max, mean over seeds}, where it is finite and more than 0."""
    by_round: dict[int, dict[int, float]] = {}
    for seed, rounds in series(method, "privacy").items():
        for number, figures in rounds.items():
            if figures["epsilon_max"]:
                by_round.setdefault(number, {})[seed] = float(figures["epsilon_max"])
    return {number: a.mean for number, values in by_round.items() if (a := average(values)) is not None}


def _line(method: Method, kind: Kind, metric: str, spent: dict[int, float], ends: tuple[float, float]) -> list[Trace]:
    rounds, values = over_rounds(method, kind, metric)
    averages = [(number, a) for number, by_seed in zip(rounds, values, strict=True) if (a := average(by_seed))]
    if not averages:
        return []
    name, scale = safe(method.label), SCALES[metric]
    if not spent:
        level = scale * averages[-1][1].mean
        return [
            {
                "type": "scatter",
                "x": numbers(ends),
                "y": numbers([level, level]),
                "mode": "lines",
                "line": {"color": method.style.color, "width": 2, "dash": "dot"},
                "hovertemplate": f"<b>{name}</b><br>{reading(metric)}, not private<extra></extra>",
                "name": name,
                "meta": {"method": method.index},
            }
        ]
    here = [(spent[number], a) for number, a in averages if number in spent]
    return curve(
        method,
        [epsilon for epsilon, _ in here],
        [scale * a.mean for _, a in here],
        [None if a.sd is None else scale * a.sd for _, a in here],
        f"<b>{name}</b><br>at ε = %{{x:.3g}}: {reading(metric)}<extra></extra>",
    )
