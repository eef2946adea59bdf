"""What selffl-steps measures and shows beyond the figures of a run: the local steps of clients."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from kinfed.analysis import Comparison
from kinfed.records import RunRecord
from kinfed.report import decisions
from kinfed_papers.recipe import BySeed, Measurements, RecipeFigure, Results, difference


def mean_steps(run: RunRecord) -> Measurements:
    """Steps of the clients whose uncertainty is known, at three quarters of the run (round 150 in the paper) and at its
    end: the mean of those taken, and the median of those computed by (19), which no cap holds down."""
    late = 3 * int(run.config["rounds"]) // 4
    measured: dict[str, BySeed] = {}
    for trial in run.trials:
        for entry in trial.rounds:
            clients = entry.method.get("clients") or {"raw_steps": (), "steps": ()}
            pairs = list(zip(clients["raw_steps"], clients["steps"], strict=True))
            known = [(float(raw), float(taken)) for raw, taken in pairs if raw >= 0]  # negative: not computed yet
            if known:
                figures = {"computed": median(raw for raw, _ in known), "taken": fmean(taken for _, taken in known)}
                for when in ("late", "end") if entry.number <= late else ("end",):
                    for kind, value in figures.items():
                        measured.setdefault(f"steps.{kind}.{when}", {})[trial.seed] = value
    return {"selffl": measured}


def fewer(results: Results) -> dict[str, BySeed]:
    late, end = (results.get("letters", "selffl", f"steps.computed.{when}") for when in ("late", "end"))
    return {"": difference(late, end)}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    panels = (decisions(method) for comparison in runs.values() for method in comparison.methods)
    return [figure for panel in panels if panel is not None for figure in RecipeFigure.from_panel(panel)]
