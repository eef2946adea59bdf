"""ROC and calibration curves, a view for every client by name, a line for every method.

A client with few test rows has no curve worth drawing: it is named with its number of rows instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kinfed.analysis import Comparison, Method
from kinfed.records import Curves
from kinfed.report.drawing.chart import Figure, Trace, View, axis, escape, layout
from kinfed.report.drawing.marks import in_view, line, of_method
from kinfed.report.drawing.palette import MUTED, style_of

FEWEST_ROWS = 20  # of the test, below which no curve is drawn
FEWEST_OF_A_CLASS = 5  # for ROC; of several classes, beside the largest
FEWEST_IN_A_BIN = 3  # for a point of the calibration curve
MOST_SITES = 60  # on a page: those with most test rows

Draw = Callable[[Method, Curves, int], Trace | None]


@dataclass(frozen=True)
class SiteCurves:
    roc: Figure | None  # None where no client has enough rows
    calibration: Figure | None
    too_few: list[str]  # clients without curves, with their numbers of rows
    left_out: int  # clients with curves for which the page has no room


def site_curves(comparison: Comparison) -> SiteCurves | None:
    """None where no run has curves: a regression, too many clients, models that were not kept."""
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

    def figure(what: str, draw: Draw, x: str, y: str) -> Figure | None:
        data: list[Trace] = []
        for view, client in zip(views, drawn, strict=True):
            lines = [trace for method, curves in by_method for trace in _of_client(draw, method, curves, client)]
            data += in_view(view.key, [diagonal, *lines])
        methods = tuple(method for method, _ in by_method)
        ends = [-2, 102]
        description = f"{what} of a client's personal models, one line per method."
        plane = layout(axis(x, range=ends), axis(range=ends), y)
        return Figure(description, data, plane, 420, views, None, methods) if drawn else None

    return SiteCurves(
        figure("ROC curves", _roc_line, "False-positive rate, %", "True-positive rate, %"),
        figure("Calibration", _calibration_line, predicted, "Share of rows where it is so, %"),
        too_few,
        len(enough) - len(drawn),
    )


def curves_of(method: Method) -> Curves | None:
    """Curves of all seeds together; None unless all complete trials have curves of the same clients."""
    known = [method.run.curves.get((method.algorithm, trial.seed)) for trial in method.complete_trials]
    parts = [curves for curves in known if curves is not None]
    if not parts or len(parts) < len(known) or len({curves.clients for curves in parts}) > 1:
        return None
    joined, seeds = Curves.joined(parts), len(parts)
    return replace(joined, rows=joined.rows / seeds, smaller=joined.smaller / seeds)


def _of_client(draw: Draw, method: Method, curves: Curves, client: str) -> list[Trace]:
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
