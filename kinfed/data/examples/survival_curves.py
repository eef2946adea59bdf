"""Survival of clients as a table that may be shown: Kaplan-Meier curves and numbers at risk, without small counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FEWEST_AT_RISK = 5  # rows, below which a curve ends and no number at risk is written
POINTS = 60  # of a curve
TABLE_TIMES = 6  # at which numbers at risk are written


def survival_table(targets: Sequence[np.ndarray], reach: float) -> dict[str, Any]:
    """Curves up to the time `reach` of clients with times and events [n, 2] each.

    `times` [POINTS], `curves` [K][POINTS] with None from where fewer than FEWEST_AT_RISK rows are left, `table_times`,
    `at_risk` [K][TABLE_TIMES] with None below it, and `events` [K] alike."""
    times, table_times = np.linspace(0, reach, POINTS), np.linspace(0, reach, TABLE_TIMES)
    curves, at_risk, events = [], [], []
    for target in targets:
        time, event = target.T if len(target) else np.zeros((2, 0))
        left = (time >= times[:, None]).sum(1)
        curve = kaplan_meier(time, event, times) if len(time) else np.ones(POINTS)
        curves.append([float(y) if n >= FEWEST_AT_RISK else None for y, n in zip(curve, left, strict=True)])
        at_risk.append([_large(int((time >= t).sum())) for t in table_times])
        events.append(_large(int(event.sum())))
    shared = {"times": times.tolist(), "table_times": table_times.tolist()}
    return shared | {"curves": curves, "at_risk": at_risk, "events": events}


def _large(count: int) -> int | None:
    return count if count >= FEWEST_AT_RISK else None


def kaplan_meier(
    time: np.ndarray, event: np.ndarray, at: np.ndarray, weight: np.ndarray | None = None,
    events_first: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """[len(at)] the chance to outlive each time, from times and events [n]. `events_first` [n] marks rows that leave
    before others at the same time: those with an event, where censoring is what is estimated."""
    weight = np.ones(len(time)) if weight is None else weight
    order = np.argsort(time, kind="stable")
    distinct, begin = np.unique(time[order], return_index=True)
    events = np.add.reduceat((event * weight)[order], begin)
    at_risk = np.r_[0.0, np.cumsum(weight[order][::-1])][::-1][begin]
    if events_first is not None:
        at_risk = at_risk - np.add.reduceat((events_first * weight)[order], begin)
    ratio = np.divide(events, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)
    curve = np.r_[1.0, np.cumprod(1 - ratio)]
    return np.asarray(curve[np.searchsorted(distinct, at, side="right")])
