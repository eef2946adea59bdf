"""Which of Self-FL's three parts matters, on handwritten letters (Figure 2b)."""

from __future__ import annotations

from kinfed.reproduce import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart
from kinfed.reproduce.recipe import SELF_FL, Scale
from kinfed.reproduce.recipes.common_selffl import LETTERS_STAND_INS, letters_settings, method_options, named

METHODS = {
    **named("fedavg", "selffl_control"),
    "selffl_init": "Start (18) only",
    "selffl_steps": "Steps (19) only",
    "selffl_agg": "Weights (20) only",
    **named("selffl"),
}
FIGURES = {
    "Global model": "server.accuracy",
    "Personal models": "personal.accuracy",
    "Personal, worst 10 %": "personal.worst10",
}


def parts(scale: Scale) -> list[RunPart]:
    return [RunPart("letters", {**letters_settings(scale, seeds=10), "algorithms": method_options(METHODS)})]


RECIPE = Recipe(
    name="selffl-ablation",
    paper=SELF_FL,
    reproduces="Figure 2b",
    title="The three parts of Self-FL, one at a time",
    about="Each part alone (the start of local training, the number of steps, the weights of the average), all three, "
    "and none of them: smoothing alone, which the paper does not show. Its figure is of the global model.",
    parts=parts,
    tables=[ResultTable("Accuracy (%)", METHODS, ResultColumn.by_metric("letters", FIGURES))],
    claims=[
        Claim.above(
            "The start contributes most: above steps and weights alone, global model",
            "letters",
            "selffl_init",
            ["selffl_steps", "selffl_agg"],
            "server.accuracy",
            place="Section 4.2, Figure 2b",
        ),
        Question.above(
            "All three parts above FedAvg, global model", "letters", "selffl", ["fedavg"], "server.accuracy"
        ),
        *(
            Question.above(
                f"{METHODS[row]} above smoothing alone, {kind} model",
                "letters",
                row,
                ["selffl_control"],
                f"{kind}.accuracy",
            )
            for row in ("selffl_init", "selffl_steps", "selffl_agg", "selffl")
            for kind in ("server", "personal")
        ),
    ],
    notes=["All variants share the smoothing average; the paper does not say whether its ablation does."],
    stand_ins=LETTERS_STAND_INS,
    method_figures=[("letters", "selffl")],
)
