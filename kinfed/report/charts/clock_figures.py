"""The methods over simulated time, where runs have a clock: what waiting for slow clients costs."""

from __future__ import annotations

from kinfed.analysis import Comparison, Method
from kinfed.records import Kind
from kinfed.report.charts.figures import metric_figure, over_rounds, reading
from kinfed.report.drawing.chart import Figure, Trace, axis, escape, log_axis
from kinfed.report.drawing.marks import curve

SECONDS_PER_HOUR = 3600
LONG = 2 * SECONDS_PER_HOUR  # times from here on are drawn in hours


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
