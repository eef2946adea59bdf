"""Every plain number that a method records, as a small curve over rounds; those that never change, as text."""

from __future__ import annotations

from typing import Any

from kinfed.analysis import Method, average
from kinfed.report.drawing.chart import Figure, axis, escape, layout, round_axis
from kinfed.report.drawing.marks import curve
from kinfed.report.panels.base import Panel, series

MAX_SCALARS = 12


def scalars(method: Method) -> Panel | None:
    keys = dict.fromkeys(
        key
        for trial in method.complete_trials
        for entry in trial.rounds
        for key, value in entry.method.items()
        if _is_number(value)
    )
    figures: list[Figure] = []
    constants: list[str] = []
    for key in keys:
        by_round: dict[int, dict[int, float]] = {}
        for seed, values in series(method, key).items():
            for number, value in values.items():
                if _is_number(value):
                    by_round.setdefault(number, {})[seed] = float(value)
        distinct = {value for by_seed in by_round.values() for value in by_seed.values()}
        if len(distinct) == 1:
            constants.append(f"{key} = {distinct.pop():.4g}")
        else:
            figures.append(_figure(method, key, by_round))
    if not figures and not constants:
        return None
    text = "The numbers that the method itself recorded after each round"
    text += ", mean over seeds." if len(method.complete_trials) > 1 else "."
    if len(figures) > MAX_SCALARS:
        text += f" The first {MAX_SCALARS} of {len(figures)} are shown."
    if constants:
        text += " Unchanged throughout: " + ", ".join(constants) + "."
    return Panel("Recorded figures", text, tuple(figures[:MAX_SCALARS]))


def _figure(method: Method, key: str, by_round: dict[int, dict[int, float]]) -> Figure:
    points = [(number, mean) for number, values in sorted(by_round.items()) if (mean := average(values))]
    return Figure(
        description=f"{key} of {method.label} over rounds.",
        data=curve(method, points, "round %{x}: %{y:.4g}%{customdata}"),
        layout=layout(round_axis(by_round), axis(nticks=5), escape(key)),
        height=220,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
