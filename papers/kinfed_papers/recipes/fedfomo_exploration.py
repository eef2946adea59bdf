"""Margins and figures of fedfomo-exploration: accuracy over ε and M."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean

from kinfed.analysis import Comparison
from kinfed.report.drawing import axis
from kinfed_papers.recipe import ACCURACY, BySeed, RecipeFigure, Results, difference, either_way
from kinfed_papers.recipe_figures import line_chart

MODELS = (2, 5, 10)  # the client's own among them
EVERYBODY = 15  # with everyone's model there is nothing to explore
EPSILONS = (0.0, 0.3, 0.6, 0.9)
PART = "cifar10"


def label(models: int, epsilon: float) -> str:
    return f"m{models}-e{epsilon:g}"


PAIRS = (*((m, e) for m in MODELS for e in EPSILONS), (EVERYBODY, 0.0))


def accuracy(results: Results, models: int, epsilon: float) -> BySeed:
    return results.get(PART, label(models, epsilon), ACCURACY)


def more_models(results: Results) -> Mapping[str, BySeed]:
    return {
        f"M = {few}, ε = {epsilon:g}": difference(accuracy(results, many, epsilon), accuracy(results, few, epsilon))
        for epsilon in EPSILONS
        for few, many in pairwise(MODELS)
    }


def indifferent_to_epsilon(results: Results) -> Mapping[str, BySeed]:
    """What ε = 0.9 gains over ε = 0, and what it loses: by the line of least squares through all ε, on average over M.
    (The distance of the best ε from the worst would be that of noise.)"""
    center = fmean(EPSILONS)
    spread = sum((epsilon - center) ** 2 for epsilon in EPSILONS)
    curves = {(m, e): accuracy(results, m, e) for m in MODELS for e in EPSILONS}
    gains = {
        seed: (EPSILONS[-1] - EPSILONS[0])
        * sum((e - center) * by_seed[seed] for (_, e), by_seed in curves.items())
        / (spread * len(MODELS))
        for seed in sorted(set.intersection(*map(set, curves.values())))
    }
    return either_way(gains, "a gain", "a loss")


def without_exploration(results: Results) -> Mapping[str, BySeed]:
    """What is gained (or lost) with ε = 0 against 0.3."""
    return {f"M = {m}": difference(accuracy(results, m, 0.0), accuracy(results, m, 0.3)) for m in MODELS}


def found_earlier(results: Results) -> Mapping[str, BySeed]:
    """Top places of one's own in the first half of the rounds, with ten models against two."""
    return {f"ε = {e:g}": difference(*(results.get(PART, label(m, e), "kin.early") for m in (10, 2))) for e in EPSILONS}


def above_local(results: Results) -> Mapping[str, BySeed]:
    alone = results.get(PART, "local", ACCURACY)
    return {f"M = {m}, ε = {e:g}": difference(accuracy(results, m, e), alone) for m, e in PAIRS}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    alone = results.get(PART, "local", ACCURACY)
    levels = {"local training": sum(alone.values()) / len(alone)} if alone else {}
    by_models = {f"M = {m}": [(e, accuracy(results, m, e)) for e in EPSILONS] for m in MODELS}
    by_epsilon = {f"ε = {e:g}": [(float(m), accuracy(results, m, e)) for m in (*MODELS, EVERYBODY)] for e in EPSILONS}
    return [
        RecipeFigure(
            "Accuracy over exploration",
            line_chart(axis("ε at the start"), by_models, "Test accuracy", "Accuracy over ε, per M.", levels=levels),
        ),
        RecipeFigure(
            "Accuracy over the number of models",
            line_chart(axis("M"), by_epsilon, "Test accuracy", "Accuracy over M, per ε.", levels=levels),
        ),
    ]
