"""What cgpfl-contexts measures, and margins of its claims: rounds saved, and the quantities of Theorem 4.1."""

from __future__ import annotations

from statistics import fmean

from kinfed.records import RoundRecord, RunRecord
from kinfed_papers.recipe import BySeed, Measurements, Results, difference

LEVEL = 0.95  # of a rival's final accuracy: there its curve has flattened, and noise does not decide when it is reached
ROUNDS_TO_LEVEL = f"rounds_to_{LEVEL:g}"
DISTANCE = "distance_to_context"
GRADIENT, LATE_GRADIENT = "squared_gradient", "squared_gradient.second_half"
TABLE_CGPFL, MANY_CGPFL = "cgpfl-4", "cgpfl-10"  # with as many contexts as Table 1 has, and with many
RIVALS = ("pfedme", "ditto", "perfedavg_hf")


def rounds_of(cgpfl: str) -> str:
    """The metric of a rival: after how many rounds this CGPFL has LEVEL of the rival's final accuracy."""
    return f"rounds_of_{cgpfl}_to_{LEVEL:g}"


def convergence(run: RunRecord) -> Measurements:
    """Measure, for every method, ROUNDS_TO_LEVEL: the first evaluated round in which its personal models have LEVEL of
    their final accuracy; `rounds_of` a CGPFL: the first in which its models have as much (one after the last where they
    never do). So each rival sets the level at which it is compared, and a slow third method cannot put it where all
    others have just begun.

    The left sides of Theorem 4.1, means over recorded rounds. GRADIENT: of its first bound, (1/K) Σ_k ‖∇G_k(ω_k)‖², up
    to a constant that is the same for every K: ∇G_k is λ times the distance of ω_k from the mean of its clients' θ, and
    a round moves ω_k by that distance times pull, R times; LATE_GRADIENT: the same over the second half. DISTANCE: of
    its second bound, ‖θ_i − ω_k(i)‖² over clients."""
    curves = {(trial.algorithm, trial.seed): _accuracies(trial.rounds) for trial in run.trials}
    measured: Measurements = {}
    for trial in run.trials:
        own = curves[trial.algorithm, trial.seed]
        level = LEVEL * own[-1][1]
        metrics = measured.setdefault(trial.algorithm, {})
        metrics.setdefault(ROUNDS_TO_LEVEL, {})[trial.seed] = _reached(own, level)
        for cgpfl in (TABLE_CGPFL, MANY_CGPFL):
            if curve := curves.get((cgpfl, trial.seed)):
                metrics.setdefault(rounds_of(cgpfl), {})[trial.seed] = _reached(curve, level)
        distances = [
            fmean(apart)
            for entry in trial.rounds
            if (apart := (entry.method.get("clients") or {}).get("squared_distance_to_context"))
        ]
        if distances:
            metrics.setdefault(DISTANCE, {})[trial.seed] = fmean(distances)
        if steps := [entry.method["squared_step"] for entry in trial.rounds if "squared_step" in entry.method]:
            metrics.setdefault(GRADIENT, {})[trial.seed] = fmean(steps)
            metrics.setdefault(LATE_GRADIENT, {})[trial.seed] = fmean(steps[len(steps) // 2 :])
    return measured


def _reached(curve: list[tuple[int, float]], level: float) -> float:
    return float(next((number for number, value in curve if value >= level), curve[-1][0] + 1))


def _accuracies(rounds: tuple[RoundRecord, ...]) -> list[tuple[int, float]]:
    """(round, accuracy of personal models) wherever it was measured."""
    return [
        (entry.number, (entry.all_clients or entry.metrics)["personal"]["accuracy"])
        for entry in rounds
        if "personal" in entry.metrics
    ]


def in_units_of_one_context(results: Results, part: str, metric: str) -> dict[str, BySeed]:
    """The metric with K = 4 in units of that with K = 1."""
    one, four = (results.get(part, row, metric) for row in ("cgpfl-1", TABLE_CGPFL))
    return {"": {seed: four[seed] / one[seed] for seed in one.keys() & four.keys()}}


def comes_to_rest(results: Results, part: str) -> dict[str, BySeed]:
    """Share of the gradient over all rounds by which that over their second half is smaller."""
    every, late = (results.get(part, TABLE_CGPFL, metric) for metric in (GRADIENT, LATE_GRADIENT))
    return {"": {seed: 1 - late[seed] / every[seed] for seed in every.keys() & late.keys()}}


def rounds_saved(results: Results, part: str, cgpfl: str) -> dict[str, BySeed]:
    return {
        rival: difference(*(results.get(part, rival, key) for key in (ROUNDS_TO_LEVEL, rounds_of(cgpfl))))
        for rival in RIVALS
    }
