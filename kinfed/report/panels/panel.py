"""Figures of single methods, from what a method writes about itself into each round.

A panel is a function from one method, over all its seeds, to a `Panel`, or to None where the method did not record
what the panel needs. Registering it is all that is needed to have it on the page:

    @panel
    def mixing_weights(method: Method) -> Panel | None:
        alphas = series(method, "alpha")
        if not alphas:
            return None
        figure = Figure(...)
        return Panel("Mixing weight", "How much of its own model each client keeps.", (figure,))

Take colours from `kinfed.report.palette` (they follow the reader's light or dark theme) and axes from
`kinfed.report.chart`; pass every text from outside through `chart.safe`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kinfed.report.chart import Figure, axis, curve, layout, safe
from kinfed.report.comparison import Method
from kinfed.report.statistics import average

MAX_SCALARS = 12


@dataclass(frozen=True)
class Panel:
    title: str
    sentence: str  # what to see, for a reader who is not a specialist; plain text
    figures: tuple[Figure, ...] = ()


Maker = Callable[[Method], Panel | None]

_registry: list[Maker] = []


def panel(make: Maker) -> Maker:
    _registry.append(make)
    return make


def panels(method: Method) -> list[Panel]:
    """Everything there is to show about the method, in the order of registration."""
    return [made for make in _registry if (made := make(method)) is not None]


def series(method: Method, key: str) -> dict[int, dict[int, Any]]:
    """{seed: {round: value}} of one of the method's own figures, over the counted seeds, where it was recorded."""
    found = {
        trial.seed: {entry.number: entry.method[key] for entry in trial.rounds if key in entry.method}
        for trial in method.counted
    }
    return {seed: values for seed, values in found.items() if values}


@panel
def scalars(method: Method) -> Panel | None:
    """Every plain number the method records, as a small curve over rounds; those that never change, as text."""
    keys = dict.fromkeys(
        key
        for trial in method.counted
        for entry in trial.rounds
        for key, value in entry.method.items()
        if _is_number(value)
    )
    figures: list[Figure] = []
    constants: list[str] = []
    for key in keys:
        recorded = series(method, key)
        values = {v for by_round in recorded.values() for v in by_round.values() if _is_number(v)}
        if len(values) == 1:
            constants.append(f"{key} = {next(iter(values)):.4g}")
        else:
            figures.append(_scalar_figure(method, key, recorded))
    if not figures and not constants:
        return None
    text = "The numbers that the method itself recorded after each round"
    text += ", mean over seeds." if len(method.counted) > 1 else "."
    if len(figures) > MAX_SCALARS:
        text += f" The first {MAX_SCALARS} of {len(figures)} are shown."
    if constants:
        text += " Unchanged throughout: " + ", ".join(constants) + "."
    return Panel("Recorded figures", text, tuple(figures[:MAX_SCALARS]))


def _scalar_figure(method: Method, key: str, recorded: dict[int, dict[int, Any]]) -> Figure:
    by_round: dict[int, dict[int, float]] = {}
    for seed, values in recorded.items():
        for number, value in values.items():
            if _is_number(value):
                by_round.setdefault(number, {})[seed] = float(value)
    rounds = sorted(by_round)
    averages = [entry for number in rounds if (entry := average(by_round[number])) is not None]
    traces = curve(
        method,
        [float(number) for number in rounds],
        [entry.mean for entry in averages],
        [entry.sd for entry in averages],
        hover="round %{x}: %{y:.4g}%{customdata}<extra></extra>",
    )
    return Figure(
        description=f"{key} of {method.label} over rounds.",
        data=traces,
        layout=layout(axis("Round"), axis(nticks=5), safe(key)),
        height=220,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
