"""What a run says about kin: whether clients found the others that train on what they are judged on.

A method that records `affinity` and `weights` (FedFomo) is measured by seed, at its last evaluated round:

    kin.top      share of the top places in clients' lists of affinities that kin hold (m places if there are m kin)
    kin.early    the same, but on average over the evaluated rounds of the first half
    kin.mixed    share of what clients take from others that comes from kin
    kin.chance   what a list in random order would give for both
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kinfed.data import emd, emd_code
from kinfed.records import RunRecord
from kinfed.records import TrialRecord as Trial
from kinfed.report import ClientGroups, Matrix, kin_found
from kinfed_papers.recipe import Measurements


def kinship(run: RunRecord) -> Measurements:
    measured: Measurements = {}
    for trial in run.trials:
        top = top_places(run, trial)
        if not top:
            continue
        last, clients = max(top), _clients(run, trial)
        early = [share for number, share in top.items() if 2 * number <= last]
        figures = {
            "kin.top": top[last],
            "kin.early": fmean(early) if early else None,
            "kin.chance": _chance(clients),
            "kin.mixed": _mixed(clients, trial, last),
        }
        for metric, value in figures.items():
            if value is not None:
                measured.setdefault(trial.algorithm, {}).setdefault(metric, {})[trial.seed] = value
    return measured


def top_places(run: RunRecord, trial: Trial) -> dict[int, float]:
    """Share of top places that kin hold, by evaluated round. Empty if no client has kin, or nothing is recorded."""
    clients, shares = _clients(run, trial), {}
    for number, affinity in _matrices(trial, "affinity"):
        hits, places = kin_found(affinity, clients)
        if places:
            shares[number] = hits / places
    return shares


def differences_of_classes(run: RunRecord) -> Measurements:
    """{"federation": {"emd": ..., "emd_code": ...}}: mean distance of clients' class distributions from that of all."""
    counts = {seed: torch.tensor(federation.train) for seed, federation in sorted(run.federations.items())}
    return {
        "federation": {
            metric: {seed: _mean(distance(train)) for seed, train in counts.items()}
            for metric, distance in (("emd", emd), ("emd_code", emd_code))
        }
    }


def _mean(values: Tensor) -> float:
    return float(sum(values.tolist()) / len(values))


def _matrices(trial: Trial, figure: str) -> Iterator[tuple[int, Matrix]]:
    for entry in trial.rounds:
        value: Any = entry.method.get(figure)
        if value is not None:
            yield entry.number, value


def _clients(run: RunRecord, trial: Trial) -> ClientGroups:
    federation = run.federations.get(trial.seed)
    return ClientGroups.of(federation, 0 if federation is None else len(federation.names))


def _chance(clients: ClientGroups) -> float:
    everybody = range(len(clients.names))
    kin = [sum(clients.kin(i, n) for n in everybody if n != i) for i in everybody]
    return sum(m * m / (len(everybody) - 1) for m in kin) / sum(kin)


def _mixed(clients: ClientGroups, trial: Trial, last: int) -> float | None:
    mix = dict(_matrices(trial, "weights")).get(last)
    if mix is None:
        return None
    others = [(i, n, share) for i, row in enumerate(mix) for n, share in enumerate(row) if n != i]
    total = sum(share for _, _, share in others)
    return sum(share for i, n, share in others if clients.kin(i, n)) / total if total else None
