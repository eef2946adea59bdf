"""What buys what in `kin`: its candidates one by one, its groups, its prior, and its two options of deployment."""

from __future__ import annotations

from typing import Any

from kinfed_papers import Question, Recipe, ResultColumn, ResultTable, RunPart
from kinfed_papers.recipe import PAPERS, Scale
from kinfed_papers.recipes.common_presets import PRESET, own_defaults
from kinfed_papers.recipes.kin_everywhere import FEDERATIONS

ALIASES = {name: ("kin", name) for name in ("alone", "together", "adapted")}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kin": ("Kin", {}),
    "one_model": ("Kin without groups", {"max_groups": 1}),
    "no_prior": ("Kin, shares by the client's examples alone", {"strength": 0.1}),
    "prior_only": ("Kin, the population's shares for all", {"strength": 1e6}),
    "refit": ("Kin, refitted with validation examples", {"refit": 1}),
    "merged": ("Kin, merged to one model", {"deploy": "merged"}),
}
ROWS = {
    "alone": "Its candidate alone",
    "together": "Its candidate together",
    "adapted": "Its candidate adapted",
    **{label: title for label, (title, _) in VARIANTS.items()},
}
PARTS = ("dirichlet-01", "rotation", "tiny", "foreign", "hospitals", "persons", "letters")
SMOKE = ("rotation",)


def parts(scale: Scale) -> list[RunPart]:
    defaults = own_defaults("kin")
    algorithms = {label: {"method": "kin", **defaults, **options} for label, (_, options) in VARIANTS.items()}
    common: dict[str, Any] = {
        "algorithms": algorithms, "preset": PRESET, "rounds": 40, "eval_every": 0, "validation": 0.2,
        "seeds": [0, 1, 2, 3, 4],
    }  # fmt: skip
    if scale == "smoke":
        common |= {"rounds": 2, "steps": 2, "seeds": [0, 1]}
    if scale == "paper":
        common |= {"rounds": 100, "seeds": list(range(10))}
    return [RunPart(name, {**common, **FEDERATIONS[name][1]}) for name in (SMOKE if scale == "smoke" else PARTS)]


def _above(text: str, part: str, row: str, rivals: list[str]) -> Question:
    return Question.above(f"{text}: {FEDERATIONS[part][0]}", part, row, rivals)


HEADINGS = {part: FEDERATIONS[part][0] for part in PARTS}

RECIPE = Recipe(
    name="kin-ablation",
    paper=PAPERS["kinfed"],
    reproduces="our question about its parts",
    title="Kin without one of its parts",
    about="Kin as it is, its three candidates each alone, and Kin with one thing changed: no groups, no prior, nothing "
    "but the prior, refitted with validation examples, merged to one model. All have the same rounds, batches and "
    "learning rate.",
    parts=parts,
    tables=[
        ResultTable("Personal models, accuracy in %", ROWS, ResultColumn.by_part(HEADINGS)),
        ResultTable(
            "Clients with the lowest accuracy, a tenth of all, in %",
            ROWS,
            ResultColumn.by_part(HEADINGS, "personal.worst10"),
        ),
    ],
    claims=[
        *(
            _above("Kin is ahead of every one of its candidates", part, "kin", ["alone", "together", "adapted"])
            for part in PARTS
        ),
        _above("Groups help where there are groups", "rotation", "kin", ["one_model"]),
        *(_above("Kin is ahead of shares without a prior", part, "kin", ["no_prior"]) for part in PARTS),
        *(_above("Kin is ahead of the same shares for all", part, "kin", ["prior_only"]) for part in PARTS),
        *(_above("Validation examples given back help", part, "refit", ["kin"]) for part in PARTS),
        *(_above("A mixture is ahead of one merged model", part, "kin", ["merged"]) for part in PARTS),
    ],
    aliases=ALIASES,
    stand_ins={"smoke": "Digits in four groups, two rounds of two steps."},
)
