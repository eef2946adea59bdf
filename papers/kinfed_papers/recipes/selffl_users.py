"""How the users' accuracies are distributed (the histograms of Figure 3 in the NeurIPS version)."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.analysis import Comparison
from kinfed.report import cumulative_shares, distribution
from kinfed_papers import Claim, Question, Recipe, ResultColumn, Results, ResultTable, RunPart
from kinfed_papers.recipe import SELF_FL, RecipeFigure, Scale
from kinfed_papers.recipes.common_selffl import (
    ALIASES,
    COMPARED,
    NAMES,
    ONE_MODEL,
    READINGS,
    READINGS_NOTES,
    RIVALS,
    letters_settings,
    method_options,
    mnist_settings,
    named,
)

METHODS = named(*COMPARED, *READINGS)
ROWS = {ONE_MODEL: "FedAvg, one model", **METHODS}
HEADINGS = {"letters": "Letters", "mnist": "MNIST"}


def parts(scale: Scale) -> list[RunPart]:
    methods = method_options(METHODS)
    letters = RunPart("letters", {**letters_settings(scale), "algorithms": methods})
    if scale == "smoke":
        return [letters]
    mnist = mnist_settings(1000, 200, seeds=5) if scale == "paper" else mnist_settings(300, 150, seeds=5)
    return [letters, RunPart("mnist", {**mnist, "algorithms": methods})]


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    return [
        RecipeFigure(f"Users of {HEADINGS[part]}", figure, "One entry per user and seed.")
        for part, comparison in runs.items()
        for figure in (distribution(comparison), cumulative_shares(comparison))
        if figure is not None
    ]


def _claims(part: str, heading: str) -> list[Claim]:
    return [
        Claim.above(
            f"Users are served better than by FedAvg: a higher mean over users, {heading}",
            part,
            "selffl",
            ["fedavg", ONE_MODEL],
            "personal.accuracy_mean",
            place="NeurIPS version, Section 4.2, Figure 3",
        ),
        Question.above(
            f"Fewer badly served users: Self-FL's worst 10 % above all, {heading}",
            part,
            "selffl",
            RIVALS,
            "personal.worst10",
        ),
        Question.above(
            f"Self-FL serves users more equally than FedAvg and Ditto, {heading}",
            part,
            "selffl",
            ("fedavg", "ditto"),
            "personal.accuracy_std",
            lower_is_better=True,
        ),
        Question.above(
            f"Self-FL's worst 10 % above smoothing alone, {heading}",
            part,
            "selffl",
            ["selffl_control"],
            "personal.worst10",
        ),
        *(
            Question.above(
                f"{NAMES[label]}: a higher mean over users than FedAvg, {heading}",
                part,
                label,
                ["fedavg", ONE_MODEL],
                "personal.accuracy_mean",
            )
            for label in READINGS
        ),
    ]


RECIPE = Recipe(
    name="selffl-users",
    paper=SELF_FL,
    reproduces="Figure 3 of the NeurIPS version",
    title="How well single users are served",
    about="The distribution of test accuracy over users; in the paper, Self-FL moves users away from the low end.",
    parts=parts,
    tables=[
        ResultTable(
            f"Users of {heading}",
            ROWS,
            [
                ResultColumn("Mean over users", part, "personal.accuracy_mean"),
                ResultColumn("Spread over users", part, "personal.accuracy_std", lower_is_better=True),
                ResultColumn("Worst 10 %", part, "personal.worst10"),
            ],
        )
        for part, heading in HEADINGS.items()
    ],
    claims=[claim for part, heading in HEADINGS.items() for claim in _claims(part, heading)],
    notes=[
        *READINGS_NOTES,
        "Batch sums are ten times the rate; no baseline is run at that rate here (selffl-femnist and selffl-mnist have "
        "them).",
        "The figure is of the NeurIPS version, whose Algorithm 1 takes its steps by (8): that reading has a verdict of "
        "its own.",
        "The third histogram, CIFAR-10, has 20 users: see selffl-cifar10.",
    ],
    stand_ins={
        "smoke": "digits with 40 clients in place of letters; no MNIST.",
        "small": "16x8 letters in place of FEMNIST; MNIST with 300 clients and 150 rounds instead of 1,000 and 200.",
        "paper": "16x8 letters in place of FEMNIST.",
    },
    other_data=("letters",),
    aliases=ALIASES,
    figures=figures,
)
