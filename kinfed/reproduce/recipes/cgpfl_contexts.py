"""CGPFL over the rounds for several numbers of contexts (Figures 1 and 2)."""

from __future__ import annotations

from typing import Any

from kinfed.reproduce import Claim, Recipe, ResultColumn, ResultTable, RunPart, Untestable
from kinfed.reproduce.recipe import CGPFL, Scale
from kinfed.reproduce.recipes.common_cgpfl import DIGITS_SETTINGS, HEADINGS, SETTINGS, paper_settings

CONTEXTS = (1, 2, 4, 10)
BEST = "cgpfl-4"
METHODS = {
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "perfedavg_hf": "Per-FedAvg (HF)",
    **{f"cgpfl-{k}": f"CGPFL, K = {k}" for k in CONTEXTS},
}
RIVALS = ("pfedme", "ditto", "perfedavg_hf")
PARTS = {part: heading for part, heading in HEADINGS.items() if not part.startswith("cifar10")}


def parts(scale: Scale) -> list[RunPart]:
    methods: dict[str, dict[str, Any]] = {name: {"method": name} for name in RIVALS}
    methods |= {f"cgpfl-{k}": {"method": "cgpfl", "contexts": k} for k in CONTEXTS}
    if scale == "smoke":
        return [RunPart("mnist-mlr", {**DIGITS_SETTINGS, "model": "mlr", "rounds": 10, "algorithms": methods})]
    if scale == "small":
        mnist = {**SETTINGS, "dataset": "mnist", "model": "mlr", "rounds": 100}
        return [RunPart("mnist-mlr", {**mnist, "algorithms": methods})]
    return [RunPart(part, {**paper_settings(part), "algorithms": methods}) for part in PARTS]


RECIPE = Recipe(
    name="cgpfl-contexts",
    paper=CGPFL,
    reproduces="Figures 1 and 2",
    title="CGPFL for several numbers of contexts",
    about="Accuracy over the rounds for K contexts, against pFedMe, Ditto and Per-FedAvg: 40 clients of 3 classes, "
    "R = 10, S = 5, λ = 12, α = 1. K = 1 is pFedMe with personal models that go on where they stopped.",
    parts=parts,
    tables=[ResultTable("Personal test accuracy (%)", METHODS, ResultColumn.by_part(PARTS, digits=2))],
    claims=[
        *(
            Claim.above(f"More contexts than one help, {heading}", part, BEST, ["cgpfl-1"])
            for part, heading in PARTS.items()
        ),
        *(
            Claim.above(f"CGPFL above pFedMe, Ditto and Per-FedAvg, {heading}", part, BEST, RIVALS)
            for part, heading in PARTS.items()
        ),
        Untestable("The curves of Figures 1 and 2", "the paper prints no numbers for them"),
    ],
    notes=["Batch 20 and the pull lr·λ are ours; the paper does not give them."],
    stand_ins={
        "smoke": "digits with 20 clients in place of MNIST and Fashion-MNIST.",
        "small": "MNIST with logistic regression only, 100 of 200 rounds.",
    },
    method_figures=[("mnist-mlr", BEST)],
)
