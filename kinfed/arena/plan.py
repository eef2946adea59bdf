"""The file of a study: settings of all runs, and what is crossed.

    algorithms = "local,fedavg,ditto"     # any settings of `kinfed run`, for all cells
    rounds = 50
    seeds = [0, 1, 2]

    [tuning]                              # of every method in every cell, on validation data; left out: as configured
    trials = 8
    seeds = [0]

    [sweep]                               # one setting, several values: the lines of a curve
    setting = "partition.alpha"
    values = [0.1, 0.3, 1.0]

    [[federations]]                       # each with a name and settings of its own
    name = "MNIST"
    dataset = "mnist"
    partition = "pfllib_dirichlet"
    clients = 20

    [[models]]
    name = "linear"
    model = "mlr"

Every combination of federation, model and value is a cell, with all methods and seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from kinfed.config import RunConfig, make_config, read_toml
from kinfed.errors import ConfigError, unknown_name

_CROSSED = ("federations", "models", "sweep", "tuning")
Entry = tuple[str, dict[str, Any]]  # a name and settings


@dataclass(frozen=True)
class Cell:
    """One combination: a run of all methods and seeds."""

    federation: str
    model: str
    value: str  # of the swept setting
    labels: tuple[str, ...]  # of methods
    seeds: tuple[int, ...]
    rounds: int
    planned: RunConfig | None = None  # none in a study that is read from its folder: making one would run its plugins

    @property
    def config(self) -> RunConfig:
        if self.planned is None:
            raise ConfigError("a study that was read from its folder has no settings to run; name its file")
        return self.planned

    @property
    def folder(self) -> str:
        """Name of its folder, from the names of what is crossed in it."""
        names = (re.sub(r"[^\w.+-]+", "-", part).strip("-.") for part in (self.federation, self.model, self.value))
        return "_".join(filter(None, names)) or "all"


@dataclass(frozen=True)
class StudyPlan:
    """What a study's file says."""

    settings: dict[str, Any]  # of all cells
    federations: tuple[Entry, ...] = (("", {}),)
    models: tuple[Entry, ...] = (("", {}),)
    setting: str = ""  # the swept one
    values: tuple[Any, ...] = ()
    trials: int = 0  # of tuning, for every method and cell; 0: methods as configured
    tuning_seeds: tuple[int, ...] = (0,)

    @classmethod
    def read(cls, content: Mapping[str, Any] | Path | str) -> StudyPlan:
        """Read a plan from its file, or from the same content as a dictionary."""
        settings = dict(content) if isinstance(content, Mapping) else read_toml(Path(content))
        parts = {name: settings.pop(name) for name in _CROSSED if name in settings}
        sweep = _record(parts.get("sweep", {}), "[sweep]", ("setting", "values"))
        tuning = _record(parts.get("tuning", {}), "[tuning]", ("trials", "seeds"))
        values = sweep.get("values", [])
        if bool(sweep) and (not sweep.get("setting") or not isinstance(values, Sequence) or not values):
            raise ConfigError('[sweep] needs setting and values: setting = "partition.alpha", values = [0.1, 1.0]')
        trials = tuning.get("trials", 0)
        if not isinstance(trials, int) or isinstance(trials, bool) or trials < 0:
            raise ConfigError(f"[tuning] trials is a number of trials for every method and cell; got {trials!r}")
        entries = {name: _entries(parts.get(name), name) for name in ("federations", "models")}
        plan = cls(
            settings, entries["federations"], entries["models"], str(sweep.get("setting", "")), tuple(values), trials,
            tuple(tuning.get("seeds", (0,))),
        )  # fmt: skip
        folders = [cell.folder for cell in plan.cells()]  # which refuses settings that no run has
        if twice := {name for name in folders if folders.count(name) > 1}:
            raise ConfigError(f"two cells of the study would have the same folder, {min(twice)}; give other names")
        return plan

    def cells(self) -> list[Cell]:
        """All combinations, federation by federation."""
        cells, values = [], self.values or (None,)
        for (federation, data), (model, network), value in product(self.federations, self.models, values):
            shown = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            config = self._config({**self.settings, **data, **network}, value)
            labels = tuple(config.algorithms)
            cells.append(Cell(federation, model, shown, labels, tuple(config.seeds), config.rounds, config))
        return cells

    def _config(self, settings: dict[str, Any], value: Any) -> RunConfig:
        if value is None:
            return make_config(None, settings)
        if "." in self.setting:
            return make_config(None, settings, (f"{self.setting}={value}",))
        return make_config(None, {**settings, self.setting: value})

    def tuning_config(self, cell: Cell, label: str) -> RunConfig:
        """The configuration in which one method of a cell is tuned."""
        return replace(cell.config, algorithms={label: cell.config.algorithms[label]}, seeds=self.tuning_seeds)


def _record(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is a table with {' and '.join(known)}; got {value!r}")
    for name in value:
        if name not in known:
            raise unknown_name(f"key of {where}", name, known)
    return dict(value)


def _entries(value: Any, name: str) -> tuple[Entry, ...]:
    """The entries of an array of tables, each with its name apart."""
    if value is None:
        return (("", {}),)
    if not isinstance(value, list) or not value or not all(isinstance(entry, Mapping) for entry in value):
        raise ConfigError(f"{name} is a list of tables, [[{name}]], each with a name and settings; got {value!r}")
    entries = tuple((str(entry.get("name", "")), {k: v for k, v in entry.items() if k != "name"}) for entry in value)
    names = [label for label, _ in entries]
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"every entry of [[{name}]] needs a name of its own; got {', '.join(map(repr, names))}")
    return entries
