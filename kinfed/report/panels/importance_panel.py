"""Columns of shared trees: their shares of all gains, and what the trees say along the first of them."""

from __future__ import annotations

from kinfed.analysis import Method
from kinfed.report.drawing import Figure, axis, escape, layout
from kinfed.report.drawing.looks import style_of
from kinfed.report.drawing.marks import line
from kinfed.report.panels.base import Panel, ranked_bars, seed_note
from kinfed.serving import importance as trees

MOST_CURVES = 6
NAMED = 3


def importance(method: Method) -> Panel | None:
    trials = [trial for trial in method.complete_trials if trees.has_importance(trial)]
    if not trials:
        return None
    seed = min(trial.seed for trial in trials)
    fit = trees.importance_of(method.run, method.algorithm, seed)
    first = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in fit.shares[:NAMED])
    text = (
        f"Splits of the shared trees gain most by {first}. The curves are what these trees say on average where a "
        f"column has a value, in {fit.unit}. Both come from the sums that grew the trees; what a client has beside "
        f"them is not in it.{seed_note(method, seed)}"
    )
    entries = [(share, f"{escape(name)}: {100 * share:.1f} %") for name, share in fit.shares if share > 0]
    trace, note = ranked_bars(method, entries, "%{text}")
    shape = layout(axis(showticklabels=False), axis(tickformat=".0%", nticks=5), f"share of gains by column{note}")
    figures = [Figure(f"Shares of {len(entries)} columns of all gains, in descending order.", [trace], shape, 220)]
    return Panel(
        "What the shared trees use", text, (*figures, *(_curve(method, one) for one in fit.curves[:MOST_CURVES]))
    )


def _curve(method: Method, one: trees.DependenceCurve) -> Figure:
    reach = (one.x[-1] - one.x[0]) / 20 if len(one.x) > 1 else 1.0
    x = (one.x[0] - reach, *one.x, one.x[-1] + reach)
    y = (*one.y, one.y[-1])
    trace = line(x, y, style_of(method).color, "%{x:.4g}: %{y:.3g}", name=method.label, shape="hv")
    about = f"What shared trees say along {one.name}."
    return Figure(about, [trace], layout(axis(nticks=5), axis(nticks=5), f"along {escape(one.name)}"), 200)
