"""IFCA on MNIST in four groups of clients whose images are turned differently."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Claim, Question, Recipe, RunPart
from kinfed_papers.recipe import IFCA, Scale
from kinfed_papers.recipes.common_popular import ABSTRACT, NO_NUMBERS, ONE_RATE, personal_table

METHODS = {
    "local": "Local models",
    "fedavg_model": "Global model (FedAvg)",
    "fedavg": "FedAvg, fine-tuned (ours)",
    "ifca": "IFCA, 4 clusters",
    "ifca-2": "IFCA, 2 clusters (ours)",
}
PART = "rotated"


def parts(scale: Scale) -> list[RunPart]:
    settings: dict[str, Any] = {
        "dataset": {"name": "mnist", "examples": 14000},
        "partition": {"name": "hidden_groups", "by": "rotation", "groups": 4},
        "model": "mlp",
        "clients": 100,
        "participation": 1.0,
        "lr": 0.1,
        "batch": 20,
        "steps": 10,
        "rounds": 60,
        "seeds": [0, 1, 2, 3, 4],
        "algorithms": {"local": {}, "fedavg": {}, "ifca": {}, "ifca-2": {"method": "ifca", "clusters": 2}},
    }
    if scale == "smoke":
        settings |= {"dataset": "digits", "clients": 12, "rounds": 5, "seeds": [0, 1]}
    if scale == "paper":
        settings |= {"dataset": "mnist", "clients": 1200, "rounds": 300}
    return [RunPart(PART, settings)]


RECIPE = Recipe(
    name="ifca-rotated",
    paper=IFCA,
    reproduces="the comparison on rotated MNIST, four clusters",
    title="IFCA on rotated MNIST",
    about="Clients of four groups whose images are turned by 0, 90, 180 and 270 degrees; a network with one hidden "
    "layer. IFCA starts at random, as the others; the global model is FedAvg’s, local models are trained alone.",
    parts=parts,
    tables=[personal_table("Test accuracy (%)", PART, METHODS)],
    claims=[
        Claim.above(
            "IFCA has benefits over the baselines: above a global model and local models",
            PART,
            "ifca",
            ["fedavg_model", "local"],
            place=ABSTRACT,
            main=True,
        ),
        Question.above("IFCA above fine-tuned FedAvg", PART, "ifca", ["fedavg"], main=True),
        Question.above("IFCA with too few clusters still above the global model", PART, "ifca-2", ["fedavg_model"]),
    ],
    notes=[
        NO_NUMBERS,
        "The abstract speaks of “the baselines” without naming them; that these are one model for all and one of every "
        "client’s own is our reading.",
        ONE_RATE,
        "From a random start IFCA can merge two groups into one cluster; the paper restarts where it must, here every "
        "seed counts as it is.",
    ],
    stand_ins={
        "smoke": "digits with 12 clients in place of MNIST.",
        "small": "14,000 of MNIST’s images, 100 clients, 60 rounds, one hidden layer of 128.",
    },
    aliases={"fedavg_model": ("fedavg", "server")},
)
