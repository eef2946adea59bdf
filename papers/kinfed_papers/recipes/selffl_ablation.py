"""Which of Self-FL's three parts matters, on handwritten letters (Figure 2b)."""

from __future__ import annotations

from kinfed_papers import Claim, Question, Recipe, ResultColumn, ResultTable, RunPart
from kinfed_papers.recipe import SELF_FL, Scale
from kinfed_papers.recipes.common_selffl import LETTERS_STAND_INS, letters_settings, method_options, named

METHODS = {
    **named("fedavg", "selffl_control"),
    "selffl_init": "Start (18) only",
    "selffl_steps": "Steps (19) only",
    "selffl_agg": "Weights (20) only",
    **named("selffl"),
}
ONE_PART = ("selffl_init", "selffl_steps", "selffl_agg")
ROUGH = {  # the same without the smoothing average, beside which FedAvg is the variant with none of the parts
    **{f"{label}-rough": f"{METHODS[label]}, no smoothing" for label in ONE_PART},
    **named("selffl-rough"),
}
ROWS = METHODS | ROUGH
FIGURES = {
    "Global model": "server.accuracy",
    "Personal models": "personal.accuracy",
    "Personal, worst 10 %": "personal.worst10",
}


def parts(scale: Scale) -> list[RunPart]:
    letters = letters_settings(scale, seeds=10)
    rough = {
        f"{label}-rough": {**options, "smoothing": 1.0}
        for label, options in method_options(("selffl", *ONE_PART)).items()
    }
    return [
        RunPart("letters", {**letters, "algorithms": method_options(METHODS)}),
        RunPart("letters-rough", {**letters, "algorithms": rough}, merge_into="letters"),
    ]


RECIPE = Recipe(
    name="selffl-ablation",
    paper=SELF_FL,
    reproduces="Figure 2b",
    title="The three parts of Self-FL, one at a time",
    about="Each part alone (the start of local training, the number of steps, the weights of the average), all three, "
    "and none of them: smoothing alone, which the paper does not show. Its figure is of the global model.",
    parts=parts,
    tables=[ResultTable("Accuracy (%)", ROWS, ResultColumn.by_metric("letters", FIGURES))],
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
            for row in (*ONE_PART, "selffl")
            for kind in ("server", "personal")
        ),
        Question.above(
            "The start contributes most, without smoothing: above steps and weights alone, global model",
            "letters",
            "selffl_init-rough",
            ["selffl_steps-rough", "selffl_agg-rough"],
            "server.accuracy",
        ),
        *(
            Question.above(f"{ROUGH[row]}: above FedAvg, {kind} model", "letters", row, ["fedavg"], f"{kind}.accuracy")
            for row in ROUGH
            for kind in ("server", "personal")
        ),
    ],
    notes=[
        "The paper does not say whether its ablation has the smoothing average. All variants are here with it and "
        "without; the verdict on the paper's claim is of those with it, which its Section 4 has throughout."
    ],
    stand_ins=LETTERS_STAND_INS,
    other_data=("letters",),
    method_figures=[("letters", "selffl")],
)
