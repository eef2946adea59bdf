"""Ditto against fair and personalized methods: accuracy, and how evenly users are served."""

from __future__ import annotations

from kinfed_papers import Claim, Recipe, ResultColumn, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import DITTO, Scale
from kinfed_papers.recipes.common_popular import ABSTRACT, NO_NUMBERS, ONE_RATE, beyond_rivals
from kinfed_papers.recipes.common_selffl import LETTERS_STAND_INS, letters_settings

FAIR = "qffl_model"  # q-FFL's one model, as its users have it
METHODS = {
    "local": "Local",
    "fedavg_model": "FedAvg",
    "fedavg": "FedAvg, fine-tuned (ours)",
    FAIR: "q-FFL, q = 1",
    "apfl": "APFL",
    "perfedavg": "Per-FedAvg",
    "ditto": "Ditto, λ = 1",
}
PART = "letters"
MEAN, SPREAD = "personal.accuracy_mean", "personal.accuracy_std"


def parts(scale: Scale) -> list[RunPart]:
    names = ("local", "fedavg", "qffl", "apfl", "perfedavg", "ditto")
    return [RunPart(PART, {**letters_settings(scale), "algorithms": {name: {} for name in names}})]


RECIPE = Recipe(
    name="ditto-fairness",
    paper=DITTO,
    reproduces="accuracy and fairness on clean data",
    title="Ditto: accurate and fair",
    about="200 users of ten letters, five per user, lognormal sizes, a tenth active, logistic regression, 200 rounds. "
    "Fairness is, as in the paper, how little test accuracy varies over users.",
    parts=parts,
    tables=[
        ResultTable(
            "Users of letters",
            METHODS,
            [
                ResultColumn("Mean over users", PART, MEAN),
                ResultColumn("Spread over users", PART, SPREAD, lower_is_better=True),
                ResultColumn("Worst 10 %", PART, "personal.worst10"),
            ],
        ),
    ],
    claims=[
        Claim.above("Ditto is more accurate than a fair baseline, q-FFL", PART, "ditto", [FAIR], MEAN, place=ABSTRACT),
        Claim.above(
            "Ditto is fairer than a fair baseline, q-FFL: less spread over users",
            PART,
            "ditto",
            [FAIR],
            SPREAD,
            lower_is_better=True,
            place=ABSTRACT,
            main=True,
        ),
        Claim.above(
            "Ditto is competitive with personalized methods (at most 2 points below APFL and Per-FedAvg, a "
            "limit of ours)",
            PART,
            "ditto",
            ["apfl", "perfedavg"],
            MEAN,
            limit=-0.02,
            place=ABSTRACT,
            main=True,
        ),
        *beyond_rivals(PART, "ditto", "Ditto", ["fedavg", "local"]),
        Untestable("Ditto is more robust than robust baselines", "no attackers are simulated in recipes", ABSTRACT),
    ],
    notes=[
        NO_NUMBERS,
        ONE_RATE,
        "The paper chooses Ditto’s λ by validation data; here it is 1.",
        "q-FFL counts by its one model, as a fair baseline of the paper does.",
    ],
    stand_ins=LETTERS_STAND_INS,
    other_data=(PART,),
    aliases={FAIR: ("qffl", "server"), "fedavg_model": ("fedavg", "server")},
)
