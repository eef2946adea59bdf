"""What the board's pages are made from, as plain values."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from kinfed.analysis import single_run
from kinfed.records import RunEntry, RunRecord, headline_text, load_run
from kinfed.report import headline, learning_curves
from kinfed.report.drawing import DARK, style_of


def listed(entry: RunEntry) -> dict[str, Any]:
    """A row of the list."""
    return {
        "name": entry.name,
        "state": entry.state,
        "changed": datetime.fromtimestamp(entry.changed).strftime("%Y-%m-%d %H:%M"),
        "dataset": entry.dataset,
        "algorithms": entry.algorithms,
        "seeds": len(entry.settings.get("seeds") or ()),
        "rounds": entry.settings.get("rounds"),
        "done": entry.done,
        "planned": entry.planned,
        "best": "" if entry.best is None else str(entry.best),
        "problem": entry.problem,
    }


def live_view(entry: RunEntry) -> dict[str, Any]:
    """The state of one run: how far every method and seed is, and curves so far."""
    run = load_run(entry.path.resolve(), entry.name)
    comparison = single_run(run)
    figure = learning_curves(comparison) if any(trial.rounds for trial in run.trials) else None
    return {
        **listed(entry),
        "title": headline([run]) if run.trials else entry.name,
        "notes": list(run.notes),
        "trials": [_trial(trial, run) for trial in run.trials],
        "figure": None if figure is None else figure.payload,
        "methods": [{"label": method.label, "color": style_of(method).color} for method in comparison.methods],
        "dark": DARK,
    }


def _trial(trial: Any, run: RunRecord) -> dict[str, Any]:
    personal = trial.final.metrics.get("personal", {})
    metric = run.config.get("metric")
    return {
        "algorithm": trial.algorithm,
        "seed": trial.seed,
        "round": trial.rounds[-1].number if trial.rounds else trial.round,
        "planned": run.last_planned_round,
        "finished": trial.finished,
        "figure": headline_text(personal, metric if isinstance(metric, str) else None),
    }
