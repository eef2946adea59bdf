"""Results as frames of pandas, polars or pyarrow, and as plotly figures.

    summary_rows   a row per method and seed: where it stands after its last evaluated round
    history_rows   a row per method, seed and round
    client_rows    a row per method, seed and client, after the last round
    coefficient_rows   a row per coefficient of a method by sums

Columns of metrics are called personal_accuracy, server_accuracy and so on; a value is missing if there was no
figure: a round that was not evaluated, a method without a server model, a client without test examples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from math import exp
from typing import TYPE_CHECKING, Any

from kinfed.analysis import Comparison
from kinfed.errors import ConfigError, unknown_name
from kinfed.records import KINDS, FinalRecord, Kind, RoundRecord, RunRecord, TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import pyarrow as pa

    from kinfed.report.drawing import Figure, Layout, Trace
    from kinfed.serving import coefficients as fits

BACKENDS = ("pandas", "polars", "pyarrow")
Row = dict[str, Any]
_TEXT = ("algorithm", "client", "name")
_WHOLE = ("seed", "round", "rounds", "took_part", "active", "dropped", "bytes_down", "bytes_up", "n_train", "n_test")
_YES_NO = ("finished", "diverged")
_FIRST = (  # columns in this order, then metrics by alphabet: those of personal models before the server's
    "algorithm", "seed", "round", "client", "rounds", "finished", "diverged", "n_train", "n_test", "active", "dropped",
    "took_part", "bytes_down", "bytes_up", "seconds", "clock", "epsilon", "name", "estimate", "se", "low", "high", "p",
    "profile_low", "profile_high",
)  # fmt: skip


def summary_rows(run: RunRecord) -> list[Row]:
    return [_row(trial, trial.final, ("rounds", "diverged")) | {"finished": trial.finished} for trial in run.trials]


def history_rows(run: RunRecord) -> list[Row]:
    return [
        _row(trial, entry, ("active", "dropped"))
        | {"round": entry.number}
        | ({} if entry.clock is None else {"clock": entry.clock})
        for trial in run.trials
        for entry in trial.rounds
    ]


def _row(trial: TrialRecord, record: RoundRecord | FinalRecord, names: Sequence[str]) -> Row:
    costs = ("took_part", "bytes_down", "bytes_up", "seconds")
    cells = {name: getattr(record, name) for name in (*names, *costs)}
    metrics = {f"{kind}_{name}": v for kind in KINDS for name, v in record.metrics.get(kind, {}).items()}
    return {"algorithm": trial.algorithm, "seed": trial.seed, **cells, **metrics}


def client_rows(run: RunRecord) -> list[Row]:
    names = ("client", "n_train", "n_test", "took_part")
    return [
        {"algorithm": trial.algorithm, "seed": trial.seed, **client.values}
        | {name: getattr(client, name) for name in names}
        for trial in run.trials
        for client in trial.clients
    ]


def coefficient_rows(fit: fits.Coefficients) -> list[Row]:
    """Coefficients, with their ratios where people read these; with a profile also the deviations that it knows."""
    name = fit.ratio.replace(" ", "_")
    rows: list[Row] = [asdict(row) | ({name: exp(min(row.estimate, 700.0))} if name else {}) for row in fit.rows]
    if fit.profile is None:
        return rows
    known = {**fit.profile.rows, **{name: ends for name, _, ends in fit.deviations()}}
    rows += [{"name": name, "estimate": value} for name, value, _ in fit.deviations()]
    ends = [known.get(row["name"], (None, None)) for row in rows]
    return [row | {"profile_low": low, "profile_high": high} for row, (low, high) in zip(rows, ends, strict=True)]


def to_native(rows: Sequence[Row], backend: str | None) -> Any:
    """The rows as a frame of the `backend`, by default the first of BACKENDS that is installed."""
    chosen: Any = backend or next(name for name in BACKENDS if importlib.util.find_spec(name) is not None)
    if chosen not in BACKENDS:
        raise unknown_name("backend of frames", chosen, BACKENDS)
    if importlib.util.find_spec(chosen) is None:
        raise ConfigError(f"{chosen} is not installed; pip install {chosen}, or ask for one of {', '.join(BACKENDS)}")
    import narwhals as nw
    import pyarrow as pa  # both for frames alone

    present = {name for row in rows for name in row}
    names = [*(name for name in _FIRST if name in present), *sorted(present - set(_FIRST))]
    table = pa.table({name: _column(name, [row.get(name) for row in rows]) for name in names})
    return table if chosen == "pyarrow" else nw.from_arrow(table, backend=chosen).to_native()


def _column(name: str, values: list[Any]) -> pa.Array:
    import pyarrow as pa

    if name in _TEXT:
        return pa.array(values, pa.string())
    if name in _YES_NO or all(isinstance(value, bool) for value in values):
        return pa.array(values, pa.bool_())
    if name in _WHOLE:
        return pa.array([None if value is None else round(value) for value in values], pa.int64())
    return pa.array(values, pa.float64())


def plot(comparison: Comparison, what: str, kind: Kind) -> go.Figure:
    """One view of a figure of the report, with a legend and a background of its own: a page has these around it."""
    from kinfed.report import bytes_against_accuracy, distribution, learning_curves

    plots = {"rounds": learning_curves, "bytes": bytes_against_accuracy, "clients": distribution}
    if what not in plots:
        raise unknown_name("plot", what, plots)
    if kind not in KINDS:
        raise unknown_name("kind of model", kind, KINDS)
    figure = plots[what](comparison)
    traces, layout = ([], {}) if figure is None else figure.shown(kind)
    if figure is None or not traces:
        raise ConfigError(
            f"there is nothing to plot of the {kind} models over {what}: no method has been evaluated so, or sent "
            "anything; `result.to_frame()` shows what was measured"
        )
    return _plotly(figure, traces, layout)


def as_plotly(figure: Figure) -> go.Figure:
    """A figure of the report as it begins, for notebooks."""
    return _plotly(figure, *figure.shown(figure.initial_view))


def _plotly(figure: Figure, traces: list[Trace], layout: Layout) -> go.Figure:
    import plotly.graph_objects as go

    from kinfed.report.drawing import BACKGROUND

    legend = bool(figure.methods)
    layout |= {"paper_bgcolor": BACKGROUND, "plot_bgcolor": BACKGROUND, "height": figure.height, "showlegend": legend}
    if legend:
        layout["legend"] |= {"y": -0.2}
        layout["margin"] |= {"b": 80}
    # Entries of a legend are lines, not the bands around them.
    return go.Figure([{"showlegend": trace.get("fill") is None} | trace for trace in traces], layout)
