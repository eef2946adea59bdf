"""The figure that a line about progress shows, and whether figures are those of models that ran away."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kinfed.engine import METRICS

# Cross-entropy in nats: whoever gives the truth a probability of e^-100 on average has not learned badly, but computed
# with numbers that grew out of bounds. Knowing nothing about 100,000 classes costs 11.5.
DIVERGED_LOSS = 100.0
# Targets of a regression are standardized for training, so that a squared error of 1e6 is off by a thousand standard
# deviations of all targets.
DIVERGED_REGRESSION_LOSS = 1e6


def headline_text(metrics: Mapping[str, float], name: str | None = None) -> str:
    """The metric of that name, or what a problem is usually judged by, in a line about progress; "" without any."""
    chosen = None if name is None else METRICS.find(name)
    names = ("" if chosen is None else chosen.name, "accuracy", "rmse", "loss")
    shown = next((name for name in names if name in metrics), None)
    if shown is None:
        return ""
    metric = METRICS.find(shown)
    if metric is not None and metric.percent:
        title = "accuracy" if shown == "accuracy" else metric.title
        return f"{title} {100 * metrics[shown]:.1f}%"
    return f"{shown if metric is None else metric.title} {metrics[shown]:.4g}"


def has_diverged(metrics: Mapping[str, float]) -> bool:
    """Whether these are figures of models that ran away. Other tasks' losses have units of their own, so that only one
    that is not finite tells."""
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        return True
    if "accuracy" in metrics:
        return loss > DIVERGED_LOSS
    return "rmse" in metrics and loss > DIVERGED_REGRESSION_LOSS
