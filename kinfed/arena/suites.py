"""A frozen suite: federations, models, seeds and budgets in one file of the package, arena-1.toml.

A federation is a data set, a partition and a model under settings that all share; its digests, by seed, are of all
examples and of who trains, validates and tests on which. Where a file, a version or a processor gives other data, the
digest differs and nothing is run. A suite is never changed: what should be otherwise is another suite."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from kinfed.config import RunConfig, make_config
from kinfed.data import Federation
from kinfed.engine import METRICS
from kinfed.errors import ConfigError, DataError, unknown_name
from kinfed.runs import Experiment, RunInputs

CURRENT = "arena-1"
SUBSETS = ("lite", "core", "full")


@dataclass(frozen=True)
class Budget:
    """What every method has of a subset: seeds, and settings to try on validation rows, the first as configured."""

    seeds: tuple[int, ...]
    trials: int


@dataclass(frozen=True)
class SuiteFederation:
    """One federation of a suite, of one axis."""

    name: str
    axis: str  # the one thing in which its clients differ
    kind: str  # images, tables, sensors or text
    subset: str  # the smallest that has it
    rounds: int  # at most
    settings: Mapping[str, Any]  # of a run
    newcomers: int = 0  # clients, the last of the federation, that join after the run; they alone are judged
    digests: tuple[str, ...] = ()  # by seed
    baselines: tuple[float, ...] = ()  # by seed: the judged clients' mean without a model

    @property
    def metric(self) -> str:
        return str(self.settings["metric"])

    def config(self, seed: int, *, with_data: bool) -> RunConfig:
        """A run's configuration; without the settings that make the data, for a federation that is made already."""
        data = ("dataset", "partition", "clients")
        settings = {name: value for name, value in self.settings.items() if with_data or name not in data}
        return make_config(None, {**settings, "rounds": self.rounds, "seeds": [seed], "algorithms": "local"})

    def federation(self, seed: int) -> Federation:
        """All clients of a seed, split in three, as the suite has them; refused where they are not."""
        if seed >= len(self.digests):
            raise ConfigError(f"{self.name} has no digest for seed {seed} in its suite (benchmarks/freeze_suite.py)")
        data = self.unchecked(seed)
        if data.digest() != self.digests[seed]:
            raise DataError(
                f"{self.name}, seed {seed}, is not the federation of the suite: its digest is {data.digest()}, not "
                f"{self.digests[seed]}; the data set's file, or the version of a library that reads it, is another one"
            )
        return data

    def unchecked(self, seed: int) -> Federation:
        return RunInputs(self.config(seed, with_data=True)).federation(seed)

    def baseline(self, seed: int) -> float:
        """The mean over the judged clients without a model, from the data."""
        data = self.unchecked(seed)
        judged = (
            data.take(torch.arange(data.num_clients - self.newcomers, data.num_clients)) if self.newcomers else data
        )
        experiment = Experiment(self.config(seed, with_data=False), judged)
        values = experiment.baseline_score(seed).metric(self.metric)
        return float(values[~values.isnan()].mean())

    def skill(self, value: float, seed: int) -> float:
        """A mean over clients on one scale for all federations: 0 without a model, 1 without an error."""
        baseline, perfect = self.baselines[seed], float(METRICS.named(self.metric).higher_is_better)
        return (value - baseline) / (perfect - baseline)


@dataclass(frozen=True)
class Suite:
    """Federations and budgets under a name."""

    name: str
    tolerance: float  # in skill, of a cell's mean, between processors of different kinds
    budgets: Mapping[str, Budget]
    references: tuple[str, ...]  # methods that regret is measured against; the first trains alone
    all_federations: tuple[SuiteFederation, ...]

    def federations(self, subset: str) -> tuple[SuiteFederation, ...]:
        """Federations of a subset; a larger one has all of the smaller ones."""
        if subset not in self.budgets:
            raise unknown_name("subset of the suite", subset, self.budgets)
        names = SUBSETS[: SUBSETS.index(subset) + 1]
        return tuple(one for one in self.all_federations if one.subset in names)

    def digest(self, subset: str) -> str:
        """Digest of everything that decides the scores of an entry in this subset."""
        content = [
            self.name,
            self.references,
            asdict(self.budgets[subset]),
            [asdict(one) for one in self.federations(subset)],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


@cache
def suite(name: str = CURRENT) -> Suite:
    """The suite of that name; or of a file of one's own, name.toml, whose entries are no entries of the arena."""
    file = Path(name) if name.endswith(".toml") else files("kinfed.arena").joinpath(f"{name}.toml")
    if not file.is_file():
        raise ConfigError(f"there is no suite {name!r} in this version of kinfed; there is {CURRENT}")
    values = tomllib.loads(file.read_text("utf-8"))
    if values["references"][0] != "local" or "fedavg" not in values["references"]:
        raise ConfigError(
            "references of a suite begin with local and have fedavg, whose work is the measure of others'"
        )
    common = values["settings"]
    federations = [_federation(common, entry) for entry in values["federations"]]
    budgets = {name: Budget(tuple(entry["seeds"]), entry["trials"]) for name, entry in values["budgets"].items()}
    return Suite(
        name, values["tolerance"], budgets, tuple(values["references"]), tuple(federations)
    )  # fmt: skip


def _federation(common: Mapping[str, Any], entry: Mapping[str, Any]) -> SuiteFederation:
    frozen = {name: tuple(entry.get(name, ())) for name in ("digests", "baselines")}
    return SuiteFederation(**{**entry, **frozen, "settings": {**common, **entry["settings"]}})
