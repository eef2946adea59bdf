"""What cgpfl-heur measures and shows: how many contexts there are, and how near Heur's choice is to the best."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from kinfed.analysis import Comparison
from kinfed.records import RunRecord
from kinfed.report import accuracy_by_number, choice_of_number
from kinfed_papers.recipe import ACCURACY, BySeed, Measurements, RecipeFigure, Results, difference

HEADINGS = {"mnist-mlr": "MNIST MLR", "fmnist-mlr": "FMNIST MLR"}
NUMBERS = range(1, 21)


def contexts(run: RunRecord) -> Measurements:
    """How many contexts each method ended with."""
    measured: Measurements = {}
    for trial in run.trials:
        counts = [entry.method["contexts"] for entry in trial.rounds if entry.method.get("contexts") is not None]
        if counts:
            measured.setdefault(trial.algorithm, {}).setdefault("contexts", {})[trial.seed] = float(counts[-1])
    return measured


def from_the_best(results: Results, part: str, row: str) -> Mapping[str, BySeed]:
    """Heur, in the reading of `row`, against the K that is best over all seeds. (The best of every seed by itself would
    be the luckiest of twenty test figures, which no method attains.)"""
    fixed = [by_seed for k in NUMBERS if (by_seed := results.get(part, f"cgpfl-{k}", ACCURACY))]
    best = max(fixed, key=lambda by_seed: fmean(by_seed.values()), default={})
    return {"the best K": difference(results.get(part, row, ACCURACY), best)}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    return [
        figure
        for part, heading in HEADINGS.items()
        if part in runs  # parts that are merged into these have no figures of their own
        for method in runs[part].methods
        if method.family == "cgpfl_heur"
        for panel in (accuracy_by_number(method), choice_of_number(method))
        if panel is not None
        for figure in RecipeFigure.from_panel(panel, f"{panel.title}, {heading}")
    ]
