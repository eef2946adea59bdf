"""Self-FL on MNIST: 1,000 clients of two digits each, a tenth of them active (Figure 1a; Figure 9 with C = 0.02)."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart, Untestable
from kinfed_papers.recipe import SELF_FL, Scale
from kinfed_papers.recipes.common_selffl import (
    ACCURACIES,
    ALIASES,
    FASTER,
    FASTER_NOTE,
    NAMES,
    ONE_MODEL,
    PRINTED,
    READINGS,
    READINGS_NOTES,
    RIVALS,
    batch_sums,
    columns_with_stability,
    faster_baselines,
    method_options,
    mnist_settings,
    other_readings,
    printed_part,
    printed_readings,
    roughness,
    stable_convergence,
)

# As many steps as Self-FL may take, in a run of their own.
LONGER: dict[str, dict[str, Any]] = {
    "control-40": {"method": "selffl_control", "steps": 40},
    **{f"{rival}-40": {"method": rival, "steps": 40} for rival in RIVALS},
}
ROWS = {ONE_MODEL: "FedAvg, one model", **NAMES}


def parts(scale: Scale) -> list[RunPart]:
    tenth = mnist_settings(1000, 200, seeds=3 if scale == "small" else 5)
    methods = method_options(label for label in NAMES if label not in (*LONGER, *FASTER, *PRINTED)) | faster_baselines(
        tenth
    )
    if scale == "smoke":
        digits = {**mnist_settings(50, 20), "dataset": "digits", "seeds": [0, 1]}
        return [RunPart("active-10", {**digits, "eval_every": 5, "algorithms": methods}, roughness)]
    fiftieth = {**tenth, "participation": 0.02}
    few = method_options(["fedavg", "ditto", "selffl_control", "selffl"])
    return [
        RunPart("active-10", {**tenth, "eval_every": 5, "algorithms": methods}, roughness),
        printed_part("active-10", tenth),
        RunPart("active-10-longer", {**tenth, "algorithms": LONGER}, merge_into="active-10"),
        RunPart("active-2", {**fiftieth, "algorithms": few}),
    ]


RECIPE = Recipe(
    name="selffl-mnist",
    paper=SELF_FL,
    reproduces="Figures 1a and 9",
    title="Self-FL on MNIST with 1,000 clients",
    about="Two digits per client, lognormal sizes (FedProx), logistic regression, 200 rounds from scratch; the "
    "baselines take 20 local steps, Self-FL at most 40. The paper has curves and no table; the control with "
    "only Self-FL's smoothing average stands beside it.",
    parts=parts,
    tables=[
        ResultTable("A tenth of the clients active", ROWS, columns_with_stability("active-10")),
        ResultTable("One client in fifty active (Figure 9)", NAMES, ResultColumn.by_metric("active-2", ACCURACIES)),
    ],
    claims=[
        Claim.above(
            "Self-FL (with smoothing) above all baselines, MNIST, personal models",
            "active-10",
            "selffl",
            RIVALS,
            place="Section 4.2, Figure 1a (ii)",
            main=True,
        ),
        stable_convergence("active-10", "MNIST", "Section 4.2, Figure 1a (i)"),
        Claim.above(
            "With C = 0.02 Self-FL converges more slowly than FedAvg and Ditto, global models",
            "active-2",
            "selffl",
            [ONE_MODEL, "ditto"],
            "server.accuracy",
            lower_is_better=True,
            place="Appendix E.5, Figure 9",
        ),
        Question.above(
            "With C = 0.02 Self-FL converges more slowly than FedAvg and Ditto, personal models",
            "active-2",
            "selffl",
            ["fedavg", "ditto"],
            lower_is_better=True,
        ),
        Question.above(
            "Self-FL above all baselines, MNIST, worst 10 %", "active-10", "selffl", RIVALS, "personal.worst10"
        ),
        Question.above(
            "Self-FL's global model above FedAvg's, MNIST", "active-10", "selffl", [ONE_MODEL], "server.accuracy"
        ),
        Question.above(
            "Self-FL above smoothing alone, MNIST, personal models",
            "active-10",
            "selffl",
            ["selffl_control"],
            main=True,
        ),
        Question.above(
            "Steps (19) alone above smoothing alone, MNIST", "active-10", "selffl_steps", ["selffl_control"]
        ),
        Question.above(
            "Steps (19) alone above smoothing alone with 40 steps, the most it may take, MNIST",
            "active-10",
            "selffl_steps",
            ["control-40"],
        ),
        Question.above(
            "Self-FL above smoothing alone, MNIST, worst 10 %",
            "active-10",
            "selffl",
            ["selffl_control"],
            "personal.worst10",
        ),
        Question.above("The exact posterior above the paper's, MNIST", "active-10", "selffl_exact", ["selffl"]),
        Question.above("Self-FL above every client alone, MNIST", "active-10", "selffl", ["local"]),
        *batch_sums("active-10", "MNIST, 20 steps"),
        *printed_readings("active-10", "MNIST, 20 steps for the baselines"),
        *other_readings({"active-10": "MNIST, 20 steps for the baselines"}),
        *(
            Question.above(
                f"{NAMES[label]} above all baselines with 40 steps, MNIST",
                "active-10",
                label,
                [f"{rival}-40" for rival in RIVALS],
            )
            for label in ("selffl", *READINGS)
        ),
        Untestable("The curves", "the paper prints no numbers for them", "Section 4.2, Figure 1a"),
    ],
    notes=[
        *READINGS_NOTES,
        FASTER_NOTE,
        "The partition follows FedProx's generator, whose draws have no seed; sizes differ from seed to seed.",
        "Ditto's λ and the settings of pFedMe and Per-FedAvg are not in the paper; ours are the methods' defaults.",
        "Figure 9 does not name its axis; the text explains it by the global model, which the claim is judged by. "
        "Slower means less accurate after the 200 rounds. Ditto trains its global model as FedAvg does: one rival.",
        "Clients with one or two test examples decide the worst tenth here; the client mean says more.",
    ],
    stand_ins={"smoke": "digits with 50 clients in place of MNIST with 1,000; these figures say nothing about MNIST."},
    aliases=ALIASES,
    method_figures=[("active-10", "selffl")],
)
