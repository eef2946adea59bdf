"""Survival of every client: Kaplan-Meier curves of its training rows, and the numbers at risk."""

from collections.abc import Mapping

from kinfed.data import FEWEST_AT_RISK, Description
from kinfed.report.drawing import Figure, Trace, View, axis, escape, layout
from kinfed.report.drawing.looks import DASHES, HUES
from kinfed.report.drawing.marks import in_view, line
from kinfed.report.tables import TableColumn, TextTable

MOST_CURVES = 14  # in a figure: the clients with most training rows


def survival_figure(federations: Mapping[int, Description]) -> Figure | None:
    """One view per seed; None if no problem is one of survival."""
    known = {seed: one for seed, one in sorted(federations.items()) if one.survival is not None}
    if not known:
        return None
    views = tuple(View(f"seed{seed}", f"seed {seed}") for seed in known) if len(known) > 1 else ()
    data: list[Trace] = []
    for seed, federation in known.items():
        traces = _curves(federation)
        data += in_view(f"seed{seed}", traces) if views else traces
    plane = layout(axis("Time", rangemode="tozero"), axis(range=[-2, 102]), "Without the event, %", legend_below=True)
    plane["showlegend"] = True
    return Figure("Kaplan-Meier curves of every client's training rows.", data, plane, 420, views)


def _curves(federation: Description) -> list[Trace]:
    table = federation.survival
    assert table is not None
    traces = []
    for number, k in enumerate(largest(federation)):
        points = [(t, 100 * y) for t, y in zip(table["times"], table["curves"][k], strict=True) if y is not None]
        name = federation.names[k]
        hover = f"<b>{escape(name)}</b><br>%{{y:.0f}} % at %{{x:.4~g}}"
        color, dash = HUES[number % len(HUES)], DASHES[number // len(HUES) % len(DASHES)]
        xs, ys = [t for t, _ in points], [y for _, y in points]
        trace = line(xs, ys, color, hover, name=name, dash=dash, shape="hv")
        traces.append({**trace, "showlegend": True})
    return traces


def largest(federation: Description) -> list[int]:
    """Places of the clients that are drawn."""
    sizes = federation.sizes()
    return sorted(sorted(range(len(sizes)), key=lambda k: -sizes[k])[:MOST_CURVES])


def at_risk_table(federation: Description) -> TextTable:
    """Rows at risk at a few times; small numbers are not written."""
    table = federation.survival
    assert table is not None
    heads = [TableColumn("Client", "name"), TableColumn("Events")]
    heads += [TableColumn(f"{t:.4g}", group="at risk at time") for t in table["table_times"]]
    few = f"under {FEWEST_AT_RISK}"
    rows = [
        [federation.names[k], *(few if n is None else f"{n:,}" for n in (table["events"][k], *table["at_risk"][k]))]
        for k in largest(federation)
    ]
    return TextTable.of("Training rows at risk", heads, rows)
