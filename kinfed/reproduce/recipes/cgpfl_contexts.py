"""CGPFL over the rounds for several numbers of contexts (Figures 1 and 2)."""

from __future__ import annotations

from typing import Any

from kinfed.reproduce import Claim, Column, Part, Recipe, Table, Untestable
from kinfed.reproduce.recipe import CGPFL, Scale
from kinfed.reproduce.recipes.cgpfl_table1 import SIZES

CONTEXTS = (1, 2, 4, 10)
BEST = "cgpfl-4"
METHODS = {
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "perfedavg_hf": "Per-FedAvg (HF)",
    **{f"cgpfl-{k}": f"CGPFL, K = {k}" for k in CONTEXTS},
}
HEADINGS = {"mnist-mlr": "MNIST MLR", "mnist-dnn": "MNIST DNN", "fmnist-mlr": "FMNIST MLR", "fmnist-dnn": "FMNIST DNN"}


def parts(scale: Scale) -> list[Part]:
    methods: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS if not name.startswith("cgpfl")}
    methods |= {f"cgpfl-{k}": {"method": "cgpfl", "contexts": k} for k in CONTEXTS}
    common = {
        "clients": 40, "participation": 1.0, "steps": 10, "batch": 20, "lr": 0.005, "algorithms": methods,
        "partition": {**SIZES, "split": "train"}, "seeds": [0, 1, 2],
    }  # fmt: skip
    if scale == "smoke":
        few = {"dataset": "digits", "partition": {"name": "classes", "classes": 3}, "rounds": 10, "seeds": [0, 1]}
        return [Part("mnist-mlr", {**common, **few, "model": "mlr", "clients": 20, "lr": 0.02})]
    if scale == "small":
        return [Part("mnist-mlr", {**common, "dataset": "mnist", "model": "mlr", "rounds": 100})]
    data, models = {"mnist": "mnist", "fmnist": "fashion_mnist"}, {"mlr": "mlr", "dnn": "mlp"}
    return [
        Part(f"{short}-{kind}", {**common, "dataset": name, "model": model, "rounds": 200})
        for short, name in data.items()
        for kind, model in models.items()
    ]


RECIPE = Recipe(
    name="cgpfl-contexts",
    paper=CGPFL,
    shows="Figures 1 and 2",
    title="CGPFL for several numbers of contexts",
    about="Accuracy over the rounds for K contexts, against pFedMe, Ditto and Per-FedAvg: 40 clients of 3 classes, "
    "R = 10, S = 5, λ = 12, α = 1. K = 1 is pFedMe with personal models that go on where they stopped.",
    parts=parts,
    tables=[Table("Personal test accuracy (%)", METHODS, [Column(h, part, digits=2) for part, h in HEADINGS.items()])],
    claims=[
        *(
            Claim.above(f"More contexts than one help, {heading}", part, BEST, ["cgpfl-1"])
            for part, heading in HEADINGS.items()
        ),
        *(
            Claim.above(f"CGPFL above pFedMe, Ditto and Per-FedAvg, {heading}", part, BEST,
                        ["pfedme", "ditto", "perfedavg_hf"])
            for part, heading in HEADINGS.items()
        ),
        Untestable("The curves of Figures 1 and 2", "the paper prints no numbers for them"),
    ],
    notes=["Batch 20 and the pull lr·λ are ours; the paper does not give them."],
    stand_ins={
        "smoke": "digits with 20 clients in place of MNIST and Fashion-MNIST.",
        "small": "MNIST with logistic regression only, 100 of 200 rounds.",
    },
    inside=[("mnist-mlr", BEST)],
)  # fmt: skip
