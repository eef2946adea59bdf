"""Results as frames of pandas, polars or pyarrow.

    summary_rows   a row per method and seed: where it stands after its last evaluated round
    history_rows   a row per method, seed and round
    client_rows    a row per method, seed and client, after the last round

Columns of metrics are called personal_accuracy, server_accuracy and so on; there is a missing value where there is no
figure: a round that was not evaluated, a method without a server model, a client without test examples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kinfed.errors import ConfigError, unknown_name
from kinfed.records import KINDS, FinalRecord, RoundRecord, RunRecord, TrialRecord

if TYPE_CHECKING:
    import pyarrow as pa

BACKENDS = ("pandas", "polars", "pyarrow")
Row = dict[str, Any]
_TEXT = ("algorithm", "client")
_WHOLE = ("seed", "round", "rounds", "took_part", "active", "dropped", "bytes_down", "bytes_up", "n_train", "n_test")
_YES_NO = ("finished", "diverged")
_FIRST = (  # columns in this order, then metrics by alphabet: those of personal models before the server's
    "algorithm", "seed", "round", "client", "rounds", "finished", "diverged", "n_train", "n_test", "active", "dropped",
    "took_part", "bytes_down", "bytes_up", "seconds", "clock", "epsilon",
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
    return [
        {
            "algorithm": trial.algorithm,
            "seed": trial.seed,
            "client": client.client,
            "n_train": client.n_train,
            "n_test": client.n_test,
            **client.values,
            "took_part": client.took_part,
        }
        for trial in run.trials
        for client in trial.clients
    ]


def to_native(rows: Sequence[Row], backend: str | None) -> Any:
    """The rows as a frame of the `backend`, by default the first of BACKENDS that is installed."""
    chosen = backend or next(name for name in BACKENDS if importlib.util.find_spec(name) is not None)
    if chosen not in BACKENDS:
        raise unknown_name("backend of frames", chosen, BACKENDS)
    if importlib.util.find_spec(chosen) is None:
        raise ConfigError(f"{chosen} is not installed; pip install {chosen}, or ask for one of {', '.join(BACKENDS)}")
    import narwhals as nw
    import pyarrow as pa  # both for frames alone

    present = {name for row in rows for name in row}
    names = [*(name for name in _FIRST if name in present), *sorted(present - set(_FIRST))]
    table = pa.table({name: _column(name, [row.get(name) for row in rows]) for name in names})
    match chosen:
        case "pandas":
            return nw.from_arrow(table, backend="pandas").to_native()
        case "polars":
            return nw.from_arrow(table, backend="polars").to_native()
    return table


def _column(name: str, values: list[Any]) -> pa.Array:
    import pyarrow as pa

    if name in _TEXT:
        return pa.array(values, pa.string())
    if name in _YES_NO or all(isinstance(value, bool) for value in values):
        return pa.array(values, pa.bool_())
    if name in _WHOLE:
        return pa.array([None if value is None else round(value) for value in values], pa.int64())
    return pa.array(values, pa.float64())
