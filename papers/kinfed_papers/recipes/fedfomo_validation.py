"""Margins and the figure of fedfomo-validation: accuracy over the share of validation data."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.analysis import Comparison
from kinfed.report.drawing import log_axis
from kinfed_papers.recipe import ACCURACY, BySeed, RecipeFigure, Results, difference
from kinfed_papers.recipe_figures import line_chart

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
METHODS = {"local": "Local training", "fedfomo": "FedFomo, n = 5"}


def accuracy(results: Results, fraction: float, method: str = "fedfomo") -> BySeed:
    return results.get(f"validation-{round(100 * fraction):02d}", method, ACCURACY)


def gain(results: Results, fraction: float, other: float) -> dict[str, BySeed]:
    """FedFomo's accuracy with one share of validation data above that with another."""
    return {"": difference(accuracy(results, fraction), accuracy(results, other))}


def below_half(results: Results) -> Mapping[str, BySeed]:
    below = _mean([accuracy(results, fraction) for fraction in FRACTIONS if fraction < 0.5])
    above = _mean([accuracy(results, fraction) for fraction in FRACTIONS if fraction > 0.5])
    return {"": difference(below, above)}


def _mean(columns: list[BySeed]) -> BySeed:
    seeds = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in seeds}


def above_local(results: Results) -> Mapping[str, BySeed]:
    """FedFomo above Local with the same training data, at every share."""
    return {
        f"{fraction:g}": difference(accuracy(results, fraction), accuracy(results, fraction, "local"))
        for fraction in FRACTIONS
    }


def above_local_with_everything(results: Results) -> Mapping[str, BySeed]:
    return {"": difference(accuracy(results, 0.2), accuracy(results, 0.01, "local"))}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    series = {label: [(f, accuracy(results, f, row)) for f in FRACTIONS] for row, label in METHODS.items()}
    chart = line_chart(
        log_axis("Share of a client’s data for validation", FRACTIONS[0], FRACTIONS[-1]),
        series,
        "Test accuracy",
        "Accuracy of FedFomo and of training alone over the share of examples kept for validation.",
    )
    return [RecipeFigure("Accuracy over the share of validation data", chart)]
