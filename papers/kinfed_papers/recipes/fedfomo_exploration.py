"""FedFomo's exploration ε and number of models M (Figure 3)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

from kinfed.analysis import Comparison
from kinfed.report.drawing import axis
from kinfed_papers import (
    Claim,
    Question,
    Recipe,
    ResultColumn,
    Results,
    ResultTable,
    RunPart,
    Untestable,
    difference,
)
from kinfed_papers.recipe import ACCURACY, FEDFOMO, BySeed, RecipeFigure, Scale, either_way
from kinfed_papers.recipe_figures import line_chart
from kinfed_papers.recipes.common_fedfomo import EMBEDDINGS, FEW_STEPS, NETWORK, SMOKE_STAND_IN, latent_settings
from kinfed_papers.studies.kinship import kinship

MODELS = (2, 5, 10)  # the client's own among them
EVERYBODY = 15  # with everyone's model there is nothing to explore
EPSILONS = (0.0, 0.3, 0.6, 0.9)
PART = "cifar10"
PLACE = "Section 4 (exploration), Figure 3"


def label(models: int, epsilon: float) -> str:
    return f"m{models}-e{epsilon:g}"


PAIRS = (*((m, e) for m in MODELS for e in EPSILONS), (EVERYBODY, 0.0))
GRID = {label(m, e): f"M = {m}, ε = {e:g}" for m, e in PAIRS}


def parts(scale: Scale) -> list[RunPart]:
    grid: dict[str, dict[str, Any]] = {"local": {"method": "local"}} | {
        label(m, e): {"method": "fedfomo", "models": m, "epsilon": e} for m, e in PAIRS
    }
    return [RunPart(PART, latent_settings(scale, steps=FEW_STEPS) | {"algorithms": grid}, kinship)]


def accuracy(results: Results, models: int, epsilon: float) -> BySeed:
    return results.get(PART, label(models, epsilon), ACCURACY)


def _more_models(results: Results) -> Mapping[str, BySeed]:
    return {
        f"M = {few}, ε = {epsilon:g}": difference(accuracy(results, many, epsilon), accuracy(results, few, epsilon))
        for epsilon in EPSILONS
        for few, many in pairwise(MODELS)
    }


def _indifferent_to_epsilon(results: Results) -> Mapping[str, BySeed]:
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


def _without_exploration(results: Results) -> Mapping[str, BySeed]:
    """What is gained (or lost) with ε = 0 against 0.3."""
    return {f"M = {m}": difference(accuracy(results, m, 0.0), accuracy(results, m, 0.3)) for m in MODELS}


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


RECIPE = Recipe(
    name="fedfomo-exploration",
    paper=FEDFOMO,
    reproduces="Figure 3",
    title="FedFomo’s exploration and number of models",
    about="15 clients in 5 latent distributions of CIFAR-10, all active, 20 rounds; M candidates per round, the "
    "client’s own among them, and the chance ε of a random one, which falls by 0.05 per round.",
    parts=parts,
    tables=[
        ResultTable(
            "Accuracy and finding one’s own (%)",
            {"local": "Local training", **GRID},
            [
                ResultColumn("Accuracy", PART),
                ResultColumn("Client mean", PART, "personal.accuracy_mean"),
                ResultColumn("Worst tenth", PART, "personal.worst10"),
                ResultColumn("Top places to one’s own", PART, "kin.top"),
                ResultColumn("In the first half", PART, "kin.early"),
                ResultColumn("MB per round", PART, "bytes", 1e-6, lower_is_better=True),
            ],
        ),
    ],
    claims=[
        Claim("With ε fixed, more models are better (M = 5 against 2, and 10 against 5)", _more_models, place=PLACE),
        Claim(
            "No consistent effect of ε: over its range, accuracy neither rises nor falls by 2 points (a limit of ours)",
            _indifferent_to_epsilon,
            place=PLACE,
            limit=0.02,
            at_most=True,
        ),
        Claim(
            "More models find one’s own distribution earlier: more top places in the first half with M = 10 than 2",
            lambda results: {
                f"ε = {e:g}": difference(*(results.get(PART, label(m, e), "kin.early") for m in (10, 2)))
                for e in EPSILONS
            },
            place=PLACE,
        ),
        Question(
            "Without exploration (ε = 0) as good as with it (0.3): at most 1 point below, a limit of ours",
            _without_exploration,
            limit=-0.01,
        ),
        Question(
            "Every M and ε above Local",
            lambda results: {
                name: difference(results.get(PART, row, ACCURACY), results.get(PART, "local", ACCURACY))
                for row, name in GRID.items()
            },
        ),
        Untestable("The curves", "the paper prints neither numbers nor the values of ε and M", PLACE),
    ],
    notes=[
        "The values of ε and M are ours; those of the figure are not in the text.",
        "ε falls by subtraction, as in the released code: 0.3 is gone after six rounds, 0.9 after eighteen.",
        "With M = 15 everyone is sent everybody’s model, and ε has nothing to decide: it is run once.",
    ],
    stand_ins={
        "smoke": SMOKE_STAND_IN,
        "small": f"6,000 of CIFAR-10’s images, {EMBEDDINGS}, {NETWORK}, "
        "10 steps of 20 examples instead of 5 epochs, no augmentation. Compare rankings, not levels.",
    },
    method_figures=[(PART, label(5, 0.3))],
    figures=figures,
)
