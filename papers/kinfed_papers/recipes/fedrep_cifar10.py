"""FedRep against other personalized methods on CIFAR-10, 100 clients of two classes each."""

from __future__ import annotations

from kinfed_papers import Recipe, RunPart
from kinfed_papers.recipe import FEDREP, Scale
from kinfed_papers.recipes.common_popular import (
    NO_NUMBERS,
    ONE_RATE,
    SMALL_IMAGES,
    SMOKE_IMAGES,
    above_alternatives,
    beyond_rivals,
    image_settings,
    personal_table,
)

METHODS = {
    "local": "Local",
    "fedavg": "FedAvg, fine-tuned",
    "fedper": "FedPer",
    "lgfedavg": "LG-FedAvg",
    "apfl": "APFL",
    "ditto": "Ditto",
    "perfedavg": "Per-FedAvg",
    "fedrep": "FedRep",
}
RIVALS = ("fedper", "lgfedavg", "apfl", "ditto", "perfedavg")
PART = "cifar10"


def parts(scale: Scale) -> list[RunPart]:
    settings = image_settings(scale, {"name": "pathological"}, 100, 0.1)
    return [RunPart(PART, {**settings, "algorithms": {name: {} for name in METHODS}})]


RECIPE = Recipe(
    name="fedrep-cifar10",
    paper=FEDREP,
    reproduces="the comparison on CIFAR-10, 100 clients of two classes",
    title="FedRep on CIFAR-10 with two classes per client",
    about="100 clients of two classes each, a tenth active; the body is shared, the last layer is the client’s own and "
    "is trained first.",
    parts=parts,
    tables=[personal_table("Personal models, CIFAR-10 (%)", PART, METHODS)],
    claims=[
        above_alternatives(PART, "fedrep", "FedRep", RIVALS, "Abstract; Table 1"),
        *beyond_rivals(PART, "fedrep", "FedRep", ["fedavg", "local"]),
    ],
    notes=[
        NO_NUMBERS,
        ONE_RATE,
        "The paper’s clients have two classes each; ours get two shards of one class each, which can be the same "
        "class.",
    ],
    stand_ins={"smoke": SMOKE_IMAGES, "small": SMALL_IMAGES},
)
