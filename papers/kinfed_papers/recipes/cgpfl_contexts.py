"""CGPFL over the rounds for several numbers of contexts (Figures 1 and 2)."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Claim, Question, Recipe, ResultColumn, Results, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import CGPFL, BySeed, Margins, Scale, difference
from kinfed_papers.recipes.common_cgpfl import (
    DIGITS_SETTINGS,
    DISTANCE,
    GRADIENT,
    HEADINGS,
    L2_NOTE,
    LAMBDA_NOTE,
    LATE_GRADIENT,
    MANY_CGPFL,
    PFEDME,
    ROUNDS_TO_LEVEL,
    TABLE_CGPFL,
    convergence,
    model_settings,
    paper_settings,
    rounds_of,
)

CONTEXTS = (1, 2, 4, 10)
METHODS = {
    "pfedme": "pFedMe, λ = 12",
    "pfedme-15": "pFedMe, λ = 15 (its default)",
    "ditto": "Ditto",
    "perfedavg_hf": "Per-FedAvg (HF)",
    **{f"cgpfl-{k}": f"CGPFL, K = {k}" for k in CONTEXTS},
}
RIVALS = ("pfedme", "ditto", "perfedavg_hf")
PARTS = HEADINGS
QUANTITIES = {
    GRADIENT: "Squared gradients of the contexts",
    DISTANCE: "Squared distances of personal models from their context",
}


def parts(scale: Scale) -> list[RunPart]:
    methods: dict[str, dict[str, Any]] = {name: {"method": name} for name in RIVALS} | PFEDME
    methods |= {f"cgpfl-{k}": {"method": "cgpfl", "contexts": k} for k in CONTEXTS}
    if scale == "smoke":
        digits = {**DIGITS_SETTINGS, **model_settings("mlr"), "rounds": 10, "eval_every": 1}
        return [RunPart("mnist-mlr", {**digits, "algorithms": methods}, convergence)]
    if scale == "small":
        # What claims need, for the dear network.
        judged = {name: methods[name] for name in (*RIVALS, "cgpfl-1", TABLE_CGPFL, MANY_CGPFL)}
        fewer = {
            part: {"rounds": 40, "algorithms": judged} if part.endswith("-dnn") else {"rounds": 100} for part in PARTS
        }
    else:
        fewer = {part: {} for part in PARTS}
    return [
        RunPart(part, {**paper_settings(part), "eval_every": 1, "algorithms": methods, **fewer[part]}, convergence)
        for part in PARTS
    ]


def _in_units_of_one_context(part: str, metric: str) -> Margins:
    """The metric with K = 4 in units of that with K = 1."""

    def margins(results: Results) -> dict[str, BySeed]:
        one, four = (results.get(part, row, metric) for row in ("cgpfl-1", TABLE_CGPFL))
        return {"": {seed: four[seed] / one[seed] for seed in one.keys() & four.keys()}}

    return margins


def _comes_to_rest(part: str) -> Margins:
    """By which share of the gradient over all rounds that over their second half is smaller."""

    def margins(results: Results) -> dict[str, BySeed]:
        every, late = (results.get(part, TABLE_CGPFL, metric) for metric in (GRADIENT, LATE_GRADIENT))
        return {"": {seed: 1 - late[seed] / every[seed] for seed in every.keys() & late.keys()}}

    return margins


def _rounds_saved(part: str, cgpfl: str) -> Margins:
    return lambda results: {
        rival: difference(*(results.get(part, rival, key) for key in (ROUNDS_TO_LEVEL, rounds_of(cgpfl))))
        for rival in RIVALS
    }


def _figure(part: str) -> str:
    return "Figure 1" if part.startswith("mnist") else "Figure 2"


RECIPE = Recipe(
    name="cgpfl-contexts",
    paper=CGPFL,
    reproduces="Figures 1 and 2",
    title="CGPFL for several numbers of contexts",
    about="Accuracy over the rounds for K contexts, against pFedMe, Ditto and Per-FedAvg: 40 clients of 3 classes, "
    "R = 10, S = 5, λ = 12, α = 1. K = 1 is pFedMe with personal models that go on where they stopped.",
    parts=parts,
    tables=[
        ResultTable("Personal test accuracy (%)", METHODS, ResultColumn.by_part(PARTS, digits=2)),
        ResultTable(
            "Rounds until a method’s personal models have 95 % of their final accuracy",
            METHODS,
            ResultColumn.by_part(PARTS, ROUNDS_TO_LEVEL, factor=1.0, lower_is_better=True),
        ),
        *(
            ResultTable(
                f"Rounds until {METHODS[cgpfl]}, has 95 % of what each of these has in the end",
                {row: METHODS[row] for row in RIVALS},
                ResultColumn.by_part(PARTS, rounds_of(cgpfl), factor=1.0, lower_is_better=True),
            )
            for cgpfl in (TABLE_CGPFL, MANY_CGPFL)
        ),
        *(
            ResultTable(
                f"{quantity}, mean over rounds (Theorem 4.1)",
                {row: name for row, name in METHODS.items() if row.startswith("cgpfl")},
                ResultColumn.by_part(PARTS, metric, factor=1.0, digits=5, lower_is_better=True),
                caption="Up to a constant that is the same for every K." if metric == GRADIENT else "",
            )
            for metric, quantity in QUANTITIES.items()
        ),
    ],
    claims=[
        *(
            Claim.above(
                f"More contexts than one help, {heading}",
                part,
                TABLE_CGPFL,
                ["cgpfl-1"],
                place=f"Remark 4.2; {_figure(part)}",
            )
            for part, heading in PARTS.items()
        ),
        *(
            Claim.above(
                f"CGPFL above pFedMe, Ditto and Per-FedAvg, {heading}",
                part,
                TABLE_CGPFL,
                RIVALS,
                place=f"Section 5.2, {_figure(part)}",
            )
            for part, heading in PARTS.items()
        ),
        *(
            Claim(
                "CGPFL converges faster than pFedMe, Ditto and Per-FedAvg (rounds to 95 % of the rival’s final "
                f"accuracy), {heading}",
                _rounds_saved(part, TABLE_CGPFL),
                "rounds",
                1.0,
                f"Section 5.2, {_figure(part)}",
                main=True,
            )
            for part, heading in PARTS.items()
        ),
        *(
            Question(
                f"CGPFL with K = 10 converges faster than pFedMe, Ditto and Per-FedAvg, {heading}",
                _rounds_saved(part, MANY_CGPFL),
                "rounds",
                1.0,
                main=True,
            )
            for part, heading in PARTS.items()
        ),
        *(
            Question.above(
                f"CGPFL with K = 10 above pFedMe, Ditto and Per-FedAvg, {heading}", part, MANY_CGPFL, RIVALS, main=True
            )
            for part, heading in PARTS.items()
        ),
        *(
            Question.above(f"CGPFL above pFedMe with its own λ, {heading}", part, TABLE_CGPFL, ["pfedme-15"])
            for part, heading in PARTS.items()
        ),
        *(
            Claim(
                f"CGPFL converges: squared gradients of the contexts fall over the rounds (second half of the rounds "
                f"against all), {heading}",
                _comes_to_rest(part),
                "of the mean over all rounds",
                1.0,
                "Theorem 4.1, first bound",
            )
            for part, heading in PARTS.items()
        ),
        *(
            Question(
                f"{quantity} with K = 4 at most 1/√4 of those with K = 1, as the rates of Remark 4.1 suggest (bounds, "
                f"which need not be met), {heading}",
                _in_units_of_one_context(part, metric),
                "of the value with K = 1",
                1.0,
                limit=0.5,
                at_most=True,
            )
            for part, heading in PARTS.items()
            for metric, quantity in QUANTITIES.items()
        ),
        Untestable(
            "A rate of 1/√(KNRT)",
            "it bounds an unknown constant times the measured quantity, and holds for R and T without end",
            "Theorem 4.1, Remark 4.1",
        ),
        Untestable("The curves", "the paper prints no numbers for them", "Figures 1 and 2"),
    ],
    notes=[
        L2_NOTE,
        LAMBDA_NOTE,
        "Batch 20 and the pull lr·λ are ours; the paper does not give them.",
        "The values of K in the figures are not in the text. Claims are judged with the K = 4 of Table 1.",
    ],
    stand_ins={
        "smoke": "digits with 20 clients in place of MNIST and Fashion-MNIST.",
        "small": "100 of 200 rounds; the network after 40 of 200, far from converged, and with K = 1, 4 and 10 alone.",
    },
    method_figures=[("mnist-mlr", TABLE_CGPFL)],
)
