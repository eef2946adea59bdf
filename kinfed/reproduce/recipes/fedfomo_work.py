"""FedFomo with the paper's local work on a smaller network: 5 epochs of 2,667 examples, D = 5 (Table 2)."""

from __future__ import annotations

from kinfed.reproduce import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart
from kinfed.reproduce.recipe import FEDFOMO, Scale
from kinfed.reproduce.recipes.common_fedfomo import (
    COLOUR,
    EMBEDDINGS,
    METHODS,
    NETWORK,
    PAPER_BATCHES,
    SCORED,
    SMOKE_STAND_IN,
    latent_metrics,
    latent_settings,
    method_options,
)
from kinfed.reproduce.recipes.fedfomo_latent import PLACE, TABLE_2

MAIN = ("local", "fedavg", "perfedavg", "pfedme", "fedfomo-5", "fedfomo-10")
ROWS = {label: METHODS[label] for label in MAIN}
RIVALS = tuple(label for label in MAIN if not label.startswith("fedfomo"))
HEADINGS = {"augmented": "Crops and flips", "plain": "Images as they are"}


def parts(scale: Scale) -> list[RunPart]:
    """With the paper's augmentation, and without it as the other recipes at the scale small."""
    plan = []
    for name in HEADINGS:
        settings = {key: value for key, value in latent_settings(scale, 5).items() if key != "augment"}
        if scale == "small":
            del settings["steps"]
            settings |= PAPER_BATCHES | {"dataset": {"name": "cifar10", **COLOUR}}
        if name == "augmented" and scale != "smoke":
            settings["augment"] = "crop_flip"
        plan.append(RunPart(name, settings | {"algorithms": method_options(MAIN, "paper")}, latent_metrics))
    return plan


RECIPE = Recipe(
    name="fedfomo-work",
    paper=FEDFOMO,
    reproduces="Table 2, D = 5, with its local work",
    title="FedFomo with the paper’s local work",
    about="15 clients in 5 latent distributions of CIFAR-10, all active, 20 rounds of 5 epochs in batches of 50 over "
    "all 50,000 images: 2,667 training examples a client. The other recipes take a small part of that work.",
    parts=parts,
    tables=[
        ResultTable(
            "Test accuracy (%) (Table 2, D = 5)",
            ROWS,
            ResultColumn.by_part(HEADINGS, SCORED, digits=2),
            {
                (row, HEADINGS["augmented"]): number
                for (row, heading), number in TABLE_2.items()
                if heading == "D = 5" and row in ROWS
            },
            "FedAvg counts by the model that all clients share. The paper’s images are cropped and flipped.",
        ),
        ResultTable(
            "Top places held by clients of one’s own distribution (%)",
            ROWS,
            ResultColumn.by_part(HEADINGS, "kin.top"),
        ),
    ],
    claims=[
        *(
            Claim.above(
                f"FedFomo above Local, FedAvg, Per-FedAvg and pFedMe, D = 5, {heading.lower()}",
                part,
                "fedfomo-10",
                RIVALS,
                SCORED,
                place=PLACE,
            )
            for part, heading in HEADINGS.items()
        ),
        *(
            Question.above(f"FedFomo above every client alone, {heading.lower()}", part, "fedfomo-5", ["local"], SCORED)
            for part, heading in HEADINGS.items()
        ),
    ],
    notes=[
        "Six of the paper’s eleven methods: the control, the average, and the two best rivals of its column.",
        "Rates and thresholds as in fedfomo-latent.",
    ],
    stand_ins={"smoke": SMOKE_STAND_IN, "small": f"{EMBEDDINGS} in place of VGG-11’s, {NETWORK}."},
    method_figures=[("augmented", "fedfomo-5")],
)
