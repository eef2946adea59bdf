"""What panels are made of; see `kinfed.report.panels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kinfed.report.chart import Figure
from kinfed.report.comparison import Method


@dataclass(frozen=True)
class Panel:
    title: str
    sentence: str  # what to see, for a reader who is not a specialist; plain text
    figures: tuple[Figure, ...] = ()


def series(method: Method, key: str) -> dict[int, dict[int, Any]]:
    """{seed: {round: value}} of one of the method's own figures, over the complete trials, where it was recorded."""
    by_seed = {
        trial.seed: {entry.number: entry.method[key] for entry in trial.rounds if key in entry.method}
        for trial in method.complete_trials
    }
    return {seed: values for seed, values in by_seed.items() if values}


def seed_note(method: Method, seed: int) -> str:
    """For panels that show one seed only."""
    return f" Shown is seed {seed}." if len(method.complete_trials) > 1 else ""
