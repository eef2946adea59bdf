"""The last column of CGPFL's Table 1, CIFAR-10, at a scale for two cores."""

from __future__ import annotations

from kinfed.reproduce import Claim, Column, Part, Recipe, Table, published
from kinfed.reproduce.recipe import CGPFL, Scale
from kinfed.reproduce.recipes.cgpfl_table1 import METHODS, PAPER, RIVALS, SIZES, algorithms
from kinfed.reproduce.recipes.cgpfl_table1 import parts as table1

PART = "cifar10-cnn"
THEIRS = {key: value for key, value in published(PAPER).items() if key[1] == "CIFAR-10 CNN"}


def parts(scale: Scale) -> list[Part]:
    if scale == "paper":
        return [part for part in table1("paper") if part.name == PART]
    common = {
        "clients": 40, "participation": 1.0, "steps": 10, "batch": 20, "lr": 0.03, "algorithms": algorithms(),
        "seeds": [0, 1, 2], "eval_every": 4,
    }  # fmt: skip
    if scale == "smoke":
        few = {"dataset": "digits", "partition": {"name": "classes", "classes": 3}, "model": "cnn_small", "clients": 10}
        return [Part(PART, {**common, **few, "steps": 3, "rounds": 4, "seeds": [0, 1]})]
    data = {"dataset": "cifar10", "model": "cnn_tutorial", "partition": {**SIZES, "split": "pooled"}, "rounds": 16}
    return [Part(PART, {**common, **data, "clients": 20, "lr": 0.06})]  # lr λ must stay below 1, and pFedMe has λ = 15


RECIPE = Recipe(
    name="cgpfl-cifar10",
    paper=CGPFL,
    shows="Table 1, last column",
    title="CGPFL and seven competitors on CIFAR-10",
    about="40 clients with 3 of 10 classes, all active, R = 10, S = 5, λ = 12, α = 1, K = 4, learning rate 0.03.",
    parts=parts,
    tables=[
        Table("Test accuracy (%)", METHODS, [
            Column("CIFAR-10 CNN", PART, digits=2), Column("Worst 10 %", PART, "personal.worst10"),
        ], THEIRS),
    ],
    claims=[
        Claim.above("CGPFL-Heur above all competitors", PART, "cgpfl_heur", RIVALS),
        Claim.above("CGPFL (K=4) above all competitors", PART, "cgpfl", RIVALS),
        Claim.above("CGPFL-Heur above CGPFL (K=4)", PART, "cgpfl_heur", ["cgpfl"]),
        Claim.above("CGPFL-Heur above Local and fine-tuned FedAvg", PART, "cgpfl_heur", ["local", "fedavg"],
                    asked_by="kinfed"),
    ],
    notes=[
        "All methods share learning rate, batches and numbers of local steps; pFedMe and CGPFL take S = 5 gradients "
        "per batch.",
        "The sizes of the paper's two convolutions are not given; see kinfed list models.",
    ],
    stand_ins={
        "smoke": "digits with 10 clients and a small network in place of CIFAR-10.",
        "small": "20 clients instead of 40, 16 rounds instead of 300 with a learning rate of 0.06 instead of 0.03, and "
        "the smaller network with 62,006 parameters: methods are far from converged, and levels cannot be compared "
        "with the paper's.",
    },
    aliases={"fedavg_global": ("fedavg", "server")},
    inside=[(PART, "cgpfl_heur")],
)  # fmt: skip
