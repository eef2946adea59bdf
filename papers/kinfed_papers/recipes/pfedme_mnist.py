"""pFedMe against FedAvg and Per-FedAvg on MNIST, two digits per client."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart
from kinfed_papers.recipe import PFEDME, Scale
from kinfed_papers.recipes.common_popular import ABSTRACT, NO_NUMBERS, ONE_RATE, beyond_rivals

METHODS = {
    "local": "Local (ours)",
    "fedavg_model": "FedAvg",
    "fedavg": "FedAvg, fine-tuned (ours)",
    "perfedavg": "Per-FedAvg",
    "pfedme_model": "pFedMe, server model",
    "pfedme": "pFedMe, personal models",
}
HEADINGS = {"mnist-mlr": "MNIST MLR", "mnist-dnn": "MNIST DNN"}


def parts(scale: Scale) -> list[RunPart]:
    common: dict[str, Any] = {
        "partition": {"name": "classes", "classes": 2},
        "clients": 20,
        "participation": 0.25,
        "steps": 20,
        "batch": 20,
        "lr": 0.01,
        "rounds": 800,
        "seeds": [0, 1, 2, 3, 4],
        "algorithms": {name: {} for name in ("local", "fedavg", "perfedavg", "pfedme")},
        "dataset": "mnist",
    }
    if scale == "smoke":
        common |= {"dataset": "digits", "rounds": 10, "steps": 5, "seeds": [0, 1]}
    if scale == "small":
        common |= {"dataset": {"name": "mnist", "examples": 14000}, "rounds": 100}
    return [RunPart("mnist-mlr", {**common, "model": "mlr"}), RunPart("mnist-dnn", {**common, "model": "mlp"})]


RECIPE = Recipe(
    name="pfedme-mnist",
    paper=PFEDME,
    reproduces="the comparison on MNIST",
    title="pFedMe on MNIST",
    about="20 clients of two digits, five active in a round, 20 local rounds of five gradients on a batch, λ = 15; "
    "logistic regression, and a network with one hidden layer. FedAvg counts by its one model.",
    parts=parts,
    tables=[ResultTable("Test accuracy (%)", METHODS, ResultColumn.by_part(HEADINGS, digits=2))],
    claims=[
        *(
            Claim.above(
                f"pFedMe’s personal models above FedAvg and Per-FedAvg, {heading}",
                part,
                "pfedme",
                ["fedavg_model", "perfedavg"],
                place=ABSTRACT,
                main=True,
            )
            for part, heading in HEADINGS.items()
        ),
        Question.above(
            "pFedMe’s server model above FedAvg’s, MNIST MLR", "mnist-mlr", "pfedme_model", ["fedavg_model"]
        ),
        *beyond_rivals("mnist-mlr", "pfedme", "pFedMe", ["fedavg", "local"]),
    ],
    notes=[NO_NUMBERS, ONE_RATE, "pFedMe takes five gradients on every batch, the others one."],
    stand_ins={
        "smoke": "digits in place of MNIST, 10 rounds.",
        "small": "14,000 of MNIST’s images and 100 rounds instead of 800.",
    },
    aliases={"fedavg_model": ("fedavg", "server"), "pfedme_model": ("pfedme", "server")},
)
