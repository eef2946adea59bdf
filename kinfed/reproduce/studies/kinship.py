"""What a run's folder says about kin: whether clients found those who train on what they are judged on.

A method that records `affinity` and `weights` (FedFomo) is measured at its last evaluated round, by seed:

    kin.top      share of the top places in clients' lists of affinities that kin hold (m places where there are m kin)
    kin.mixed    share of what clients take from others that comes from kin
    kin.chance   what a list in random order would give for both
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinfed.core import storage
from kinfed.report.client_groups import ClientGroups
from kinfed.report.panels.fedfomo_panel import Matrix, kin_found
from kinfed.reproduce.recipe import BySeed, Measured
from kinfed.runs.reader import Run, Trial, load_run


def kinship(folder: Path) -> Measured:
    run = load_run(folder, folder.name)
    measured: Measured = {}
    for trial in run.trials:
        top = top_places(run, trial)
        if not top:
            continue
        last = max(top)
        found = {"kin.top": top[last], "kin.chance": _chance(_world(run, trial)), "kin.mixed": _mixed(run, trial, last)}
        for metric, value in found.items():
            if value is not None:
                measured.setdefault(trial.algorithm, {}).setdefault(metric, {})[trial.seed] = value
    return measured


def top_places(run: Run, trial: Trial) -> dict[int, float]:
    """By evaluated round: the share of top places that kin hold. Empty where nobody has kin, or nothing is recorded."""
    world, found = _world(run, trial), {}
    for number, affinity in _recorded(trial, "affinity"):
        hits, places = kin_found(affinity, world)
        if places:
            found[number] = hits / places
    return found


def differences_of_classes(folder: Path) -> Measured:
    """{"federation": {"emd": ..., "emd_code": ...}}: mean distance of clients' class distributions from that of all."""
    names = {path.stem.removeprefix("federation-"): path for path in folder.glob("federation-*.json")}
    by_seed = {int(seed): storage.read_json(path) for seed, path in names.items() if seed.isdigit()}
    return {
        "federation": {
            metric: {seed: sum(made[metric]) / len(made[metric]) for seed, made in sorted(by_seed.items())}
            for metric in ("emd", "emd_code")
        }
    }


def minus(a: BySeed, b: BySeed) -> BySeed:
    """Differences of what belongs together, seed by seed."""
    return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}


def _recorded(trial: Trial, figure: str) -> Iterator[tuple[int, Matrix]]:
    for entry in trial.rounds:
        value: Any = entry.method.get(figure)
        if value is not None:
            yield entry.number, value


def _world(run: Run, trial: Trial) -> ClientGroups:
    federation = run.federations.get(trial.seed)
    return ClientGroups.of(federation, 0 if federation is None else len(federation.names))


def _chance(world: ClientGroups) -> float:
    clients = range(len(world.names))
    kin = [sum(world.kin(i, n) for n in clients if n != i) for i in clients]
    return sum(m * m / (len(clients) - 1) for m in kin) / sum(kin)


def _mixed(run: Run, trial: Trial, last: int) -> float | None:
    world = _world(run, trial)
    mix = dict(_recorded(trial, "weights")).get(last)
    if mix is None:
        return None
    others = [(i, n, share) for i, row in enumerate(mix) for n, share in enumerate(row) if n != i]
    total = sum(share for _, _, share in others)
    return sum(share for i, n, share in others if world.kin(i, n)) / total if total else None
