"""Results of tuning, and the file that a run begins from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from kinfed.config import NON_RESULT_SETTINGS, RunConfig
from kinfed.core import Range
from kinfed.engine import METRICS


@dataclass(frozen=True)
class TuningTrial:
    """One setting of one method. `value` is None where the trial was stopped early or refused."""

    settings: dict[str, Any]  # empty: the method as configured
    value: float | None
    reason: str = ""  # why there is no value


@dataclass(frozen=True)
class Tuned:
    """Result of tuning for one method."""

    label: str
    method: str
    space: dict[str, Range]
    trials: tuple[TuningTrial, ...]  # the first is the method as configured
    metric: str = "accuracy"  # whose mean over clients is the value

    @property
    def default(self) -> float:
        """The value of the method as configured."""
        value = self.trials[0].value
        assert value is not None
        return value

    @property
    def best(self) -> TuningTrial:
        """The best trial; of equals the first."""
        sign = 1.0 if METRICS.named(self.metric).higher_is_better else -1.0
        return max(self.trials, key=lambda trial: -math.inf if trial.value is None else sign * trial.value)

    @property
    def settings(self) -> dict[str, Any]:
        return self.best.settings

    @property
    def at_edge(self) -> list[str]:
        """Options whose chosen value lies at the end of its range."""
        return [name for name, value in self.best.settings.items() if self.space[name].at_edge(value)]

    def last_trial_sentence(self, trials: int) -> str:
        """Sentence on the newest trial, with how many there are."""
        trial, best, shown = self.trials[-1], self.best.value or 0.0, METRICS.named(self.metric).shown
        outcome = "stopped: " + trial.reason if trial.value is None else shown(trial.value)
        settings = ", ".join(f"{name}={value:g}" for name, value in trial.settings.items()) or "as configured"
        return f"{self.label} trial {len(self.trials)}/{trials}: {outcome} (best {shown(best)})  {settings}"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method, "metric": self.metric, "default": self.default,
            "best": self.best.value, "settings": self.best.settings,
            "at_edge": self.at_edge, "space": {name: asdict(range_) for name, range_ in self.space.items()},
            "trials": [asdict(trial) for trial in self.trials],
        }  # fmt: skip


@dataclass(frozen=True)
class Explored:
    """Result of tuning while training for one method."""

    label: str
    method: str
    metric: str
    value: float  # mean of the metric over clients and seeds, on validation examples after the last round
    configurations: tuple[dict[str, Any], ...]  # the first is empty: the method as configured
    chances: tuple[float, ...]  # of each at the end, mean over seeds

    @property
    def settings(self) -> dict[str, Any]:
        """The likeliest configuration; of equals the first."""
        return self.configurations[max(range(len(self.chances)), key=lambda j: (self.chances[j], -j))]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "settings": self.settings}


def best_toml(config: RunConfig, heading: str, comments: Mapping[str, str]) -> str:
    """Settings that differ from the defaults of a run, with a comment above every method, by label. Seeds are left to
    the run: those of the tuning need not be those of the results."""
    changed = config.changed
    skipped = {*NON_RESULT_SETTINGS, "algorithms", "seeds"} - {"data", "plugins"}
    settings = {name: value for name, value in changed.items() if name not in skipped}
    seeds = ", ".join(map(str, config.seeds))
    parts = [f"# {heading},\n# seed(s) {seeds}. Run with: kinfed run best.toml --seeds ...\n{_toml(settings)}"]
    for label, comment in comments.items():
        parts.append(f"# {comment}\n" + _toml({"algorithms": {label: config.algorithms[label]}}))
    return "\n".join(parts)


def _toml(table: Mapping[str, Any]) -> str:
    return tomli_w.dumps(_without_none(table))


def _without_none(value: Any) -> Any:
    """The settings without those that are none, as TOML has no null."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
