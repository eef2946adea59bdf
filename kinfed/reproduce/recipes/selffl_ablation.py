"""Which of Self-FL's three parts matters, on handwritten letters (Figure 2b)."""

from __future__ import annotations

from kinfed.reproduce import Claim, Column, Part, Recipe, Table
from kinfed.reproduce.recipe import SELF_FL, Scale
from kinfed.reproduce.recipes.selffl_femnist import letters
from kinfed.reproduce.recipes.selffl_mnist import options

METHODS = {
    "fedavg": "FedAvg",
    "selffl_control": "Control: smoothing only",
    "selffl_init": "Start (18) only",
    "selffl_steps": "Steps (19) only",
    "selffl_agg": "Weights (20) only",
    "selffl": "Self-FL",
}


def parts(scale: Scale) -> list[Part]:
    return [Part("letters", {**letters(scale), "algorithms": options(METHODS)})]


RECIPE = Recipe(
    name="selffl-ablation",
    paper=SELF_FL,
    shows="Figure 2b",
    title="The three parts of Self-FL, one at a time",
    about="Each part alone (the start of local training, the number of steps, the weights of the average), all three, "
    "and none of them: smoothing alone, which the paper does not show. Its figure is of the global model.",
    parts=parts,
    tables=[
        Table("Accuracy (%)", METHODS, [
            Column("Global model", "letters", "server.accuracy"),
            Column("Personal models", "letters"),
            Column("Personal, worst 10 %", "letters", "personal.worst10"),
        ]),
    ],
    claims=[
        Claim.above("The start contributes most: above steps and weights alone, global model", "letters", "selffl_init",
                    ["selffl_steps", "selffl_agg"], "server.accuracy"),
        Claim.above("All three parts above FedAvg, global model", "letters", "selffl", ["fedavg"], "server.accuracy"),
        *(Claim.above(f"{METHODS[row]} above smoothing alone, {kind} model", "letters", row, ["selffl_control"],
                      f"{kind}.accuracy", asked_by="kinfed")
          for row in ("selffl_init", "selffl_steps", "selffl_agg", "selffl") for kind in ("server", "personal")),
    ],
    notes=["All variants share the smoothing average; the paper does not say whether its ablation does."],
    stand_ins={
        "smoke": "digits with 40 clients in place of letters.",
        "small": "16x8 lower-case letters (Taskar, Kassel) in place of FEMNIST.",
        "paper": "16x8 lower-case letters (Taskar, Kassel) in place of FEMNIST.",
    },
    inside=[("letters", "selffl")],
)  # fmt: skip
