"""Whom FedFomo weighs up and whom down: the matrix of affinities over the rounds (Figures 2, 6 and 7)."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.analysis import Comparison
from kinfed.report.drawing import axis
from kinfed_papers import (
    Claim,
    Question,
    Recipe,
    ResultColumn,
    Results,
    ResultTable,
    RunPart,
    Untestable,
    difference,
)
from kinfed_papers.recipe import FEDFOMO, BySeed, Margins, RecipeFigure, Scale
from kinfed_papers.recipe_figures import line_chart
from kinfed_papers.recipes.common_fedfomo import (
    EMBEDDINGS,
    NETWORK,
    SEEDS,
    SMOKE_STAND_IN,
    above_chance,
    latent_settings,
    method_options,
)
from kinfed_papers.studies.kinship import kinship, top_places

METHODS = {"fedfomo-5": "FedFomo, n = 5"}
SETTINGS = {
    "own-5": "own targets, D = 5",
    "foreign-5": "foreign targets, D = 5",
    "own-2": "own targets, D = 2",
    "own-3": "own targets, D = 3",
    "many-5": "100 clients, D = 5",
}

PLACES = {
    "own-5": "Section 4 (personalized model weighting), Figure 2a",
    "foreign-5": "Appendix A.3, Figure 6",
    "own-2": "Section 4 (personalized model weighting), Figure 2c",
    "own-3": "Section 4 (personalized model weighting), Figure 2c",
    "many-5": "Section 4 (personalized model weighting), Figure 2b",
}


def parts(scale: Scale) -> list[RunPart]:
    plan = []
    for name in ("own-5", "foreign-5", "own-3") if scale == "smoke" else tuple(SETTINGS):
        kind, _, groups = name.partition("-")
        settings = latent_settings(scale, int(groups), clients=100 if kind == "many" else 15)
        settings |= {"algorithms": method_options(METHODS, scale), "foreign_targets": kind == "foreign"}
        if scale == "small":
            settings |= {"seeds": list(SEEDS[:5])}
        plan.append(RunPart(name, settings | {"eval_every": 10 if kind == "many" else 1}, kinship))
    return plan


def _above_chance(part: str, metric: str) -> Margins:
    return lambda results: {"": above_chance(results, part, "fedfomo-5", metric)}


def _top(results: Results, part: str) -> BySeed:
    return results.get(part, "fedfomo-5", "kin.top")


def figures(results: Results, runs: Mapping[str, Comparison]) -> list[RecipeFigure]:
    series = {}
    for name, comparison in runs.items():
        by_round: dict[int, BySeed] = {}
        for method in comparison.methods:
            for trial in method.complete_trials:
                for number, share in top_places(method.run, trial).items():
                    by_round.setdefault(number, {})[trial.seed] = share
        series[SETTINGS[name]] = [(float(number), by_round[number]) for number in sorted(by_round)]
    chance = results.get("own-5", "fedfomo-5", "kin.chance")
    chart = line_chart(
        axis("Round"),
        series,
        "Top places held by clients of the target’s distribution",
        "Over the rounds: how many of the top places of clients’ lists are held by those who train on the target.",
        levels={"by chance, D = 5": sum(chance.values()) / len(chance)} if chance else {},
    )
    return [RecipeFigure("Finding one’s own", chart, "One line per setting, mean over seeds.")]


RECIPE = Recipe(
    name="fedfomo-weights",
    paper=FEDFOMO,
    reproduces="Figures 2, 6 and 7",
    title="Whom FedFomo favours",
    about="The server’s list of who helped whom, after every round, and how often its top places go to clients that "
    "train on what the client is judged on: in distribution, with foreign targets, with fewer distributions and with "
    "100 clients. The matrices themselves are below, under “Inside the methods”.",
    parts=parts,
    tables=[
        ResultTable(
            f"{text[0].upper()}{text[1:]} (%)",
            METHODS,
            ResultColumn.by_metric(
                part,
                {
                    "Top places to the target’s distribution": "kin.top",
                    "of what is mixed from others": "kin.mixed",
                    "by chance": "kin.chance",
                    "Accuracy": "personal.accuracy",
                },
            ),
        )
        for part, text in SETTINGS.items()
    ],
    claims=[
        *(
            Claim(
                f"Clients that train on the target’s distribution get top places: above chance, {text}",
                _above_chance(part, "kin.top"),
                place=PLACES[part],
            )
            for part, text in SETTINGS.items()
        ),
        *(
            Claim(
                f"What is mixed from others comes from the target’s distribution: above chance, {SETTINGS[part]}",
                _above_chance(part, "kin.mixed"),
                place=f"Appendix A.3, {figure}",
            )
            for part, figure in (("own-5", "Figure 7"), ("foreign-5", "Figure 6"))
        ),
        Claim(
            "All clients of the target’s distribution are found: more than nine of ten top places (a limit of ours), "
            "D = 5",
            lambda results: {SETTINGS[part]: _top(results, part) for part in ("own-5", "foreign-5")},
            place="Section 4, Figure 4; Appendix A.3, Figures 6 and 7",
            limit=0.9,
        ),
        Question(
            "Foreign targets are harder to find than one’s own",
            lambda results: {"": difference(_top(results, "own-5"), _top(results, "foreign-5"))},
        ),
        Untestable("The shades of the figures", "heat maps without numbers", "Figure 2"),
    ],
    notes=[
        "Top places: of a client’s list, the first m, where m other clients train on its target (2 of 14 for 15 "
        "clients in 5 distributions). Chance is what a list in random order would give.",
        "Figures 2b and 2c do not say how many clients and distributions they have; 100 clients, and 2 and 3 "
        "distributions, are ours.",
        "A client’s own model is always a candidate and is left out of these counts.",
        "The list starts as the identity with ties broken at random; the released code starts with 0.1 on the "
        "diagonal. Weights are divided by the Euclidean distance; the released default is the sum of absolute values.",
        "With foreign targets some clients draw their own distribution; they are among the 15, in the paper too.",
    ],
    stand_ins={
        "smoke": SMOKE_STAND_IN,
        "small": f"6,000 of CIFAR-10’s images, {EMBEDDINGS}, {NETWORK}, "
        "20 (100 clients: 5, in 60 rounds) steps of 20 examples instead of 5 epochs, no augmentation.",
    },
    method_figures=[(name, "fedfomo-5") for name in SETTINGS],
    figures=figures,
)
