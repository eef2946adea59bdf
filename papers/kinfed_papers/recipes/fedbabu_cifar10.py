"""FedBABU against other personalized methods on CIFAR-10: the head is never trained together, only fine-tuned."""

from __future__ import annotations

from kinfed_papers import Claim, Question, Recipe, RunPart
from kinfed_papers.recipe import FEDBABU, Scale
from kinfed_papers.recipes.common_popular import (
    ABSTRACT,
    NO_NUMBERS,
    ONE_RATE,
    SMALL_IMAGES,
    SMOKE_IMAGES,
    beyond_rivals,
    image_settings,
    personal_table,
)

METHODS = {
    "local": "Local",
    "fedavg": "FedAvg, fine-tuned",
    "fedper": "FedPer",
    "lgfedavg": "LG-FedAvg",
    "fedrep": "FedRep",
    "ditto": "Ditto",
    "perfedavg": "Per-FedAvg",
    "fedbabu": "FedBABU",
}
RIVALS = ("fedper", "lgfedavg", "fedrep", "ditto", "perfedavg")
PART = "cifar10"


def parts(scale: Scale) -> list[RunPart]:
    settings = image_settings(scale, {"name": "dirichlet", "alpha": 0.3}, 100, 0.1)
    return [RunPart(PART, {**settings, "algorithms": {name: {} for name in METHODS}})]


RECIPE = Recipe(
    name="fedbabu-cifar10",
    paper=FEDBABU,
    reproduces="personalization after fine-tuning",
    title="FedBABU on CIFAR-10: bodies without heads",
    about="100 clients with class shares from Dirichlet(0.3), a tenth active. FedBABU’s head stays as it was drawn "
    "while the body is trained; before it is judged, every client fine-tunes the whole model.",
    parts=parts,
    tables=[personal_table("Personal models, CIFAR-10 (%)", PART, METHODS)],
    claims=[
        Claim.above(
            "FedBABU improves on FedAvg: personal models", PART, "fedbabu", ["fedavg"], place=ABSTRACT, main=True
        ),
        Question.above(
            "FedBABU above FedPer, FedRep and other personalized methods", PART, "fedbabu", RIVALS, main=True
        ),
        *beyond_rivals(PART, "fedbabu", "FedBABU", ["local"]),
    ],
    notes=[
        NO_NUMBERS,
        "The abstract speaks of consistent improvements and names no rival. The claim is judged against FedAvg, which "
        "FedBABU changes; the personalized methods are a question of ours.",
        ONE_RATE,
        "The paper deals shards of CIFAR-100 to 100 clients; here CIFAR-10 is shared out by Dirichlet(0.3).",
        "FedBABU fine-tunes for 20 steps before it is judged; FedAvg’s clients keep the model of their last training.",
    ],
    stand_ins={"smoke": SMOKE_IMAGES, "small": SMALL_IMAGES, "paper": "CIFAR-10 in place of CIFAR-100."},
    other_data=(PART,),
)
