"""What a run found: metrics and models of every method and seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kinfed.data.federation import Federation
from kinfed.engine.mixture import module_for
from kinfed.engine.task import ModuleTask, Score
from kinfed.errors import ConfigError
from kinfed.pools.base import Evaluation
from kinfed.runs.config import RunConfig
from kinfed.runs.metrics import summarize

Metrics = dict[str, float]


@dataclass
class MethodResult:
    """One method under one seed, after its last round."""

    label: str
    seed: int
    rounds: int
    personal: Metrics
    server: Metrics | None
    bytes_down: int
    bytes_up: int
    seconds: float
    evaluation: Evaluation = field(repr=False)
    server_model: Tensor | None = field(default=None, repr=False)  # [P]
    alternatives: dict[str, Metrics] = field(default_factory=dict)  # other models that the method reports, by name
    privacy: dict[str, Any] | None = None  # epsilon of every client and what belongs to it

    def summary(self) -> dict[str, Any]:
        return {
            "algorithm": self.label, "seed": self.seed, "rounds": self.rounds, "personal": self.personal,
            "server": self.server, "bytes_down": self.bytes_down, "bytes_up": self.bytes_up, "seconds": self.seconds,
            "alternatives": self.alternatives, **({} if self.privacy is None else {"privacy": self.privacy}),
        }  # fmt: skip


@dataclass
class RunResult:
    config: RunConfig
    results: list[MethodResult]
    federations: dict[int, Federation] = field(repr=False)
    task: ModuleTask = field(repr=False)
    folder: Path | None = None

    def of(self, label: str | None = None, seed: int | None = None) -> MethodResult:
        """The result of a method (the only one where none is named) and seed (the first)."""
        labels = list(self.config.algorithms)
        if label is None and len(labels) > 1:
            raise ConfigError(f"say which algorithm: {', '.join(labels)}")
        label = labels[0] if label is None else label
        seed = self.config.seeds[0] if seed is None else seed
        for result in self.results:
            if result.label == label and result.seed == seed:
                return result
        raise ConfigError(
            f"no result of {label!r} with seed {seed}; there are {', '.join(labels)}, {self.config.seeds}"
        )

    def personal_model(self, client: str | int, label: str | None = None, seed: int | None = None) -> nn.Module:
        """The client's own model, ready to use. A client is named as in the data, or given by its number."""
        result = self.of(label, seed)
        models = result.evaluation.models
        if models is None:
            raise ConfigError("this run did not keep its models (save_models = false)")
        return module_for(self.task, models[client_number(self.federations[result.seed].names, client)])

    def server_model(self, label: str | None = None, seed: int | None = None) -> nn.Module | None:
        w = self.of(label, seed).server_model
        return None if w is None else self.task.module_of(w)


def client_number(names: list[str], client: str | int) -> int:
    if isinstance(client, int):
        if not 0 <= client < len(names):
            raise ConfigError(f"clients are numbered 0..{len(names) - 1}; got {client}")
        return client
    if client in names:
        return names.index(client)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise ConfigError(f"no client is called {client!r}; there are {shown}")


def judge(evaluation: Evaluation, data: Federation, task: Any) -> tuple[Metrics, Metrics | None]:
    """Metrics of the personal models and of the server's models."""
    assert evaluation.personal is not None
    server_model = (
        None if evaluation.server_model is None else _metrics(evaluation.server_model, evaluation, data, task)
    )
    return _metrics(evaluation.personal, evaluation, data, task), server_model


def judge_alternatives(evaluation: Evaluation, data: Federation, task: Any) -> dict[str, Metrics]:
    """Metrics of the other models that a method reports, by name."""
    return {name: _metrics(score, evaluation, data, task) for name, score in evaluation.alternatives.items()}


def _metrics(score: Score, evaluation: Evaluation, data: Federation, task: Any) -> Metrics:
    n_train = data.train.count[evaluation.ids]
    return summarize(score.correct if task.classifies else None, score.loss, score.count, n_train)


def client_rows(result: MethodResult, data: Federation) -> list[dict[str, Any]]:
    """One line per client for clients.csv."""
    rows = []
    for position, client in enumerate(result.evaluation.ids.tolist()):
        row: dict[str, Any] = {
            "algorithm": result.label, "seed": result.seed, "client": data.names[client],
            "n_train": int(data.train.count[client]), "n_test": int(data.test.count[client]),
        }  # fmt: skip
        for kind, score in (("personal", result.evaluation.personal), ("server", result.evaluation.server_model)):
            n = 0 if score is None else int(score.count[position])
            row[f"{kind}_accuracy"] = float(score.correct[position]) / n if score is not None and n else None
            row[f"{kind}_loss"] = float(score.loss[position]) / n if score is not None and n else None
        if result.privacy is not None:
            row["epsilon"] = result.privacy["epsilon"][client]
        rows.append(row)
    return rows
