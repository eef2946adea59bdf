"""The CSV files that a page carries for a spreadsheet: figures by method, seed, round and client."""

from __future__ import annotations

from kinfed.analysis import Comparison, average
from kinfed.report.html import Download
from kinfed.report.method_tables import ALL_COLUMNS, COST_COLUMNS, METRIC_KEYS
from kinfed.report.tables import csv_text


def downloads(comparison: Comparison) -> list[Download]:
    files = {
        ("methods.csv", "method"): results_csv, ("seeds.csv", "method and seed"): seeds_csv,
        ("rounds.csv", "method, seed and round"): rounds_csv, ("clients.csv", "method, seed and client"): clients_csv,
    }  # fmt: skip
    return [Download(name, f"one line per {each}", text(comparison)) for (name, each), text in files.items()]


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
            figures = [final.metrics.get(kind, {}).get(metric) for kind, metric in METRIC_KEYS]
            figures += [megabytes / max(final.rounds, 1), megabytes, final.seconds]
            done = "yes" if trial.finished else "no"
            start = [method.run.label, method.algorithm, trial.seed, trial.round, done]
            rows.append([*start, *map(_number, figures)])
    return csv_text(["run", "algorithm", "seed", "round", "finished", *(c.key for c in ALL_COLUMNS)], rows)


def rounds_csv(comparison: Comparison) -> str:
    """One line per method, seed and round."""
    header = ["run", "algorithm", "seed", "round", "seconds", "active", "dropped", "bytes_down", "bytes_up"]
    rows = [
        [method.run.label, method.algorithm, trial.seed, entry.number, _number(entry.seconds), entry.active,
         entry.dropped, _number(entry.bytes_down), _number(entry.bytes_up),
         *(_number(entry.metrics.get(kind, {}).get(metric)) for kind, metric in METRIC_KEYS)]
        for method in comparison.methods for trial in method.trials for entry in trial.rounds
    ]  # fmt: skip
    return csv_text([*header, *(f"{kind}_{metric}" for kind, metric in METRIC_KEYS)], rows)


def clients_csv(comparison: Comparison) -> str:
    """One line per method, seed and client, after the final round."""
    pairs = [(method, trial) for method in comparison.methods for trial in method.trials]
    names = list(dict.fromkeys(name for _, trial in pairs for client in trial.clients for name in client.values))
    rows = [
        [method.run.label, method.algorithm, trial.seed, client.client, client.n_train, client.n_test,
         *(_number(client.values.get(name)) for name in names)]
        for method, trial in pairs for client in trial.clients
    ]  # fmt: skip
    return csv_text(["run", "algorithm", "seed", "client", "n_train", "n_test", *names], rows)


def _number(value: float | None, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:.10g}"
