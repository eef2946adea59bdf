"""How much of a client's data FedFomo should keep for judging others' models (Figure 9)."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.analysis import Comparison
from kinfed.report.drawing import log_axis
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
from kinfed_papers.recipe import ACCURACY, FEDFOMO, BySeed, RecipeFigure, Scale
from kinfed_papers.recipe_figures import line_chart
from kinfed_papers.recipes.common_fedfomo import EMBEDDINGS, NETWORK, latent_settings
from kinfed_papers.studies.kinship import kinship

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
METHODS = {"local": "Local training", "fedfomo": "FedFomo, n = 5"}
PLACE = "Appendix A.7, Figure 9"
PARTS = {f"validation-{round(100 * fraction):02d}": f"{fraction:g}" for fraction in FRACTIONS}


def parts(scale: Scale) -> list[RunPart]:
    settings = latent_settings(scale) | {"algorithms": {"local": {}, "fedfomo": {"models": 5}}}
    if scale == "paper":
        settings["seeds"] = [0, 1, 2, 3, 4]
    else:
        # Epochs as in the paper: who keeps more for validation also trains less.
        del settings["steps"]
        settings["epochs"] = 1
    return [
        RunPart(name, {**settings, "validation": fraction}, kinship)
        for name, fraction in zip(PARTS, FRACTIONS, strict=True)
    ]


def accuracy(results: Results, fraction: float, method: str = "fedfomo") -> BySeed:
    return results.get(dict(zip(FRACTIONS, PARTS, strict=True))[fraction], method, ACCURACY)


def gain(results: Results, fraction: float, other: float) -> dict[str, BySeed]:
    """FedFomo's accuracy with one share of validation data above that with another."""
    return {"": difference(accuracy(results, fraction), accuracy(results, other))}


def _mean(columns: list[BySeed]) -> BySeed:
    seeds = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in seeds}


def _below_half(results: Results) -> Mapping[str, BySeed]:
    below = _mean([accuracy(results, fraction) for fraction in FRACTIONS if fraction < 0.5])
    above = _mean([accuracy(results, fraction) for fraction in FRACTIONS if fraction > 0.5])
    return {"": difference(below, above)}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    series = {label: [(f, accuracy(results, f, row)) for f in FRACTIONS] for row, label in METHODS.items()}
    chart = line_chart(
        log_axis("Share of a client’s data for validation", FRACTIONS[0], FRACTIONS[-1]),
        series,
        "Test accuracy",
        "Accuracy of FedFomo and of training alone over the share of examples kept for validation.",
    )
    return [RecipeFigure("Accuracy over the share of validation data", chart)]


RECIPE = Recipe(
    name="fedfomo-validation",
    paper=FEDFOMO,
    reproduces="Figure 9",
    title="FedFomo’s share of validation data",
    about="15 clients in 5 latent distributions of CIFAR-10, all active, 20 rounds. What a client keeps for judging "
    "models it cannot train on. Local training on the same data stands beside it: the difference is what FedFomo "
    "makes of the validation examples.",
    parts=parts,
    tables=[
        ResultTable("Test accuracy (%) by share of validation data", METHODS, ResultColumn.by_part(PARTS)),
        ResultTable(
            "Top places held by clients of one’s own distribution (%)",
            {"fedfomo": METHODS["fedfomo"]},
            ResultColumn.by_part(PARTS, "kin.top"),
        ),
    ],
    claims=[
        Claim(
            "Higher accuracy with less than half of the data for validation (mean over shares below and above)",
            _below_half,
            place=PLACE,
        ),
        Claim("A notable drop above one half: 0.9 below 0.4", lambda results: gain(results, 0.4, 0.9), place=PLACE),
        Question(
            "FedFomo above Local at every share, on the same training data",
            lambda results: {
                f"{fraction:g}": difference(accuracy(results, fraction), accuracy(results, fraction, "local"))
                for fraction in FRACTIONS
            },
        ),
        Question(
            "FedFomo above Local that trains on nearly everything (0.01 for validation), at the usual 0.2",
            lambda results: {"": difference(accuracy(results, 0.2), accuracy(results, 0.01, "local"))},
        ),
        Untestable("A slight decrease between 0.05 and 0.1", "the text does not say in which direction", PLACE),
        Untestable("The figure’s curve over rounds", "the paper prints no numbers for it", PLACE),
    ],
    notes=[
        "Methods that need no validation examples could train on them. The last claim of ours compares with that.",
        "A share of 0.01 is three or four examples of a client at the scale small, and 33 in the paper.",
        "Local work is a number of epochs here at all scales, so that who keeps more for validation also takes fewer "
        "steps, as in the paper.",
    ],
    stand_ins={
        "smoke": "digits in place of CIFAR-10, pixels’ principal components in place of VGG-11, 6 rounds of one epoch.",
        "small": f"6,000 of CIFAR-10’s images, {EMBEDDINGS}, {NETWORK}, "
        "one epoch in batches of 20 instead of 5 in batches of 50, no augmentation, three seeds instead of "
        "five. Compare rankings, not levels.",
    },
    figures=figures,
)
