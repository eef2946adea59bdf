"""Results of a run: metrics and models of every method and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from kinfed.algorithms import ServerModels
from kinfed.config import RunConfig
from kinfed.core import storage
from kinfed.data import Federation
from kinfed.engine import Architectures, ModuleTask, Score, module_for
from kinfed.errors import ConfigError
from kinfed.pools import Evaluation
from kinfed.records import (
    KINDS,
    Baseline,
    ClientRecord,
    Curves,
    FinalRecord,
    Kind,
    RoundRecord,
    RunRecord,
    TrialRecord,
    client_number,
    run_versions,
)
from kinfed.serving import ModelInputs, ModelPipeline

if TYPE_CHECKING:
    from kinfed.data import Description

Metrics = dict[str, float]


@dataclass(frozen=True)
class ClientTable:
    """Names and sizes of all clients, in the order of their numbers."""

    names: list[str]
    n_train: Tensor  # [K] training examples
    n_test: Tensor  # [K]

    @classmethod
    def from_federation(cls, data: Federation) -> ClientTable:
        return cls(data.names, data.train.count, data.test.count)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MethodResult(FinalRecord):
    """One algorithm under one seed, after its last round, with its models, rounds and every client's sums."""

    evaluation: Evaluation
    client_table: ClientTable  # of all clients; in a cross-validation, of all folds
    server_models: ServerModels | None = None
    curves: Curves | None = None  # of clients' personal models, of classes only
    journal: tuple[RoundRecord, ...] = ()  # its rounds, if not kept in a folder
    alone: Score | None = None  # of clients that train alone in the same run, whom `clients.csv` compares it with
    server_state: Mapping[str, Tensor] | None = None  # where models are kept, and no folder
    stopped: Tensor | None = None  # [n] the round where each client would have stopped, with `early_stopping`

    @property
    def server_model(self) -> Tensor | None:
        """[P] where the server has one model for all clients."""
        models = self.server_models
        return None if models is None or models.assignment is not None else models.models[0]

    def client_columns(self) -> dict[str, list[Any]]:
        """The lines of clients.csv, by column: one entry per evaluated client, None without a figure."""
        ids, numbers, clients = self.evaluation.ids, self.evaluation.ids.tolist(), self.client_table
        columns: dict[str, list[Any]] = {
            "algorithm": [self.label] * len(numbers), "seed": [self.seed] * len(numbers),
            "client": [clients.names[k] for k in numbers], "n_train": clients.n_train[ids].tolist(),
            "n_test": clients.n_test[ids].tolist(), "took_part": took_part(self.evaluation).tolist(),
        }  # fmt: skip
        for kind, score in (("personal", self.evaluation.personal), ("server", self.evaluation.server_model)):
            columns[f"{kind}_accuracy"] = _per_example(score, "correct", len(numbers))
            columns[f"{kind}_loss"] = _per_example(score, "loss", len(numbers))
            columns |= self._metrics(kind, score)
        if self.stopped is not None:
            columns["stopped_at"] = self.stopped.tolist()
        if self.privacy is not None:
            columns["epsilon"] = [self.privacy["epsilon"][k] for k in numbers]
        return columns

    def _metrics(self, kind: str, score: Score | None) -> dict[str, list[float | None]]:
        """All metrics but accuracy, and the standard error of the headline, of personal models also that of its
        difference to training alone; the same columns for every method."""
        length, own = len(self.evaluation.ids), self.evaluation.personal
        names = [] if own is None else [name for name in own.sums if name != "accuracy"]
        values = {name: None if score is None else score.metric(name) for name in names}
        if own is not None and own.sums:
            if kind == "personal":
                if self.alone is not None:
                    own.compare(self.alone)
                values["error_of_gain"] = own.error_of_gain
            values["error"] = None if score is None else score.error
        return {f"{kind}_{name}": _numbers(tensor, length) for name, tensor in values.items()}

    def record(self) -> TrialRecord:
        """Record as if read from a folder."""
        columns = self.client_columns()
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        clients = tuple(ClientRecord.from_row(row) for row in rows)
        return TrialRecord(self.label, self.seed, self.journal, clients, self, finished=True)


def client_round_columns(
    label: str, seed: int, round: int, evaluation: Evaluation, clients: ClientTable
) -> dict[str, list[Any]]:
    """Metrics of every evaluated client after a round, by column: one entry per client, None without a value."""
    ids, length = evaluation.ids, len(evaluation.ids)
    columns: dict[str, list[Any]] = {
        "algorithm": [label] * length, "seed": [seed] * length, "round": [round] * length,
        "client": [clients.names[k] for k in ids.tolist()], "n_train": clients.n_train[ids].tolist(),
        "n_test": clients.n_test[ids].tolist(), "took_part": took_part(evaluation).tolist(),
    }  # fmt: skip
    for kind, score in (("personal", evaluation.personal), ("server", evaluation.server_model)):
        if score is not None:
            columns[f"{kind}_loss"] = _per_example(score, "loss", length)
            columns |= {f"{kind}_{name}": _numbers(score.metric(name), length) for name in score.sums}
    return columns


def _numbers(values: Tensor | None, length: int) -> list[float | None]:
    return [None] * length if values is None else [None if value != value else value for value in values.tolist()]


def _per_example(score: Score | None, field: str, length: int) -> list[float | None]:
    if score is None:
        return [None] * length
    values, counts = getattr(score, field).tolist(), score.count.tolist()
    return [value / count if count else None for value, count in zip(values, counts, strict=True)]


@dataclass
class RunOutcome:
    """A run in this process: results, models, data. People see it through kinfed.api.run_result."""

    config: RunConfig
    results: list[MethodResult]
    federations: dict[int, Federation] = field(repr=False)
    task: ModuleTask | Architectures = field(repr=False)
    folder: Path | None = None
    own_model: str | None = None  # class of the module, where the caller gave one
    baselines: Sequence[Baseline] = ()  # by seed: what clients reach without a model
    describe: Callable[[int], Description] | None = field(default=None, repr=False)  # who holds what, with a seed

    @property
    def server_task(self) -> ModuleTask:
        """The model of all clients; of several architectures the server's."""
        return self.task.server_task if isinstance(self.task, Architectures) else self.task

    def record(self) -> RunRecord:
        """Record as `kinfed.records.load_run` would read it from a folder."""
        about = run_versions()
        return RunRecord(
            path=Path(), label="this run", config=storage.plain(self.config.dump()), version=about["kinfed"],
            versions=about["versions"], fingerprint="", trials=tuple(result.record() for result in self.results),
            federations={} if self.describe is None else {seed: self.describe(seed) for seed in self.config.seeds},
            baselines={baseline.seed: baseline for baseline in self.baselines},
            curves={(one.label, one.seed): one.curves for one in self.results if one.curves is not None},
            parameters=self.task.num_params, results=tuple(self.results),
        )  # fmt: skip

    def result(self, label: str | None = None, seed: int | None = None) -> MethodResult:
        """The result of a method (the only one if none is named) and seed (the first)."""
        return pick_result(self.results, tuple(self.config.algorithms), self.config.seeds, label, seed)

    def personal_model(self, client: str | int, label: str | None = None, seed: int | None = None) -> ModelPipeline:
        """The client's own model, ready to use: raw rows in, classes out; `.module` is the torch module alone. A client
        is named as in the data, or given by its number."""
        result = self.result(label, seed)
        models = result.evaluation.models
        if models is None:
            raise ConfigError(
                "this run did not keep its models (save_models = false)"
                if result.folds is None
                else "a cross-validation measures and keeps no models: each has not seen some rows; run without folds"
            )
        names = self.federations[result.seed].names
        number = client_number(names, client)
        row = (result.evaluation.ids == number).nonzero().squeeze(1)
        if not len(row):
            raise ConfigError(
                f"client {client} is not among those that this run evaluated (eval_clients), whose models it kept"
            )
        theta = models[int(row)]
        about = {"client": names[number]}
        if isinstance(self.task, Architectures):
            about["architecture"] = self.task.name_of(theta)
        return self._pipeline(module_for(self.task, theta), result, **about)

    def server_model(self, label: str | None = None, seed: int | None = None) -> ModelPipeline | None:
        """The server's model, if there is a single one for all clients."""
        result = self.result(label, seed)
        w = result.server_model
        return None if w is None else self._pipeline(module_for(self.server_task, w), result)

    def _pipeline(self, module: nn.Module, result: MethodResult, **about: str) -> ModelPipeline:
        model = self.config.model_of(about.get("architecture"))
        about |= {"algorithm": result.label, "seed": str(result.seed), "model": self.own_model or model.name}
        inputs = ModelInputs.of_federation(self.federations[result.seed], model.options, about.get("client"))
        return ModelPipeline(module.eval(), inputs, about)


AnySummary = TypeVar("AnySummary", bound=FinalRecord)


def pick_result(
    results: Sequence[AnySummary], labels: Sequence[str], seeds: Sequence[int], label: str | None, seed: int | None
) -> AnySummary:
    """The result of a method (the only one if none is named) and seed (the first)."""
    if label is None and len(labels) > 1:
        raise ConfigError(f"say which algorithm: {', '.join(labels)}")
    label = labels[0] if label is None else label
    seed = seeds[0] if seed is None else seed
    for result in results:
        if result.label == label and result.seed == seed:
            return result
    raise ConfigError(f"no result of {label!r} with seed {seed}; there are {', '.join(labels)}, {tuple(seeds)}")


@dataclass(frozen=True)
class EvaluationMetrics:
    """The metrics of one evaluation, over some of the clients that it was made at."""

    personal: Metrics
    server: Metrics | None
    alternatives: dict[str, Metrics]

    @property
    def by_kind(self) -> dict[Kind, Metrics]:
        return {kind: metrics for kind in KINDS if (metrics := getattr(self, kind)) is not None}

    @classmethod
    def from_evaluation(
        cls, evaluation: Evaluation, clients: ClientTable, classifies: bool, rows: Tensor | None = None
    ) -> EvaluationMetrics:
        """`rows` [m]: places of clients in the evaluation; without them all clients count."""
        chosen = torch.arange(len(evaluation.ids)) if rows is None else rows

        def metrics(score: Score) -> Metrics:
            return score.take(chosen).summary(clients.n_train[evaluation.ids[chosen]], classifies)

        return cls(
            {} if evaluation.personal is None else metrics(evaluation.personal),
            None if evaluation.server_model is None else metrics(evaluation.server_model),
            {name: metrics(score) for name, score in evaluation.alternatives.items()},
        )


def took_part(evaluation: Evaluation) -> Tensor:
    """bool [n]: which clients took part in a round. Only an evaluation by the server loop can tell."""
    if evaluation.took_part is None:
        raise ValueError("this evaluation does not say who took part; evaluate with the server loop")
    return evaluation.took_part
