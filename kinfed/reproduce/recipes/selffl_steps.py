"""How many local steps Self-FL lets its clients take (Figures 10 and 11)."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.report.comparison import Comparison
from kinfed.report.panels.selffl_panel import decisions
from kinfed.reproduce import Claim, Recipe, ResultColumn, Results, ResultTable, RunPart, Untestable, difference
from kinfed.reproduce.recipe import SELF_FL, BySeed, Measurements, RecipeFigure, Scale
from kinfed.reproduce.recipes.common_selffl import LETTERS_STAND_INS, letters_settings, method_options
from kinfed.runs.reader import Run


def mean_steps(run: Run) -> Measurements:
    """Mean number of steps of the clients whose uncertainty is known, at two thirds of the run and at its end."""
    two_thirds = 2 * int(run.config["rounds"]) // 3
    middle: BySeed = {}
    end: BySeed = {}
    for trial in run.trials:
        for entry in trial.rounds:
            clients = entry.method.get("clients") or {"raw_steps": (), "steps": ()}
            pairs = zip(clients["raw_steps"], clients["steps"], strict=True)
            steps = [float(taken) for raw, taken in pairs if raw >= 0]  # negative: not computed yet
            if steps:
                end[trial.seed] = sum(steps) / len(steps)
                if entry.number <= two_thirds:
                    middle[trial.seed] = end[trial.seed]
    return {"selffl": {"steps.middle": middle, "steps.end": end}}


def parts(scale: Scale) -> list[RunPart]:
    settings = {**letters_settings(scale), "eval_every": 5, "algorithms": method_options(["selffl"])}
    return [RunPart("letters", settings, mean_steps)]


def fewer(results: Results) -> dict[str, BySeed]:
    middle, end = (results.get("letters", "selffl", f"steps.{when}") for when in ("middle", "end"))
    return {"": difference(middle, end)}


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    panels = (decisions(method) for comparison in runs.values() for method in comparison.methods)
    return [figure for panel in panels if panel is not None for figure in RecipeFigure.from_panel(panel)]


RECIPE = Recipe(
    name="selffl-steps",
    paper=SELF_FL,
    reproduces="Figures 10 and 11",
    title="The number of local steps, client by client",
    about="Self-FL computes from its uncertainties how many local steps a client takes: the distribution over clients, "
    "and one client over the rounds.",
    parts=parts,
    tables=[
        ResultTable(
            "Steps",
            {"selffl": "Self-FL"},
            ResultColumn.by_metric(
                "letters", {"Mean at two thirds": "steps.middle", "Mean at the end": "steps.end"}, factor=1.0
            ),
        ),
    ],
    claims=[
        Claim("Clients take fewer steps towards the end of the run", fewer, "steps", 1.0),
        Untestable("The histogram at round 100", "the paper prints no numbers for it"),
    ],
    notes=[
        "By its formula the number of steps grows with a client's uncertainty, up to the cap: the text of the "
        "NeurIPS version says the opposite of its own formula."
    ],
    stand_ins=LETTERS_STAND_INS,
    figures=figures,
)
