"""Runs of equal settings as one: seeds that were run apart, or methods, are averaged and compared as if run together.

Every method and seed of a run depends on its settings and data alone (kinfed.runs.growth): folders that agree in
everything but seeds and methods are parts of one run. Where the same method and seed is in two folders, they are left
apart: one is a repetition of the other, and no second seed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kinfed.config import NON_RESULT_SETTINGS
from kinfed.records import RunRecord

_APART = {"seeds", "algorithms", *NON_RESULT_SETTINGS}


def pool_seeds(runs: list[RunRecord]) -> list[RunRecord]:
    """The runs, those that are parts of one joined to it, in the place of the first."""
    pooled: list[RunRecord] = []
    for run in runs:
        for place, other in enumerate(pooled):
            if are_parts_of_one(other, run):
                pooled[place] = _joined(other, run)
                break
        else:
            pooled.append(run)
    return pooled


def are_parts_of_one(one: RunRecord, other: RunRecord) -> bool:
    if _settings(one) != _settings(other) or one.version != other.version:
        return False
    ours, theirs = _methods(one), _methods(other)
    if any(ours[label] != theirs[label] for label in ours.keys() & theirs.keys()):
        return False
    planned = [
        {(label, seed) for label in _methods(run) for seed in run.config.get("seeds") or ()} for run in (one, other)
    ]
    return not planned[0] & planned[1] and _data(one) == _data(other) is not None and _same_where_shared(one, other)


def _settings(run: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in run.config.items() if name not in _APART}


def _methods(run: RunRecord) -> dict[str, Any]:
    methods = run.config.get("algorithms")
    return methods if isinstance(methods, dict) else {}


def _data(run: RunRecord) -> tuple[Any, ...] | None:
    """The part of the data that is the same with every seed; None where nothing is written down."""
    described = next(iter(run.federations.values()), None)
    if described is None:
        return None
    origin = {name: described.description.get(name) for name in ("dataset", "partition", "options")}
    classes = described.problem.kind, described.class_labels
    return origin, described.num_clients, classes, bool(sum(described.sizes("val"))), described.inputs.get("shape")


def _same_where_shared(one: RunRecord, other: RunRecord) -> bool:
    return all(
        (one.federations[seed].train, one.federations[seed].test)
        == (other.federations[seed].train, other.federations[seed].test)
        for seed in one.federations.keys() & other.federations.keys()
    )


def _joined(one: RunRecord, other: RunRecord) -> RunRecord:
    seeds = sorted({*one.config["seeds"], *other.config["seeds"]})
    methods = {**_methods(one), **_methods(other)}
    place = list(methods).index
    trials = sorted((*one.trials, *other.trials), key=lambda trial: (trial.seed, place(trial.algorithm)))
    note = f"{other.label} has the same settings as {one.label}: seeds and methods of both are taken together."
    return replace(
        one,
        label=f"{one.label} + {other.label}",
        config={**one.config, "seeds": seeds, "algorithms": methods},
        fingerprint=f"{one.fingerprint} + {other.fingerprint}",
        trials=tuple(trials),
        federations=other.federations | one.federations,
        baselines=other.baselines | one.baselines,
        curves={**other.curves, **one.curves},
        notes=(*one.notes, *(f"{other.label}: {text}" for text in other.notes), note),
    )
