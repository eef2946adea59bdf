"""How many local steps Self-FL lets its clients take (Figures 10 and 11)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median

from kinfed.analysis import Comparison
from kinfed.records import RunRecord as Run
from kinfed.report import decisions
from kinfed.reproduce import Claim, Recipe, ResultColumn, Results, ResultTable, RunPart, Untestable, difference
from kinfed.reproduce.recipe import SELF_FL, BySeed, Measurements, RecipeFigure, Scale
from kinfed.reproduce.recipes.common_selffl import LETTERS_STAND_INS, letters_settings, method_options


def mean_steps(run: Run) -> Measurements:
    """Steps of the clients whose uncertainty is known, at three quarters of the run (round 150 in the paper) and at its
    end: the mean of those taken, and the median of those computed by (19), which no cap holds down."""
    late = 3 * int(run.config["rounds"]) // 4
    measured: dict[str, BySeed] = {}
    for trial in run.trials:
        for entry in trial.rounds:
            clients = entry.method.get("clients") or {"raw_steps": (), "steps": ()}
            pairs = list(zip(clients["raw_steps"], clients["steps"], strict=True))
            known = [(float(raw), float(taken)) for raw, taken in pairs if raw >= 0]  # negative: not computed yet
            if known:
                figures = {"computed": median(raw for raw, _ in known), "taken": fmean(taken for _, taken in known)}
                for when in ("late", "end") if entry.number <= late else ("end",):
                    for kind, value in figures.items():
                        measured.setdefault(f"steps.{kind}.{when}", {})[trial.seed] = value
    return {"selffl": measured}


def parts(scale: Scale) -> list[RunPart]:
    settings = {**letters_settings(scale, seeds=10), "eval_every": 5, "algorithms": method_options(["selffl"])}
    return [RunPart("letters", settings, mean_steps)]


def fewer(results: Results) -> dict[str, BySeed]:
    late, end = (results.get("letters", "selffl", f"steps.computed.{when}") for when in ("late", "end"))
    return {"": difference(late, end)}


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
                "letters",
                {
                    f"{title}, {text}": f"steps.{kind}.{when}"
                    for kind, title in (("computed", "Computed by (19), median"), ("taken", "Taken, mean"))
                    for when, text in (("late", "three quarters of the run"), ("end", "end"))
                },
                factor=1.0,
            ),
        ),
    ],
    claims=[
        Claim(
            "The computed number of steps falls over the last quarter of the run (round 150 on)",
            fewer,
            "steps",
            1.0,
            "Appendix E.6, Figure 11",
        ),
        Untestable("The histogram at round 100", "the paper prints no numbers for it", "Appendix E.6, Figure 10"),
    ],
    notes=[
        "The paper does not say on which data; ours are the letters of its ablation.",
        "The paper shows one client drawn at random; ours is the median over all clients.",
        "By its formula the number of steps grows with a client's uncertainty, up to the cap: the text of the "
        "NeurIPS version says the opposite of its own formula.",
    ],
    stand_ins=LETTERS_STAND_INS,
    other_data=("letters",),
    figures=figures,
)
