"""A run's results as plain values: the same whether a run is in memory or was read from its folder.

    RunRecord                  a run
      TrialRecord              one algorithm with one seed
        RoundRecord            a line of rounds.jsonl
        ClientRecord           a line of clients.csv
        FinalRecord            an entry of summary.json, or where an unfinished trial stands

`to_json` is what a file holds, and `from_json` reads that. No torch is needed: pages are made from records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from kinfed.data import Description
from kinfed.engine import METRICS
from kinfed.records.curves import Curves

Kind = Literal["personal", "server"]
KINDS: tuple[Kind, Kind] = ("personal", "server")
Metrics = dict[str, float]
Key = tuple[str, int]  # algorithm, seed
TrialKey = tuple[str, int, int | None]  # algorithm, seed, and fold in a cross-validation

# Cross-entropy in nats: a model that gives the truth a probability of e^-100 on average has not learned badly, but
# computed with numbers that grew out of bounds. Knowing nothing about 100,000 classes costs 11.5.
DIVERGED_LOSS = 100.0
# Targets of a regression are standardized for training, so that a squared error of 1e6 is off by a thousand standard
# deviations of all targets.
DIVERGED_REGRESSION_LOSS = 1e6


@dataclass(frozen=True)
class RoundRecord:
    """One round of a trial. Bytes are those of this round, over all its clients."""

    number: int
    seconds: float
    active: int
    dropped: int
    bytes_down: float
    bytes_up: float
    metrics: dict[Kind, Metrics]  # only the kinds evaluated in this round
    method: dict[str, Any]  # the method's own figures
    took_part: int | None = None  # clients that have taken part so far, whom the metrics are of
    all_clients: dict[Kind, Metrics] = field(default_factory=dict)  # the metrics of all clients
    clock: float | None = None  # simulated seconds since the start, where the run has a clock
    staleness: Any = None  # of an asynchronous round

    @property
    def bytes(self) -> float:
        return self.bytes_down + self.bytes_up

    def to_json(self, key: TrialKey) -> dict[str, Any]:
        algorithm, seed, fold = key
        optional = {"fold": fold, "clock": self.clock, "staleness": self.staleness}
        return {
            "algorithm": algorithm, "seed": seed, "round": self.number, "seconds": self.seconds,
            "active": self.active, "dropped": self.dropped, "took_part": self.took_part,
            "bytes_down": self.bytes_down, "bytes_up": self.bytes_up,
            **{kind: self.metrics.get(kind) for kind in KINDS},
            "all_clients": {kind: self.all_clients.get(kind) for kind in KINDS} if self.metrics else None,
            "method": self.method,
            **{name: value for name, value in optional.items() if value is not None},
        }  # fmt: skip

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RoundRecord:
        costs: dict[str, Any] = {name: float(line.get(name) or 0) for name in ("seconds", "bytes_down", "bytes_up")}
        counts = {name: int(line.get(name) or 0) for name in ("active", "dropped")}
        return cls(
            int(line["round"]), **costs, **counts, metrics=_by_kind(line), method=line.get("method") or {},
            took_part=None if line.get("took_part") is None else int(line["took_part"]),
            all_clients=_by_kind(line.get("all_clients") or {}),
            clock=None if line.get("clock") is None else float(line["clock"]), staleness=line.get("staleness"),
        )  # fmt: skip

    @classmethod
    def joined(cls, folds: Sequence[RoundRecord]) -> RoundRecord:
        """The same round of several folds: means of their metrics and costs; the method's own figures of the first."""
        if len(folds) == 1:
            return folds[0]

        def mean(metrics: list[dict[Kind, Metrics]]) -> dict[Kind, Metrics]:
            means: dict[Kind, Metrics] = {}
            for kind in metrics[0]:
                entries = [one.get(kind, {}) for one in metrics]
                names = [name for name in entries[0] if all(name in entry for entry in entries)]
                means[kind] = {name: fmean(entry[name] for entry in entries) for name in names}
            return means

        metrics, everyone = mean([fold.metrics for fold in folds]), mean([fold.all_clients for fold in folds])
        costs = ("seconds", "bytes_down", "bytes_up")
        means: dict[str, Any] = {name: fmean(getattr(fold, name) for fold in folds) for name in costs}
        return replace(folds[0], metrics=metrics, all_clients=everyone, **means)


@dataclass(frozen=True)
class ClientRecord:
    """One client after the final round."""

    client: str  # its name
    n_train: int
    n_test: int
    values: dict[str, float]  # e.g. personal_accuracy; what is not known is absent

    @property
    def took_part(self) -> bool:
        """Whether the client took part in any round; only such clients are compared."""
        return self.values.get("took_part") != 0

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ClientRecord:
        """Make it from the cells of a line of clients.csv, or the values that are written there."""
        fixed = ("algorithm", "seed", "client", "n_train", "n_test")
        cells = {name: float(cell) for name, cell in row.items() if name not in fixed and cell not in ("", None)}
        values = {name: cell for name, cell in cells.items() if math.isfinite(cell)}
        return cls(str(row["client"]), int(row["n_train"]), int(row["n_test"]), values)


@dataclass(frozen=True, kw_only=True)
class FinalRecord:
    """One algorithm with one seed after its last round: what tables compare."""

    label: str
    seed: int
    rounds: int  # how many were run
    personal: Metrics = field(default_factory=dict)
    server: Metrics | None = None
    clients: int | None = None  # in all; None: not written down, as of all others
    evaluated: int | None = None  # of these; fewer than all where a sample was asked for
    took_part: int | None = None  # clients of these; `personal`, `server` and `alternatives` are of these
    all_clients: dict[str, Any] = field(default_factory=dict)  # the same three of all clients
    bytes_down: float = 0
    bytes_up: float = 0
    seconds: float = 0.0
    diverged: bool = False  # losses or updates ran out of all bounds: the figures mean nothing
    alternatives: dict[str, Metrics] = field(default_factory=dict)  # other models that the algorithm reports, by name
    metric: str = "accuracy"  # the headline: what methods are compared by
    privacy: dict[str, Any] | None = None  # epsilon of every client and what belongs to it
    user_privacy: dict[str, Any] | None = None  # of the server's models: epsilon for whole clients, and its settings
    folds: int | None = None  # of a cross-validation, whose test rows are joined
    server_stopped: int | None = None  # the round where the server would have stopped, with `early_stopping`

    def __repr__(self) -> str:
        figure = headline_text(self.personal, self.metric) or "no test data"
        return f"{type(self).__name__}({self.label}, seed {self.seed}, round {self.rounds}: personal {figure})"

    @property
    def bytes(self) -> float:
        return self.bytes_down + self.bytes_up

    @property
    def metrics(self) -> dict[Kind, Metrics]:
        return {kind: metrics for kind in KINDS if (metrics := getattr(self, kind)) is not None}

    def to_json(self) -> dict[str, Any]:
        optional = ("folds", "privacy", "user_privacy", "server_stopped")
        values = {one.name: getattr(self, one.name) for one in fields(FinalRecord)}
        entry = {name: value for name, value in values.items() if name not in optional or value is not None}
        return {"algorithm": entry.pop("label"), **entry}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> FinalRecord:
        values = {one.name: entry[one.name] for one in fields(FinalRecord) if one.name in entry}
        needed: dict[str, Any] = {name: float(entry[name]) for name in ("bytes_down", "bytes_up", "seconds")}
        needed |= {name: int(entry[name]) for name in ("seed", "rounds")}
        needed |= {name: int(values[name]) for name in ("clients", "evaluated", "took_part") if values.get(name)}
        everyone = entry.get("all_clients")
        metrics = {**_evaluated(entry), "all_clients": _evaluated(everyone) if everyone else {}}
        return FinalRecord(**{**values, **needed, **metrics, "label": str(entry["algorithm"])})

    @classmethod
    def so_far(cls, key: Key, rounds: Sequence[RoundRecord]) -> FinalRecord:
        """Standing of an unfinished trial: after its last evaluated round."""
        evaluated = [entry for entry in rounds if entry.metrics]
        last = evaluated[-1] if evaluated else rounds[-1]
        counted = [entry for entry in rounds if entry.number <= last.number]
        costs = {name: sum(getattr(one, name) for one in counted) for name in ("seconds", "bytes_down", "bytes_up")}
        return FinalRecord(
            label=key[0], seed=key[1], rounds=len(counted), took_part=last.took_part, **costs,
            personal=last.metrics.get("personal", {}), server=last.metrics.get("server"),
            all_clients={str(kind): metrics for kind, metrics in last.all_clients.items()},
            diverged=any(map(has_diverged, last.metrics.values())),
        )  # fmt: skip


@dataclass(frozen=True)
class TrialRecord:
    """One algorithm with one seed."""

    algorithm: str
    seed: int
    rounds: tuple[RoundRecord, ...]  # ascending, each number once
    clients: tuple[ClientRecord, ...]
    final: FinalRecord
    finished: bool

    @property
    def round(self) -> int:
        """The number of the round that `final` is of; a warm start shifts numbers, so it may exceed `final.rounds`."""
        evaluated = [entry.number for entry in self.rounds if entry.metrics]
        if evaluated and not self.finished:
            return evaluated[-1]
        return self.rounds[-1].number if self.rounds else self.final.rounds

    @property
    def participants(self) -> tuple[ClientRecord, ...]:
        """The clients that took part in a round."""
        return tuple(client for client in self.clients if client.took_part)


@dataclass(frozen=True)
class Baseline:
    """Scores of clients without a model, with one seed (kinfed.runs.baseline computes it)."""

    seed: int
    name: str
    personal: dict[str, float]  # metrics over the clients that are evaluated
    clients: dict[str, float | None]  # the headline metric of every client; None if it is undefined

    def __repr__(self) -> str:
        return f"Baseline({self.name}, seed {self.seed}: {len(self.clients)} clients)"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Baseline:
        clients = {str(name): value if value is None else float(value) for name, value in record["clients"].items()}
        return cls(int(record["seed"]), str(record["name"]), _numbers(record["personal"]), clients)


@dataclass(frozen=True)
class RunRecord:
    path: Path
    label: str
    config: dict[str, Any]  # the resolved configuration
    version: str
    versions: dict[str, Any]
    fingerprint: str
    trials: tuple[TrialRecord, ...]
    federations: dict[int, Description]  # who holds what, by seed
    notes: tuple[str, ...] = ()
    baselines: dict[int, Baseline] = field(default_factory=dict)  # what clients reach without a model, by seed
    curves: dict[Key, Curves] = field(default_factory=dict)  # ROC and calibration of clients, by algorithm and seed
    parameters: int | None = None  # of a model
    results: tuple[FinalRecord, ...] = ()  # of a finished run
    contents: dict[str, str] = field(default_factory=dict)  # digests of data and code
    changed_files: tuple[str, ...] = ()  # since the run has ended

    def __repr__(self) -> str:
        seeds = len({trial.seed for trial in self.trials})
        return f"RunRecord({str(self.path)!r}: {', '.join(self.algorithms)}; seeds: {seeds})"

    @property
    def last_planned_round(self) -> int | None:
        rounds, warm = self.config.get("rounds"), self.config.get("warm_start") or 0
        return rounds + warm if isinstance(rounds, int) and isinstance(warm, int) else None

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Labels in the order of the configuration, then in order of appearance."""
        configured, present = self.config.get("algorithms"), [trial.algorithm for trial in self.trials]
        names = dict.fromkeys([*(configured if isinstance(configured, dict) else ()), *present])
        return tuple(name for name in names if name in present)


def headline_text(metrics: Mapping[str, float], name: str | None = None) -> str:
    """The metric of that name, or what a problem is usually judged by, in a line about progress; "" without any."""
    headline = METRICS.headline_among(metrics, name) or ("loss" if "loss" in metrics else None)
    if headline is None:
        return ""
    metric = METRICS.find(headline)
    if metric is not None and metric.percent:
        title = "accuracy" if headline == "accuracy" else metric.title
        return f"{title} {100 * metrics[headline]:.1f}%"
    return f"{headline if metric is None else metric.title} {metrics[headline]:.4g}"


def has_diverged(metrics: Mapping[str, float]) -> bool:
    """Whether these are figures of models that ran away. Other tasks' losses have units of their own, so that only one
    that is not finite tells."""
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        return True
    if "accuracy" in metrics:
        return loss > DIVERGED_LOSS
    return "rmse" in metrics and loss > DIVERGED_REGRESSION_LOSS


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _by_kind(entry: Mapping[str, Any]) -> dict[Kind, Metrics]:
    """Figures that do not exist are absent."""
    return {kind: _numbers(entry[kind]) for kind in KINDS if entry.get(kind) is not None}


def _evaluated(entry: Mapping[str, Any]) -> dict[str, Any]:
    others = entry.get("alternatives") or {}
    server = None if entry.get("server") is None else _numbers(entry["server"])
    alternatives = {name: _numbers(metrics) for name, metrics in others.items()}
    return {"personal": _numbers(entry["personal"] or {}), "server": server, "alternatives": alternatives}


def _numbers(metrics: Mapping[str, Any]) -> Metrics:
    """null is a figure that is not finite, for which JSON has no number."""
    return {name: math.nan if value is None else float(value) for name, value in metrics.items()}
