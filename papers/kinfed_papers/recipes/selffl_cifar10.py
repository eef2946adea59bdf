"""Self-FL on CIFAR-10 with a small convolutional network (Figure 2a)."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import SELF_FL, Scale
from kinfed_papers.recipes.common_selffl import (
    ACCURACIES,
    ALIASES,
    COMPARED,
    FASTER,
    FASTER_NOTE,
    NAMES,
    ONE_MODEL,
    PRINTED,
    READINGS,
    READINGS_NOTES,
    RIVALS,
    SEEDS,
    batch_sums,
    faster_baselines,
    method_options,
    named,
    printed_part,
    printed_readings,
)

METHODS = named("local", *COMPARED, *READINGS)
ROWS = {ONE_MODEL: "FedAvg, one model", **METHODS, **named(*PRINTED, *FASTER)}


def parts(scale: Scale) -> list[RunPart]:
    settings: dict[str, Any] = {"clients": 20, "participation": 0.25, "lr": 0.01, "batch": 20}
    if scale == "smoke":
        settings |= {"dataset": "digits", "partition": {"name": "classes", "classes": 3}, "model": "cnn_small"}
        settings |= {"steps": 5, "rounds": 5, "seeds": [0, 1]}
    else:
        settings |= {"dataset": {"name": "cifar10", "standardize": "centred"}, "partition": "pfedme_split"}
        settings |= {
            "model": "cnn_tutorial",
            "steps": 40,
            "rounds": 40 if scale == "small" else 400,
            "seeds": list(SEEDS[: 5 if scale == "small" else 3]),
        }
    return [
        RunPart("cifar10", {**settings, "algorithms": method_options(METHODS)}),
        printed_part("cifar10", settings),
        RunPart("cifar10-fast", {**settings, "algorithms": faster_baselines(settings)}, merge_into="cifar10"),
    ]


RECIPE = Recipe(
    name="selffl-cifar10",
    paper=SELF_FL,
    reproduces="Figure 2a",
    title="Self-FL on CIFAR-10",
    about="20 users of 3 classes each (the pFedMe generator), 5 active, learning rate 0.01, 40 local steps for the "
    "baselines, a network of two convolutions and three dense layers with 62,006 parameters.",
    parts=parts,
    tables=[ResultTable("Accuracy (%)", ROWS, ResultColumn.by_metric("cifar10", ACCURACIES))],
    claims=[
        Claim.above(
            "Self-FL above all baselines, CIFAR-10",
            "cifar10",
            "selffl",
            RIVALS,
            place="Section 4.2, Figure 2a",
            main=True,
        ),
        Claim.above(
            "Users are served better than by FedAvg: a higher mean over users, CIFAR-10",
            "cifar10",
            "selffl",
            ["fedavg", ONE_MODEL],
            "personal.accuracy_mean",
            place="NeurIPS version, Section 4.2, Figure 3",
        ),
        Question.above("Self-FL above smoothing alone, CIFAR-10", "cifar10", "selffl", ["selffl_control"], main=True),
        Question.above("Self-FL above every client alone, CIFAR-10", "cifar10", "selffl", ["local"]),
        *(
            Question.above(f"{NAMES[label]} above FedAvg as one model, CIFAR-10", "cifar10", label, [ONE_MODEL])
            for label in ("selffl", *READINGS)
        ),
        *(
            Question.above(
                f"{NAMES[label]} above all baselines, CIFAR-10", "cifar10", label, RIVALS, main=label == "selffl-rough"
            )
            for label in READINGS
        ),
        *printed_readings("cifar10", "CIFAR-10"),
        *batch_sums("cifar10", "CIFAR-10"),
        Untestable("The curves", "the paper prints no numbers for them", "Section 4.2, Figure 2a"),
    ],
    notes=[
        *READINGS_NOTES,
        FASTER_NOTE,
        "Batches are of 20 here, so that their sum is twenty times the rate, at which a network need not converge.",
        "Rounds, batch size and l_max are not in the paper: 400, 20 and 40 here.",
        "Some users of the generator get only ten images of a class, because the class ran out.",
    ],
    stand_ins={
        "smoke": "digits and a smaller network in place of CIFAR-10.",
        "small": "40 rounds instead of 400: far from converged.",
    },
    aliases=ALIASES,
    method_figures=[("cifar10", "selffl")],
)
