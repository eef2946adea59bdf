"""The CSV files that a page carries: methods, seeds, rounds and clients in the stored units, for a spreadsheet."""

from __future__ import annotations

from kinfed.analysis import Comparison, average
from kinfed.records import KINDS
from kinfed.report.html import Download
from kinfed.report.method_tables import ALL_COLUMNS, CLIENT_FIGURES, COST_COLUMNS
from kinfed.report.tables import csv_text

_METRIC_KEYS = [(kind, metric) for kind in KINDS for metric in CLIENT_FIGURES]


def downloads(comparison: Comparison) -> list[Download]:
    return [
        Download("methods.csv", "one line per method", results_csv(comparison)),
        Download("seeds.csv", "one line per method and seed", seeds_csv(comparison)),
        Download("rounds.csv", "one line per method, seed and round", rounds_csv(comparison)),
        Download("clients.csv", "one line per method, seed and client", clients_csv(comparison)),
    ]


def results_csv(comparison: Comparison) -> str:
    """One line per method: mean, standard deviation and number of seeds of every figure, in the stored units."""
    rows: list[list[object]] = []
    for method in comparison.methods:
        row: list[object] = [method.run.label, method.algorithm, method.final_round, len(method.complete_trials)]
        for column in ALL_COLUMNS:
            scale = column.scale if column in COST_COLUMNS else 1.0  # bytes are in megabytes everywhere
            entry = average(column.values(method))
            row += ["", ""] if entry is None else [_number(entry.mean, scale), _number(entry.sd, scale)]
        rows.append(row)
    keys = (key for column in ALL_COLUMNS for key in (column.key, f"{column.key}_sd"))
    return csv_text(["run", "algorithm", "rounds", "seeds", *keys], rows)


def seeds_csv(comparison: Comparison) -> str:
    """One line per method and seed."""
    rows = []
    for method in comparison.methods:
        for trial in method.trials:
            final, megabytes = trial.final, trial.final.bytes / 1e6
            figures = [final.metrics.get(kind, {}).get(metric) for kind, metric in _METRIC_KEYS]
            figures += [megabytes / max(final.rounds, 1), megabytes, final.seconds]
            done = "yes" if trial.finished else "no"
            start = [method.run.label, method.algorithm, trial.seed, trial.round, done]
            rows.append([*start, *map(_number, figures)])
    return csv_text(["run", "algorithm", "seed", "round", "finished", *(c.key for c in ALL_COLUMNS)], rows)


def rounds_csv(comparison: Comparison) -> str:
    """One line per method, seed and round."""
    header = ["run", "algorithm", "seed", "round", "seconds", "active", "dropped", "bytes_down", "bytes_up"]
    rows = [
        [
            *(method.run.label, method.algorithm, trial.seed, entry.number, _number(entry.seconds)),
            *(entry.active, entry.dropped, _number(entry.bytes_down), _number(entry.bytes_up)),
            *(_number(entry.metrics.get(kind, {}).get(metric)) for kind, metric in _METRIC_KEYS),
        ]
        for method in comparison.methods
        for trial in method.trials
        for entry in trial.rounds
    ]
    return csv_text([*header, *(f"{kind}_{metric}" for kind, metric in _METRIC_KEYS)], rows)


def clients_csv(comparison: Comparison) -> str:
    """One line per method, seed and client, after the final round."""
    every = [
        (method, trial, client) for method in comparison.methods for trial in method.trials for client in trial.clients
    ]
    names = list(dict.fromkeys(name for _, _, client in every for name in client.values))
    rows = []
    for method, trial, client in every:
        start = [method.run.label, method.algorithm, trial.seed, client.client, client.n_train, client.n_test]
        rows.append([*start, *(_number(client.values.get(name)) for name in names)])
    return csv_text(["run", "algorithm", "seed", "client", "n_train", "n_test", *names], rows)


def _number(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.10g}"
