"""What selffl-wakeword measures, and margins of its claims: false accepts relative to the start."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from kinfed.records import RunRecord
from kinfed.runs import RunInputs, read_config
from kinfed_papers import (
    Results,
    difference,
)
from kinfed_papers.data.wakeword import STATES, TYPES
from kinfed_papers.recipe import BySeed, Measurements, either_way
from kinfed_papers.studies.detection import ByCell, detections

NAMES = {
    "fedavg-w": "FedAvg-w",
    "fedavg-e": "FedAvg-e",
    "ditto-w": "Ditto-w",
    "ditto-e": "Ditto-e",
    "perfedavg": "Per-FedAvg",
}


def false_accepts(run: RunRecord) -> Measurements:
    """Relative false accepts by type and state, of all types together, and their spread; sizes of training data."""
    measured: Measurements = {}
    for (label, seed), detection in detections(run.path).items():
        for kind, cells in (("personal", detection.personal), ("server", detection.server_model)):
            for name, value in _figures(cells or {}).items():
                measured.setdefault(label, {}).setdefault(f"{kind}.fa.{name}", {})[seed] = value
    config = read_config(run.path)
    inputs = RunInputs(config)
    for seed in config.seeds:
        data = inputs.federation(seed)
        assert data.tags is not None
        assert data.groups is not None
        for s, state in enumerate(STATES):
            for t, kind in enumerate(TYPES):
                here = (data.tags[data.train.rows] == s) & (data.groups[data.train.owner] == t)
                if bool(here.any()):
                    measured.setdefault(state, {}).setdefault(f"train.{kind}", {})[seed] = float(here.sum())
    return measured


def _figures(cells: ByCell) -> dict[str, float]:
    """Ratios by type and state; over all types of a state the ratio of sums, as single baselines may be near zero."""
    ratios = {cell: rates.ratio for cell, rates in cells.items() if rates.ratio is not None}
    figures = {f"{kind}.{state}": ratio for (kind, state), ratio in ratios.items()}
    for state in STATES:
        here = [rates for (_, other), rates in cells.items() if other == state]
        baseline = sum(rates.baseline_false_accept for rates in here)
        if baseline:
            figures[f"all.{state}"] = sum(rates.false_accept for rates in here) / baseline
    if len(ratios) > 1:
        figures["spread"] = statistics.pstdev(ratios.values())
    return figures


def fewest_on_every_type(results: Results, kind: str, rivals: Iterable[str]) -> Mapping[str, BySeed]:
    """Each rival's ratio on each type of devices less that of Self-FL's models, normal state."""
    return {
        f"{NAMES[rival]} on type {type_}": difference(
            *(results.get("types", row, f"{kind}.fa.{type_}.normal") for row in (rival, "selffl"))
        )
        for rival in rivals
        for type_ in TYPES
    }


def more_active_is_better(results: Results) -> Mapping[str, BySeed]:
    by_state = {state: f"server.fa.all.{state}" for state in STATES}
    return {
        state: difference(*(results.get(part, "selffl", metric) for part in ("select-10", "select-25")))
        for state, metric in by_state.items()
    }


def below_start(results: Results) -> Mapping[str, BySeed]:
    ratios = results.get("types", "selffl", "server.fa.all.normal")
    return {"start": {seed: 1.0 - ratio for seed, ratio in ratios.items()}}


def above_start(results: Results) -> Mapping[str, BySeed]:
    by_row = {row: results.get("types", row, "server.fa.all.normal") for row in ("fedavg-w", "ditto-w")}
    return {row: {seed: ratio - 1.0 for seed, ratio in ratios.items()} for row, ratios in by_row.items()}


def algorithms_alike(results: Results) -> Mapping[str, BySeed]:
    """Difference of the two, type by type. The largest difference between the rows of Table 6 is 0.05 as it is
    printed."""
    cases: dict[str, BySeed] = {}
    for type_ in TYPES:
        one, two = (results.get("types", row, f"server.fa.{type_}.normal") for row in ("selffl", "selffl_augmented"))
        cases |= either_way(
            difference(one, two), f"type {type_}, Algorithm 1 higher", f"type {type_}, Algorithm 2 higher"
        )
    return cases
