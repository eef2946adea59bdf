"""What columns do in the shared trees of a run: shares of gains, and what trees say along a column.

    table = importance_of(run, "trees")
    table.shares[0], table.curves[0].x, table.curves[0].y

Both come from the sums that grew the trees (kinfed.engine.trees): no client answers anything more for them. They are
of the trees that all clients share, not of what a client has beside them. A curve is in the units of the table; of two
classes it is in log-odds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kinfed.records import RunRecord, TrialRecord
from kinfed.serving.coefficients import choose_trial, columns_of

if TYPE_CHECKING:
    from kinfed.data import Description

UNUSED = 1e30  # an edge that is not used is far beyond any value


@dataclass(frozen=True)
class DependenceCurve:
    """What the shared trees say where a column has a value: steps, level y[i] up to x[i] and the last one beyond."""

    name: str
    x: tuple[float, ...]  # [B - 2] ends of steps
    y: tuple[float, ...]  # [B - 1] levels, 0 on average over the steps


@dataclass(frozen=True)
class Importance:
    label: str
    seed: int
    shares: tuple[tuple[str, float], ...]  # of all gains, by column, the largest first
    curves: tuple[DependenceCurve, ...]
    unit: str  # of curves: "log-odds", or that of the target


def has_importance(trial: TrialRecord) -> bool:
    return bool(_figures(trial))


def importance_of(run: RunRecord, label: str | None = None, seed: int | None = None) -> Importance:
    """Importance in the method of that label, by default the only one with trees, and of the first seed."""
    which = choose_trial(run, _figures, label, seed, "shared trees grown to the end", "trees and trees_fast have")
    return _named(run.federations[which[1]], *which)


def _figures(trial: TrialRecord) -> dict[str, Any]:
    for entry in reversed(trial.rounds):
        if "importance" in entry.method:
            return dict(entry.method)
    return {}


def _named(description: Description, label: str, seed: int, figures: Mapping[str, Any]) -> Importance:
    from kinfed.serving.model_inputs import ModelInputs  # with torch, which other pages do not need

    inputs, shares = ModelInputs.of_description(description, {}), figures["importance"]
    names, centre, spread = columns_of(inputs, len(shares))
    scale = float(np.ravel(inputs.problem.scale)[0]) if inputs.problem.is_regression else 1.0
    order = sorted(range(len(shares)), key=lambda j: -shares[j])
    curves = []
    parts = (figures.get(f"dependence{part}", ()) for part in ("_of", "_at", ""))
    for j, ends, levels in zip(*parts, strict=True):
        x = tuple(float(centre[j] + spread[j] * end) for end in ends if abs(end) < UNUSED)
        y = scale * np.array(levels[: len(x) + 1])
        curves.append(DependenceCurve(names[j + 1], x, tuple((y - y.mean()).tolist())))
    unit = "the target" if inputs.problem.is_regression else "log-odds"
    return Importance(label, seed, tuple((names[j + 1], float(shares[j])) for j in order), tuple(curves), unit)
