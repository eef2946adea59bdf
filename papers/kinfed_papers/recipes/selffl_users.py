"""Figures of selffl-users: how the users' accuracies are distributed."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.analysis import Comparison
from kinfed.report import cumulative_shares, distribution
from kinfed_papers.recipe import RecipeFigure, Results

HEADINGS = {"letters": "Letters", "mnist": "MNIST"}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    return [
        RecipeFigure(f"Users of {HEADINGS[part]}", figure, "One entry per user and seed.")
        for part, comparison in runs.items()
        for figure in (distribution(comparison), cumulative_shares(comparison))
        if figure is not None
    ]
