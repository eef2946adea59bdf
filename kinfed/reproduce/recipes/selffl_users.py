"""How the users' accuracies are distributed (the histograms of Figure 3 in the NeurIPS version)."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.report import figures as report_figures
from kinfed.report.comparison import Comparison
from kinfed.reproduce import Claim, Column, Found, Part, Recipe, Table
from kinfed.reproduce.recipe import SELF_FL, Drawn, Scale
from kinfed.reproduce.recipes.selffl_femnist import letters
from kinfed.reproduce.recipes.selffl_mnist import mnist, options

METHODS = {
    "fedavg": "FedAvg",
    "selffl_control": "Control: smoothing only",
    "ditto": "Ditto",
    "pfedme": "pFedMe",
    "perfedavg": "Per-FedAvg",
    "selffl": "Self-FL",
}
HEADINGS = {"letters": "Letters", "mnist": "MNIST"}


def parts(scale: Scale) -> list[Part]:
    methods = options(METHODS)
    found = [Part("letters", {**letters(scale), "algorithms": methods})]
    if scale != "smoke":
        size = mnist(1000, 200) if scale == "paper" else mnist(300, 150)
        found.append(Part("mnist", {**size, "algorithms": methods}))
    return found


def figures(found: Found, runs: Mapping[str, Comparison]) -> list[Drawn]:
    drawn = []
    for part, comparison in runs.items():
        for make in (report_figures.distribution, report_figures.cumulative_shares):
            if (figure := make(comparison)) is not None:
                drawn.append(Drawn(f"Users of {HEADINGS[part]}", figure, "One entry per user and seed."))
    return drawn


RECIPE = Recipe(
    name="selffl-users",
    paper=SELF_FL,
    shows="Figure 3 of the NeurIPS version",
    title="How well single users are served",
    about="The distribution of test accuracy over users; in the paper, Self-FL moves users away from the low end.",
    parts=parts,
    tables=[
        Table(f"Users of {heading}", METHODS, [
            Column("Mean over users", part, "personal.accuracy_mean"),
            Column("Spread over users", part, "personal.accuracy_std", lower_is_better=True),
            Column("Worst 10 %", part, "personal.worst10"),
        ])
        for part, heading in HEADINGS.items()
    ],
    claims=[
        claim
        for part, heading in HEADINGS.items()
        for claim in (
            Claim.above(f"Fewer badly served users: Self-FL's worst 10 % above all, {heading}", part, "selffl",
                        ("fedavg", "ditto", "pfedme", "perfedavg"), "personal.worst10"),
            Claim.above(f"Self-FL serves users more equally than FedAvg and Ditto, {heading}", part, "selffl",
                        ("fedavg", "ditto"), "personal.accuracy_std", lower_is_better=True),
            Claim.above(f"Self-FL's worst 10 % above smoothing alone, {heading}", part, "selffl", ["selffl_control"],
                        "personal.worst10", asked_by="kinfed"),
        )
    ],
    notes=["The third histogram, CIFAR-10, has 20 users: see selffl-cifar10."],
    stand_ins={
        "smoke": "digits with 40 clients in place of letters; no MNIST.",
        "small": "16x8 letters in place of FEMNIST; MNIST with 300 clients and 150 rounds instead of 1,000 and 200.",
        "paper": "16x8 letters in place of FEMNIST.",
    },
    figures=figures,
)  # fmt: skip
