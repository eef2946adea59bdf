"""Figures that set the methods side by side: over rounds, bytes, simulated time and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from kinfed.analysis import Average, Comparison, Method, average, metric_style
from kinfed.records import Kind, finite
from kinfed.report.drawing.chart import (
    Figure,
    Layout,
    Trace,
    View,
    axis,
    client_label,
    escape,
    layout,
    log_axis,
    note,
    round_axis,
    subsampled,
    y_title,
)
from kinfed.report.drawing.marks import curve, in_view, line, method_level, of_method, spread
from kinfed.report.drawing.palette import style_of

KIND_NAMES: dict[Kind, str] = {"personal": "Personal models", "server": "Server model"}
MAX_DOTS = 4000  # beyond this, shapes instead of single clients
SECONDS_PER_HOUR = 3600
LONG = 2 * SECONDS_PER_HOUR  # times from here on are drawn in hours


def over_rounds(method: Method, kind: Kind, metric: str) -> dict[int, Average]:
    """The metric, scaled for people, in the rounds in which every complete trial was evaluated."""
    by_round: dict[int, dict[int, float]] = {}
    scale = metric_style(metric).scale
    for trial in method.complete_trials:
        for entry in trial.rounds:
            if metric in entry.metrics.get(kind, {}):
                by_round.setdefault(entry.number, {})[trial.seed] = scale * entry.metrics[kind][metric]
    return {
        number: mean
        for number, values in sorted(by_round.items())
        if len(values) == len(method.complete_trials) and (mean := average(values)) is not None
    }


def reading(metric: str, spread: str = "%{customdata}") -> str:
    """The text on hovering a curve: mean, spread where there is one, unit."""
    style = metric_style(metric)
    return f"%{{y:{'.1f' if style.in_percent else '.4g'}}}{spread}{style.unit}"


def kind_views(comparison: Comparison) -> tuple[View, ...]:
    names, what = [(kind, KIND_NAMES[kind]) for kind in comparison.kinds], comparison.style.axis_title
    return tuple(View(kind, name, y_title(f"{name}: {what}")) for kind, name in names)


def metric_figure(
    comparison: Comparison, draw: Callable[[Method, Kind], list[Trace]], x: Layout, against: str, height: int = 380
) -> Figure | None:
    """The metric of every method against something, a view for each kind of model."""
    pairs = [(kind, method) for kind in comparison.kinds for method in comparison.methods]
    data = [trace for kind, method in pairs for trace in in_view(kind, draw(method, kind))]
    description = f"The {comparison.metric} {against}, one line per method."
    views, methods = kind_views(comparison), comparison.methods
    return Figure(description, data, layout(x, axis(), ""), height, views, methods=methods) if data else None


def learning_curves(comparison: Comparison) -> Figure | None:
    def draw(method: Method, kind: Kind) -> list[Trace]:
        by_round = over_rounds(method, kind, comparison.metric)
        hover = f"<b>{escape(method.label)}</b><br>round %{{x}}: {reading(comparison.metric)}"
        return curve(method, by_round.items(), hover) if by_round else []

    trials = (trial for method in comparison.methods for trial in method.complete_trials)
    x = round_axis(entry.number for trial in trials for entry in trial.rounds if entry.metrics)
    against = "on the clients' test examples after each evaluated round"
    return metric_figure(comparison, draw, x, against, height=400)


def bytes_against_accuracy(comparison: Comparison) -> Figure | None:
    """Methods that send nothing appear as level lines at their final accuracy: the others must rise above them."""
    metric = comparison.metric
    totals = [
        entry.mean / 1e6
        for method in comparison.methods
        if (entry := average({t.seed: t.final.bytes for t in method.complete_trials})) and entry.mean
    ]
    if not totals:
        return None
    logarithmic = max(totals) > 20 * min(totals)
    start, end = min(totals) / 50 if logarithmic else 0.0, max(totals)

    def draw(method: Method, kind: Kind) -> list[Trace]:
        by_round = over_rounds(method, kind, metric)
        if not by_round:
            return []
        name, sent = f"<b>{escape(method.label)}</b><br>", _megabytes_until(method)
        if sent[max(by_round)] == 0:
            hover = f"{name}{reading(metric, spread='')}, sends nothing"
            return [method_level(method, (start, end), by_round[max(by_round)].mean, hover)]
        points = [(sent[number], mean) for number, mean in by_round.items() if sent[number] >= start]
        return curve(method, points, f"{name}after %{{x:,.4~r}} MB: {reading(metric)}")

    title = "Megabytes sent so far, all clients together"
    x = log_axis(title, start, end) if logarithmic else axis(title)
    return metric_figure(comparison, draw, x, "against the bytes sent so far")


def _megabytes_until(method: Method) -> dict[int, float]:
    """Megabytes sent up to each round, mean over the complete trials."""
    totals: dict[int, float] = {}
    for trial in method.complete_trials:
        sent = accumulate(entry.bytes for entry in trial.rounds)
        for entry, total in zip(trial.rounds, sent, strict=True):
            totals[entry.number] = totals.get(entry.number, 0.0) + total / len(method.complete_trials) / 1e6
    return totals


def metric_over_time(comparison: Comparison) -> Figure | None:
    """The metric after each evaluated round, against the simulated time of its end."""
    times = {method.label: _seconds_until(method) for method in comparison.methods}
    ends = [max(by_round.values()) for by_round in times.values() if by_round]
    if not ends:
        return None
    unit, scale = ("hours", 1 / SECONDS_PER_HOUR) if max(ends) > LONG else ("seconds", 1.0)

    def draw(method: Method, kind: Kind) -> list[Trace]:
        by_round, until = over_rounds(method, kind, comparison.metric), times[method.label]
        points = [(scale * until[number], mean) for number, mean in by_round.items() if until.get(number)]
        hover = f"<b>{escape(method.label)}</b><br>after %{{x:,.4~r}} {unit}: {reading(comparison.metric)}"
        return curve(method, points, hover) if points else []

    title = f"Simulated {unit} since the start"
    logarithmic = max(ends) > 20 * min(ends)
    x = log_axis(title, scale * min(ends) / 50, scale * max(ends)) if logarithmic else axis(title)
    return metric_figure(comparison, draw, x, "over simulated time")


def _seconds_until(method: Method) -> dict[int, float]:
    """Simulated seconds at the end of each round, mean over the complete trials; empty without a clock."""
    totals: dict[int, float] = {}
    for trial in method.complete_trials:
        for entry in trial.rounds:
            if entry.clock is not None:
                totals[entry.number] = totals.get(entry.number, 0.0) + entry.clock / len(method.complete_trials)
    return totals


def client_accuracies(method: Method, kind: Kind) -> list[tuple[float, str]]:
    """(accuracy in %, what to say about the client) of every client that took part, and complete trial."""
    return [
        (100 * value, f"{client_label(client.client)}, seed {trial.seed}<br>{client.n_test} test examples")
        for trial in method.complete_trials
        for client in trial.participants
        if (value := client.values.get(f"{kind}_accuracy")) is not None and finite(value)
    ]


def _by_kind(comparison: Comparison) -> Iterator[tuple[Kind, Method, list[tuple[float, str]]]]:
    for kind in comparison.kinds:
        for method in comparison.methods:
            if values := client_accuracies(method, kind):
                yield kind, method, values


def distribution(comparison: Comparison) -> Figure | None:
    """A row per method, a dot per client and seed, and a box around the middle half."""
    every = list(_by_kind(comparison))
    present = [method for method in comparison.methods if any(method is m for _, m, _ in every)]
    if not present:
        return None
    counts = [sum(len(values) for kind, _, values in every if kind == one) for one in comparison.kinds]
    data: list[Trace] = []
    for kind, method, values in every:
        text = [text for _, text in values] if max(counts) <= MAX_DOTS else None
        row, color = present.index(method), style_of(method).color
        data += in_view(kind, [spread((v for v, _ in values), row, color, name=method.label, text=text)])
    x = axis("Accuracy of a client, %", showgrid=True, showline=False, ticks="")
    y = axis(showticklabels=False, showgrid=False, showline=False, range=[len(present) - 0.66, -0.62], ticks="")
    labels = [
        note(escape(method.label), 0, row - 0.22, xref="paper", yanchor="bottom") for row, method in enumerate(present)
    ]
    shape = layout(x, y, "", annotations=labels, margin={"l": 8, "r": 16, "t": 8, "b": 46})
    views = tuple(View(view.key, view.label) for view in kind_views(comparison))
    return Figure("Accuracies of the single clients, one row per method.", data, shape, 60 + 62 * len(present), views)


def cumulative_shares(comparison: Comparison) -> Figure | None:
    data: list[Trace] = []
    lowest: dict[str, float] = {}
    for kind, method, values in _by_kind(comparison):
        ordered = sorted(value for value, _ in values)
        lowest[kind] = min(lowest.get(kind, 100.0), ordered[0])
        steps = subsampled([(value, 100 * (i + 1) / len(ordered)) for i, value in enumerate(ordered)])
        hover = f"<b>{escape(method.label)}</b><br>%{{y:.0f}} % of the clients<br>reach at most %{{x:.1f}} %"
        step_line = line(
            [ordered[0], *(value for value, _ in steps)], [0.0, *(share for _, share in steps)], style_of(method).color,
            hover, name=method.label, dash=style_of(method).dash, shape="hv",
        )  # fmt: skip
        data += in_view(kind, of_method(method, [step_line]))
    if not data:
        return None
    views = tuple(
        View(view.key, view.label, {"xaxis.range": [lowest[view.key] - 1, 101]})
        for view in kind_views(comparison)
        if view.key in lowest
    )
    shape = layout(axis("Accuracy of a client, %"), axis(range=[0, 101]), "Clients at or below this accuracy, %")
    description = "Share of the clients at or below each accuracy, one line per method."
    return Figure(description, data, shape, 340, views, methods=comparison.methods)
