"""Figures that set the methods side by side: over rounds, bytes, simulated time and clients; who is better off than
with training alone; and, client by client, ROC and calibration curves."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median

from kinfed.analysis import Average, Comparison, Gain, Method, MetricStyle, average, metric_style
from kinfed.records import Curves, Kind, finite
from kinfed.report.drawing import Figure, Layout, Trace, View, axis, escape, layout, log_axis, y_title
from kinfed.report.drawing.chart import client_label, note, round_axis, size_axis, subsampled
from kinfed.report.drawing.looks import INK, LOCAL, MUTED, faded, style_of
from kinfed.report.drawing.marks import area, bars, curve, dots, in_view, line, method_level, of_method, spread

KIND_NAMES: dict[Kind, str] = {"personal": "Personal models", "server": "Server model"}
MAX_DOTS = 4000  # beyond this, shapes instead of single clients
SECONDS_PER_HOUR = 3600
LONG = 2 * SECONDS_PER_HOUR  # times from here on are drawn in hours
MAX_BARS = 240
ACCURACY = metric_style("accuracy")
LOST = faded(INK, 0.7)
FEWEST_ROWS = 20  # of the test, below which no curve of a client is drawn
FEWEST_OF_A_CLASS = 5  # for ROC; of several classes, beside the largest
FEWEST_IN_A_BIN = 3  # for a point of the calibration curve
MOST_SITES = 60  # on a page: those with most test rows

Gains = list[tuple[Method, list[Gain]]]
DrawCurve = Callable[[Method, Curves, int], Trace | None]


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
    """The text on hovering a curve: mean, spread if known, unit."""
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
    sent = [average({trial.seed: trial.final.bytes for trial in one.complete_trials}) for one in comparison.methods]
    totals = [entry.mean / 1e6 for entry in sent if entry and entry.mean]
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
    totals: dict[int, float] = defaultdict(float)
    for trial in method.complete_trials:
        for entry, total in zip(trial.rounds, accumulate(entry.bytes for entry in trial.rounds), strict=True):
            totals[entry.number] += total / len(method.complete_trials) / 1e6
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
    totals: dict[int, float] = defaultdict(float)
    for trial in method.complete_trials:
        for entry in trial.rounds:
            if entry.clock is not None:
                totals[entry.number] += entry.clock / len(method.complete_trials)
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


@dataclass(frozen=True)
class SiteCurves:
    roc: Figure | None  # None if no client has enough rows
    calibration: Figure | None
    too_few: list[str]  # clients without curves, with their numbers of rows
    left_out: int  # clients with curves for which the page has no room


def site_curves(comparison: Comparison) -> SiteCurves | None:
    """None if no run has curves: a regression, too many clients, models that were not kept. A client with few test
    rows has no curve worth drawing: it is named with its number of rows instead."""
    by_method = [(method, curves) for method in comparison.methods if (curves := curves_of(method)) is not None]
    if not by_method:
        return None
    rows = {client: n for _, curves in by_method for client, n in zip(curves.clients, curves.rows, strict=True)}
    rarer = {client: n for _, curves in by_method for client, n in zip(curves.clients, curves.smaller, strict=True)}
    enough = [client for client in rows if rows[client] >= FEWEST_ROWS and rarer[client] >= FEWEST_OF_A_CLASS]
    drawn = sorted(enough, key=lambda client: -rows[client])[:MOST_SITES]
    too_few = [
        f"{client} ({rows[client]:,.0f} test rows, {rarer[client]:,.0f} of them outside of its largest class)"
        for client in rows
        if client not in enough
    ]
    views = tuple(View(f"site{n}", f"{client} ({rows[client]:,.0f} test rows)") for n, client in enumerate(drawn))
    is_binary = all(federation.num_classes == 2 for federation in comparison.federations.values())
    predicted = f"Probability of the {'second' if is_binary else 'predicted'} class, %"
    diagonal = line((0, 100), (0, 100), MUTED, "", width=1, dash="dot")

    def figure(what: str, draw: DrawCurve, x: str, y: str) -> Figure | None:
        data: list[Trace] = []
        for view, client in zip(views, drawn, strict=True):
            lines = [trace for method, curves in by_method for trace in _of_client(draw, method, curves, client)]
            data += in_view(view.key, [diagonal, *lines])
        methods = tuple(method for method, _ in by_method)
        description = f"{what} of a client's personal models, one line per method."
        plane = layout(axis(x, range=[-2, 102]), axis(range=[-2, 102]), y)
        return Figure(description, data, plane, 420, views, None, methods) if drawn else None

    roc = figure("ROC curves", _roc_line, "False-positive rate, %", "True-positive rate, %")
    calibration = figure("Calibration", _calibration_line, predicted, "Share of rows where it is so, %")
    return SiteCurves(roc, calibration, too_few, len(enough) - len(drawn))


def curves_of(method: Method) -> Curves | None:
    """Curves of all seeds together; None unless all complete trials have curves of the same clients."""
    known = [method.run.curves.get((method.algorithm, trial.seed)) for trial in method.complete_trials]
    parts = [curves for curves in known if curves is not None]
    if not parts or len(parts) < len(known) or len({curves.clients for curves in parts}) > 1:
        return None
    joined, seeds = Curves.joined(parts), len(parts)
    return replace(joined, rows=joined.rows / seeds, smaller=joined.smaller / seeds)


def _of_client(draw: DrawCurve, method: Method, curves: Curves, client: str) -> list[Trace]:
    if client not in curves.clients:
        return []
    trace = draw(method, curves, curves.clients.index(client))
    return [] if trace is None else of_method(method, [trace])


def _roc_line(method: Method, curves: Curves, place: int) -> Trace | None:
    if not curves.positives[place]:
        return None
    hover = f"<b>{escape(method.label)}</b><br>finds %{{y:.0f}} % at %{{x:.0f}} % false alarms"
    x, y = 100 * Curves.FALSE_POSITIVE_RATES, 100 * curves.roc[place] / curves.positives[place]
    return line(x.tolist(), y.tolist(), style_of(method).color, hover, name=method.label, dash=style_of(method).dash)


def _calibration_line(method: Method, curves: Curves, place: int) -> Trace | None:
    bins = curves.bins[place]
    filled = bins[bins[:, 0] >= FEWEST_IN_A_BIN]
    if not len(filled):
        return None
    hover = f"<b>{escape(method.label)}</b><br>says %{{x:.0f}} %, is %{{y:.0f}} % (%{{text}} rows)"
    x, y = 100 * filled[:, 1] / filled[:, 0], 100 * filled[:, 2] / filled[:, 0]
    text = [f"{n:,.0f}" for n in filled[:, 0]]
    color, dash = style_of(method).color, style_of(method).dash
    return line(x.tolist(), y.tolist(), color, hover, name=method.label, dash=dash, dots=True, text=text)
