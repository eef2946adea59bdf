"""Own normalization layers where clients see through cameras of their own: FedBN on CIFAR-10 with planted shifts."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Question, Recipe, ResultColumn, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import FEDBN, Scale

METHODS = {
    "local": "Local",
    "fedavg_server": "FedAvg",
    "fedavg": "FedAvg, fine-tuned",
    "fedbn": "FedBN",
}
ALIASES = {"fedavg_server": ("fedavg", "server")}
# The paper's case, its control, and the case in which clients differ by classes as well.
PARTS = {"cameras": "own cameras", "control": "one camera", "classes": "own cameras and classes"}
# Of cameras, so far apart that models trained for minutes show it: factors up to e, shifts up to 0.8 of half the scale.
CONTRAST, BRIGHTNESS = 1.0, 0.8
EQUAL = 1000.0  # of a Dirichlet distribution: every client has nearly the same share of every class


def parts(scale: Scale) -> list[RunPart]:
    """Equal shares of all classes, with a camera of each client's own and without; and unequal shares, with cameras."""
    common: dict[str, Any] = {"clients": 10, "participation": 1.0, "algorithms": "local,fedavg,fedbn"}
    if scale == "smoke":
        common |= {"dataset": "digits", "model": {"name": "resnet18", "width": 2}, "rounds": 2, "steps": 2, "batch": 8}
        common |= {"seeds": [0, 1]}
    elif scale == "small":
        common |= {"dataset": {"name": "cifar10", "examples": 8000}, "model": {"name": "resnet18", "width": 4}}
        common |= {"rounds": 24, "steps": 5, "batch": 16, "lr": 0.1, "momentum": 0.9}
        common |= {"seeds": [1, 2, 3], "eval_every": 0}  # cameras, rate and rounds were chosen on seed 0
    else:
        common |= {"dataset": "cifar10", "model": "resnet18", "rounds": 300, "epochs": 1, "batch": 32, "lr": 0.01}
        common |= {"seeds": [0, 1, 2]}
    cameras = {"name": "feature_shift", "alpha": EQUAL, "contrast": CONTRAST, "brightness": BRIGHTNESS}
    control = cameras | {"contrast": 0.0, "brightness": 0.0}
    splits = {"cameras": cameras, "control": control, "classes": cameras | {"alpha": 0.1}}
    return [RunPart(name, {**common, "partition": split}) for name, split in splits.items()]


RECIPE = Recipe(
    name="fedbn-features",
    paper=FEDBN,
    reproduces="its question on planted shifts; no table",
    title="FedBN on CIFAR-10 with a camera of each client's own",
    about="Ten clients share CIFAR-10 out, all take part; ResNet-18 with BatchNorm. Every client changes contrast and "
    "brightness of each colour channel by factors of its own (partition feature_shift), in training and test images "
    "alike. Classes are shared out equally, as in the paper; the control has the same rows without the change, and in "
    "a third part classes are shared out by Dirichlet(0.1) as well.",
    parts=parts,
    tables=[
        ResultTable(
            "Test accuracy (%)",
            METHODS,
            [
                *(
                    ResultColumn(f"{heading}, {name}", part, metric)
                    for part, name in PARTS.items()
                    for heading, metric in (("Accuracy", "personal.accuracy"), ("Worst tenth", "personal.worst10"))
                ),
                ResultColumn("MB per round", "cameras", "bytes", factor=1e-6, digits=2, lower_is_better=True),
            ],
        ),
    ],
    claims=[
        *(
            Question.above(f"FedBN above {METHODS[rival]}, {name}", part, "fedbn", [rival])
            for part, name in PARTS.items()
            for rival in ("fedavg_server", "fedavg", "local")
        ),
        Untestable(
            "The paper's tables (digits of five data sets, Office-Caltech, DomainNet)",
            "their data is not here",
            "its tables",
        ),
    ],
    notes=[
        "Where clients also differ by classes, which the paper's do not, models that have seen a client's few classes "
        "last (local, fine-tuned) have an advantage that is no matter of cameras.",
        "FedBN's models are the shared part after averaging with the client's own normalization layers; fine-tuned "
        "ones are those after the last local training. FedBN has no server model.",
        "One learning rate for all, not tuned for any. At the small scale the rate, the rounds and how far cameras lie "
        "apart were chosen on seed 0, which is not among its seeds.",
    ],
    stand_ins={
        "smoke": "digits in place of CIFAR-10, and a network of width 2.",
        "small": "8,000 of 60,000 images, a ResNet-18 of a sixteenth of the width, 24 rounds of 5 steps with momentum "
        "0.9: far from converged.",
    },
    other_data=tuple(PARTS),
    aliases=ALIASES,
)
