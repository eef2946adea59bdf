"""Self-FL on CIFAR-10 with a small convolutional network (Figure 2a)."""

from __future__ import annotations

from typing import Any

from kinfed.reproduce import Claim, Column, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import SELF_FL, Scale
from kinfed.reproduce.recipes.selffl_mnist import FIGURES, RIVALS, options

METHODS = {
    "local": "Local",
    "fedavg": "FedAvg",
    "selffl_control": "Control: smoothing only",
    "ditto": "Ditto",
    "pfedme": "pFedMe",
    "perfedavg": "Per-FedAvg",
    "selffl": "Self-FL",
}


def parts(scale: Scale) -> list[Part]:
    common: dict[str, Any] = {
        "partition": "pfedme_split", "clients": 20, "participation": 0.25, "lr": 0.01, "batch": 20, "steps": 40,
        "algorithms": options(METHODS),
    }  # fmt: skip
    if scale == "smoke":
        few = {"dataset": "digits", "partition": {"name": "classes", "classes": 3}, "model": "cnn_small", "steps": 5}
        return [Part("cifar10", {**common, **few, "rounds": 5, "seeds": [0, 1]})]
    data = {"dataset": {"name": "cifar10", "standardize": "centred"}, "model": "cnn_tutorial"}
    if scale == "small":
        return [Part("cifar10", {**common, **data, "rounds": 40, "seeds": [0, 1, 2]})]
    return [Part("cifar10", {**common, **data, "rounds": 400, "seeds": [0, 1, 2]})]


RECIPE = Recipe(
    name="selffl-cifar10",
    paper=SELF_FL,
    shows="Figure 2a",
    title="Self-FL on CIFAR-10",
    about="20 users of 3 classes each (the pFedMe generator), 5 active, learning rate 0.01, 40 local steps for the "
    "baselines, a network of two convolutions and three dense layers with 62,006 parameters.",
    parts=parts,
    tables=[Table("Accuracy (%)", METHODS, [Column(h, "cifar10", m) for h, m in FIGURES])],
    claims=[
        Claim.above("Self-FL above all baselines", "cifar10", "selffl", RIVALS),
        Claim.above("Self-FL above smoothing alone", "cifar10", "selffl", ["selffl_control"], asked_by="kinfed"),
        Claim.above("Self-FL above every client alone", "cifar10", "selffl", ["local"], asked_by="kinfed"),
        Untestable("The curves of Figure 2a", "the paper prints no numbers for them"),
    ],
    notes=[
        "Rounds, batch size and l_max are not in the paper: 400, 20 and 40 here.",
        "Some users of the generator get only ten images of a class, because the class ran out.",
    ],
    stand_ins={
        "smoke": "digits and a smaller network in place of CIFAR-10.",
        "small": "40 rounds instead of 400: far from converged.",
    },
    inside=[("cifar10", "selffl")],
)  # fmt: skip
