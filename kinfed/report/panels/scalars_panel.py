"""Every plain number that a method records, as a small curve over rounds; those that never change, as text."""

from __future__ import annotations

from typing import Any

from kinfed.analysis import Method
from kinfed.report.drawing.chart import Figure, axis, escape
from kinfed.report.panels.base import Panel, is_constant, number_figure, numbers_by_round

MAX_SCALARS = 12


def scalars(method: Method) -> Panel | None:
    rounds = [entry.method for trial in method.complete_trials for entry in trial.rounds]
    keys = dict.fromkeys(key for own in rounds for key, value in own.items() if _number(value) is not None)
    figures: list[Figure] = []
    constants: list[str] = []
    for key in keys:
        by_round = numbers_by_round(method, key, _number)
        if is_constant(by_round):
            constants.append(f"{key} = {next(iter(next(iter(by_round.values())).values())):.4g}")
        else:
            description = f"{key} of {method.label} over rounds."
            figures.append(number_figure(description, method, by_round, axis(nticks=5), escape(key)))
    if not figures and not constants:
        return None
    text = "The numbers that the method itself recorded after each round"
    text += ", mean over seeds." if len(method.complete_trials) > 1 else "."
    if len(figures) > MAX_SCALARS:
        text += f" The first {MAX_SCALARS} of {len(figures)} are shown."
    if constants:
        text += " Unchanged throughout: " + ", ".join(constants) + "."
    return Panel("Recorded figures", text, tuple(figures[:MAX_SCALARS]))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
