"""A run that wrote no folder, as if it had been read from one: what pages, tables and figures are made from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.records import (
    ClientResult,
    Final,
    Key,
    Run,
    finals,
    join_records,
    last_planned_round,
    make_trials,
    run_versions,
)
from kinfed.runs.results import MethodResult, RunOutcome

LABEL = "this run"


def run_in_memory(outcome: RunOutcome) -> Run:
    """All that `kinfed.records.reader.load_run` would read, had the run been written; its results have their
    journal."""
    config: dict[str, Any] = _as_read(outcome.config.dump())
    about, describe = run_versions(), outcome.describe
    lines = [("a round", json.loads(line)) for result in outcome.results for line in result.journal]
    results: dict[Key, Final] = finals(_as_read([result.summary() for result in outcome.results]), "the results")
    clients = {(result.label, result.seed): _clients(result) for result in outcome.results}
    trials = make_trials(join_records(lines, config.get("folds") or 1), clients, results, last_planned_round(config))
    return Run(
        path=Path(),
        label=LABEL,
        config=config,
        version=about["kinfed"],
        versions=about["versions"],
        fingerprint="",
        trials=tuple(trials),
        federations={} if describe is None else {seed: describe(seed) for seed in outcome.config.seeds},
        baselines={baseline.seed: baseline for baseline in outcome.baselines},
        curves={(result.label, result.seed): result.curves for result in outcome.results if result.curves is not None},
        parameters=outcome.task.num_params,
    )


def _as_read(value: Any) -> Any:
    """Plain values as JSON gives them back."""
    return json.loads(storage.to_json(value, sort_keys=False))


def _clients(result: MethodResult) -> list[ClientResult]:
    columns = result.client_columns()
    fixed = {name: columns.pop(name) for name in ("algorithm", "seed", "client", "n_train", "n_test")}
    return [
        ClientResult(
            client=fixed["client"][place],
            n_train=int(fixed["n_train"][place]),
            n_test=int(fixed["n_test"][place]),
            values={
                name: float(column[place])
                for name, column in columns.items()
                if column[place] is not None and math.isfinite(column[place])
            },
        )
        for place in range(len(fixed["client"]))
    ]
