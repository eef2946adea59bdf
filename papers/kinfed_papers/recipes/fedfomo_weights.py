"""Margins and the figure of fedfomo-weights: who holds the top places of clients' lists."""

from __future__ import annotations

from collections.abc import Mapping

from kinfed.analysis import Comparison
from kinfed.report.drawing import axis
from kinfed_papers.recipe import BySeed, RecipeFigure, Results, difference
from kinfed_papers.recipe_figures import line_chart
from kinfed_papers.recipes import common_fedfomo
from kinfed_papers.studies.kinship import top_places

SETTINGS = {
    "own-5": "own targets, D = 5",
    "foreign-5": "foreign targets, D = 5",
    "own-2": "own targets, D = 2",
    "own-3": "own targets, D = 3",
    "many-5": "100 clients, D = 5",
}


def above_chance(results: Results, part: str, metric: str) -> Mapping[str, BySeed]:
    return {"": common_fedfomo.above_chance(results, part, "fedfomo-5", metric)}


def top_places_of_all(results: Results) -> Mapping[str, BySeed]:
    return {SETTINGS[part]: _top(results, part) for part in ("own-5", "foreign-5")}


def own_easier(results: Results) -> Mapping[str, BySeed]:
    return {"": difference(_top(results, "own-5"), _top(results, "foreign-5"))}


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
