"""How much of a client's data FedFomo should keep for judging others' models (Figure 9)."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.report.chart import log_axis
from kinfed.report.comparison import Comparison
from kinfed.reproduce import Claim, Column, Found, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import FEDFOMO, BySeed, Drawn, Scale
from kinfed.reproduce.recipe_figures import against
from kinfed.reproduce.recipes.fedfomo_latent import setting
from kinfed.reproduce.studies.kinship import kinship, minus

FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
METHODS = {"local": "Local training", "fedfomo": "FedFomo, n = 5"}
ACCURACY = "personal.accuracy"


def name(fraction: float) -> str:
    return f"validation-{round(100 * fraction):02d}"


def parts(scale: Scale) -> list[Part]:
    run = setting(scale) | {"algorithms": {"local": {}, "fedfomo": {"models": 5}}}
    if scale != "paper":
        # Epochs as in the paper: who keeps more for validation also trains less.
        run = {key: value for key, value in run.items() if key != "steps"} | {"epochs": 1}
    else:
        run["seeds"] = [0, 1, 2, 3, 4]
    return [Part(name(fraction), run | {"validation": fraction}, kinship) for fraction in FRACTIONS]


def accuracy(found: Found, fraction: float, method: str = "fedfomo") -> BySeed:
    return found.of(name(fraction), method, ACCURACY)


def _mean(columns: list[BySeed]) -> BySeed:
    seeds = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) / len(columns) for seed in seeds}


def _below_half(found: Found) -> Mapping[str, BySeed]:
    under = _mean([accuracy(found, fraction) for fraction in FRACTIONS if fraction < 0.5])
    over = _mean([accuracy(found, fraction) for fraction in FRACTIONS if fraction > 0.5])
    return {"": minus(under, over)}


def figures(found: Found, runs: Mapping[str, Comparison]) -> list[Drawn]:
    series = {label: [(f, accuracy(found, f, row)) for f in FRACTIONS] for row, label in METHODS.items()}
    drawn = against(
        log_axis("Share of a client’s data for validation", FRACTIONS[0], FRACTIONS[-1]),
        series,
        "Test accuracy",
        "Accuracy of FedFomo and of training alone over the share of examples kept for validation.",
    )
    return [Drawn("Accuracy over the share of validation data", drawn)]


RECIPE = Recipe(
    name="fedfomo-validation",
    paper=FEDFOMO,
    shows="Figure 9",
    title="FedFomo’s share of validation data",
    about="15 clients in 5 latent distributions of CIFAR-10, all active, 20 rounds. What a client keeps for judging "
    "models it cannot train on. Local training on the same rest stands beside it: the difference is what FedFomo "
    "makes of the validation examples.",
    parts=parts,
    tables=[
        Table("Test accuracy (%) by share of validation data", METHODS,
              [Column(f"{fraction:g}", name(fraction), ACCURACY) for fraction in FRACTIONS]),
        Table("Top places held by clients of one’s own distribution (%)", {"fedfomo": METHODS["fedfomo"]},
              [Column(f"{fraction:g}", name(fraction), "kin.top") for fraction in FRACTIONS]),
    ],
    claims=[
        Claim("Higher accuracy with less than half of the data for validation (mean over shares below and above)",
              _below_half),
        Claim("A notable drop above one half: 0.9 below 0.4",
              lambda found: {"": minus(accuracy(found, 0.4), accuracy(found, 0.9))}),
        Claim("A slight decrease between 0.05 and 0.1",
              lambda found: {"": minus(accuracy(found, 0.05), accuracy(found, 0.1))}),
        Claim("FedFomo above Local at every share, on the same rest",
              lambda found: {f"{f:g}": minus(accuracy(found, f), accuracy(found, f, "local")) for f in FRACTIONS},
              asked_by="kinfed"),
        Claim("FedFomo above Local that trains on nearly everything (0.01 for validation), at the usual 0.2",
              lambda found: {"": minus(accuracy(found, 0.2), accuracy(found, 0.01, "local"))}, asked_by="kinfed"),
        Untestable("The figure’s curve over rounds", "the paper prints no numbers for it"),
    ],
    notes=[
        "Methods that need no validation examples could train on them. The last claim of ours compares with that.",
        "A share of 0.01 is three or four examples of a client at the scale small, and 33 in the paper.",
        "Local work is a number of epochs here at all scales, so that who keeps more for validation also takes fewer "
        "steps, as in the paper.",
    ],
    stand_ins={
        "smoke": "digits in place of CIFAR-10, pixels’ principal components in place of VGG-11, 6 rounds of one epoch.",
        "small": "6,000 of CIFAR-10’s images, embeddings of a small network trained on them, conv 6/16 instead of "
        "32/64/64, one epoch in batches of 20 instead of 5 in batches of 50, no augmentation, three seeds instead of "
        "five. Compare orders, not levels.",
    },
    figures=figures,
)  # fmt: skip
