"""What scaffold-rounds measures: rounds until the server's model is good enough."""

from __future__ import annotations

from kinfed.records import RunRecord
from kinfed_papers.recipe import BySeed, Measurements, Results

LEVEL = 0.8  # of the server model's accuracy
ROUNDS = f"rounds_to_{LEVEL:g}"


def rounds_to_level(run: RunRecord) -> Measurements:
    """The first evaluated round in which the server's model is as accurate as LEVEL; the
    number of rounds where none is."""
    measured: Measurements = {}
    for trial in run.trials:
        accuracies = (
            (entry.number, (entry.all_clients or entry.metrics)["server"]["accuracy"])
            for entry in trial.rounds
            if "server" in entry.metrics
        )
        reached = next((number for number, value in accuracies if value >= LEVEL), int(run.config["rounds"]))
        measured.setdefault(trial.algorithm, {}).setdefault(ROUNDS, {})[trial.seed] = float(reached)
    return measured


def unaffected(results: Results) -> dict[str, BySeed]:
    """The rounds with two classes per client, in units of those with clients alike."""
    alike, apart = (results.get(part, "scaffold", ROUNDS) for part in ("alike-5", "sorted-5"))
    return {"": {seed: apart[seed] / alike[seed] for seed in alike.keys() & apart.keys()}}
