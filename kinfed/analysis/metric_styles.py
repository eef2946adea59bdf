"""Styles in which metrics are written: name, unit and digits, and which way is better."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import floor, isfinite, log10
from statistics import median
from typing import Any

from kinfed.engine import METRICS

LOSS = "loss"


@dataclass(frozen=True)
class MetricStyle:
    name: str
    title: str
    scale: float  # from the stored to the shown unit
    unit: str  # behind a number: " %", or another of a metric that has one
    digits: int
    lower_is_better: bool

    @property
    def in_percent(self) -> bool:
        return self.unit == " %"

    @property
    def gain_unit(self) -> str:
        """The unit of a difference of two values."""
        return "percentage points" if self.in_percent else self.unit.strip() or self.title

    @property
    def axis_title(self) -> str:
        is_word = self.title[1:2].islower() and self.name != "brier"  # and no acronym, nor a person's name
        title = self.title[0].lower() + self.title[1:] if is_word else self.title
        return f"{title},{self.unit}" if self.unit else title

    @property
    def noun(self) -> str:
        """The name in a sentence: accuracy, AUROC, RMSE."""
        return self.axis_title.removesuffix(f",{self.unit}") if self.unit else self.axis_title

    def for_values(self, values: Iterable[float]) -> MetricStyle:
        """The style with three digits that count for values of this size: 0.729, 7.29, 72.9. Shares keep theirs."""
        sizes = [abs(value) for value in values if isfinite(value) and value]
        if self.in_percent or not sizes:
            return self
        return replace(self, digits=max(0, 2 - floor(log10(median(sizes)))))

    def gain(self, own: float, other: float) -> float:
        """The lead of `own` over `other` in the stored unit; positive is better."""
        return other - own if self.lower_is_better else own - other


def metric_style(name: str) -> MetricStyle:
    one = METRICS.find(name)
    if one is None:
        return MetricStyle(name, "loss", 1.0, "", 3, lower_is_better=True)
    scale, digits = (100.0, 1) if one.percent else (1.0, 3)
    return MetricStyle(name, one.title, scale, f" {one.unit}".rstrip(), digits, not one.higher_is_better)


def headline_of(config: Mapping[str, Any], present: Collection[str]) -> str:
    """The metric that a run was configured to be judged by, or accuracy, RMSE or loss, whichever it has."""
    name = config.get("metric")
    chosen = METRICS.find(name) if isinstance(name, str) else None
    names = [] if chosen is None else [chosen.name]
    return next((name for name in (*names, "accuracy", "rmse") if name in present), LOSS)
