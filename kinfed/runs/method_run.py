"""One algorithm under one seed: its rounds, evaluations, journal, checkpoints and result. Simulations, tuning and
deployments all run this way.

    run = MethodRun("ditto", loop, ClientTable.from_federation(data), num_rounds=30, folder=folder)
    result = run.execute()

or, where something is to be decided between rounds:

    for report in run.rounds():          # each is evaluated where due, journaled and saved before it is handed out
        ...
    result = run.finish()

Resuming is not a case of its own: `rounds` begins after the newest checkpoint of the folder, if there is one.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from kinfed.algorithms import Local
from kinfed.core import storage, threads
from kinfed.engine import METRICS, Score
from kinfed.errors import KinfedError
from kinfed.pools import Evaluation
from kinfed.records import RoundRecord, RunFolder, has_diverged
from kinfed.runs.early_stopping import PREFIX, EarlyStopping
from kinfed.runs.observer import NullObserver, Observer
from kinfed.runs.results import ClientTable, EvaluationMetrics, MethodResult, client_round_columns, took_part
from kinfed.server import Loop, RoundReport

CHECKPOINT_SECONDS = 20.0  # what a killed run loses at most, or a round; states of many clients take long to write
DIVERGED = "losses or updates are not finite or out of all bounds, so its figures mean nothing; try a lower lr"
_NOT_EVALUATED = "journal_not_evaluated"  # of a snapshot: the mark of its lines, had the last not been evaluated
_METRICS = "early_stopping_metrics"  # of a snapshot: in the order of their sums
_NAMED_CLIENTS = 5  # in a note about rejected updates


class Interrupted(KinfedError):
    """A run was asked to stop; its last finished round is on disk."""


@dataclass
class Totals:
    """Sums over all rounds so far."""

    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    asked: int = 0  # clients, each as often as it was called
    not_finite: int = 0  # updates that were rejected for NaN or infinity

    def add(self, report: RoundReport) -> None:
        self.asked += report.active
        self.not_finite += len([client for client in report.rejected if client not in report.reasons])
        self.bytes_down += report.bytes_down
        self.bytes_up += report.bytes_up
        self.seconds += report.seconds


@dataclass
class MethodRun:
    """The loop is the caller's to close."""

    label: str
    loop: Loop
    clients: ClientTable
    num_rounds: int  # at most, from the loop's first round on; of an algorithm that knows its own end, its own number
    eval_every: int = 0  # rounds between evaluations; the last round is always evaluated
    checkpoint_every: int | None = None  # rounds between checkpoints; None: CHECKPOINT_SECONDS between them
    split: str = "test"  # that models are evaluated on
    client_rounds: bool = False  # every client's metrics of every evaluated round, in the folder
    keep_models: bool = False  # personal models of the last round, in the result and in the folder
    folder: RunFolder | None = None  # None: nothing is written
    observer: Observer = field(default_factory=NullObserver)
    should_stop: Callable[[], bool] = lambda: False
    fold: int | None = None  # of a cross-validation, which keeps no models and writes clients' lines of all folds
    alone: Score | None = None  # what clients reach alone with this seed, where that is known already
    stopping: EarlyStopping | None = None
    totals: Totals = field(default_factory=Totals, init=False)
    _rounds: list[RoundRecord] = field(default_factory=list, init=False)  # without a folder
    _last_evaluation: Evaluation | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_rounds = self.loop.algorithm.rounds_in(self.num_rounds)

    @property
    def seed(self) -> int:
        return self.loop.population.seed

    @property
    def metric(self) -> str:
        """The headline: what methods are compared by."""
        task = self.loop.task
        if task.problem is not None:
            return METRICS.headline(task.problem, task.metric).name
        return "accuracy" if task.classifies else "loss"

    @property
    def title(self) -> str:
        """Name of this run in a display."""
        return self.label if self.fold is None else f"{self.label} fold {self.fold + 1}"

    @property
    def last_round(self) -> int:
        return self.loop.first_round + self.num_rounds - 1

    @property
    def is_over(self) -> bool:
        """Whether no round remains: the last one is done, or the algorithm has learnt all that it will."""
        completed = self.loop.completed
        begun = completed >= self.loop.first_round
        stopped = self.stopping is not None and self.stopping.keeps_models and self.stopping.all_stopped
        return completed >= self.last_round or stopped or (begun and self.loop.algorithm.is_done(self.loop.server))

    def execute(self) -> MethodResult:
        for _ in self.rounds():
            pass
        return self.finish()

    def rounds(self) -> Iterator[RoundReport]:
        """The rounds that remain. Interrupted where the run is asked to stop; the round it was in is saved."""
        self._resume()
        rounds = self.loop.completed - self.loop.first_round + 1
        self.observer.started(self.title, self.seed, rounds, self.num_rounds)
        saved = time.monotonic()
        while not self.is_over:
            report = self.loop.round()
            self.totals.add(report)
            metrics = self._journal(report)
            self._note_rejections(report)
            personal, server = (None, None) if metrics is None else (metrics.personal, metrics.server)
            self.observer.round(self.title, self.seed, report, personal, server)
            stop = self.should_stop()
            if stop or self._checkpoint_due(report.round, time.monotonic() - saved):
                self._save()
                saved = time.monotonic()
            if stop:
                raise Interrupted("stopped as asked; the last finished round is saved")
            yield report

    @threads.one_thread()
    def finish(self) -> MethodResult:
        """The result after the last round; models and the clients' lines are in the folder then."""
        evaluation = self._last_evaluation or self._evaluate(last=True)
        stopping = self.stopping
        if stopping is not None:
            evaluation = stopping.applied(evaluation)
        metrics, everyone = self._metrics(evaluation)
        algorithm, privacy, totals = self.loop.algorithm, self.loop.privacy, self.totals
        diverged = any(has_diverged(one) for one in (metrics.personal, metrics.server or {}))
        result = MethodResult(
            label=self.label, seed=self.seed, rounds=self.loop.completed - self.loop.first_round + 1,
            **asdict(metrics), metric=self.metric,
            clients=len(self.clients.names), evaluated=len(evaluation.ids), took_part=int(self.loop.took_part.sum()),
            all_clients=asdict(everyone), evaluation=evaluation, client_table=self.clients,
            bytes_down=totals.bytes_down, bytes_up=totals.bytes_up, seconds=totals.seconds,
            diverged=diverged or 2 * totals.not_finite > totals.asked,
            server_models=(stopping and stopping.server_models) or algorithm.server_models(self.loop.server),
            stopped=None if stopping is None or stopping.clients is None else stopping.clients.round,
            server_stopped=None if stopping is None or stopping.server is None else int(stopping.server.round[0]),
            server_state=self.loop.server.named() if self.folder is None and self.keep_models else None,
            privacy=None if privacy is None else privacy.summary(self.clients.names),
            user_privacy=None if self.loop.user_level is None else self.loop.user_level.summary(),
            journal=tuple(self._rounds),
            alone=self.alone or (evaluation.personal if isinstance(algorithm, Local) else None),
        )  # fmt: skip
        if result.diverged:
            self.observer.note(f"{self.label} seed {self.seed} has diverged: {DIVERGED}")
        if self.folder is not None and self.fold is None:
            models, trained = evaluation.models, took_part(evaluation)
            if models is not None:
                self.folder.write_models(self.label, self.seed, models, result.server_models, trained)
            self.folder.append_clients(result.client_columns())
        return result

    # ---- checkpoints ----

    @property
    def _checkpoint(self) -> str:
        return f"{self.label}-{self.seed}" + ("" if self.fold is None else f"-fold-{self.fold + 1}")

    def _resume(self) -> None:
        if self.folder is None:
            return
        snapshot = self.folder.checkpoints.latest(self._checkpoint)
        if snapshot is None:
            self.folder.rewind(self.label, self.seed, None, fold=self.fold)
            return
        own = {name: tensor for name, tensor in snapshot.tensors.items() if name.startswith(PREFIX)}
        self.loop.load(snapshot.round, {k: tensor for k, tensor in snapshot.tensors.items() if k not in own})
        if self.stopping is not None:
            self.stopping.load(own, tuple(snapshot.extra.get(_METRICS, ())))
        self.totals = Totals(**snapshot.extra["totals"])
        self.folder.rewind(
            self.label, self.seed, snapshot.round, snapshot.extra["journal"], fold=self.fold,
            other_mark=snapshot.extra.get(_NOT_EVALUATED),
        )  # fmt: skip
        if not self.is_over and not self._evaluation_due(snapshot.round):
            self._forget_evaluation(snapshot.extra)

    def _forget_evaluation(self, extra: dict[str, Any]) -> None:
        """A run that has grown was evaluated after what was its last round, and would not have been there, had it been
        as long from the start: its line is written as that of any other round. The snapshot gets the mark of the new
        line first and keeps the old one, so that a crash between the two leaves a journal that it knows."""
        assert self.folder is not None
        last = self.folder.lines_of(self.label, self.seed, self.fold)[-1]
        if last["personal"] is None:
            return
        nothing = {"personal": None, "server": None, "all_clients": None, "method": self._figures(None, None)}
        extra = extra | {_NOT_EVALUATED: self.folder.mark_with_last(last | nothing)}
        self.folder.forget_client_round(self.label, self.seed, last["round"])
        self.folder.checkpoints.save(self._checkpoint, self.loop.completed, self._state(), extra)
        self.folder.replace_last(last | nothing)

    def _checkpoint_due(self, round: int, seconds: float) -> bool:
        every = self.checkpoint_every
        due = seconds >= CHECKPOINT_SECONDS if every is None else round % every == 0
        return due or self.is_over

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.sync()
            mark = self.folder.journal_mark(self.label, self.seed, self.fold)
            extra: dict[str, Any] = {"totals": asdict(self.totals), "journal": mark}
            if self.stopping is not None:
                extra[_METRICS] = list(self.stopping.names)
            self.folder.checkpoints.save(self._checkpoint, self.loop.completed, self._state(), extra)

    def _state(self) -> dict[str, Tensor]:
        return self.loop.state() | ({} if self.stopping is None else self.stopping.tensors())

    # ---- evaluation and journal ----

    @threads.one_thread()
    def _journal(self, report: RoundReport) -> EvaluationMetrics | None:
        """Evaluate where due and write the round's line; the metrics of the clients that took part."""
        last = self.is_over
        evaluation = self._evaluate(last) if last or self._evaluation_due(report.round) else None
        metrics, everyone = (None, None) if evaluation is None else self._metrics(evaluation)
        if self.stopping is not None and evaluation is not None and self._evaluation_due(report.round):
            models = self.loop.algorithm.server_models(self.loop.server)
            self.stopping.look(report.round, self.loop.evaluate("val"), evaluation, models)
        record = RoundRecord(
            report.round, report.seconds, report.active, report.dropped, report.bytes_down, report.bytes_up,
            {} if metrics is None else metrics.by_kind, storage.plain(self._figures(evaluation, metrics)),
            int(self.loop.took_part.sum()), {} if everyone is None else everyone.by_kind,
            report.clock, storage.plain(report.staleness),
        )  # fmt: skip
        if self.folder is None:
            self._rounds.append(record)
        else:
            self.folder.append_round(record.to_json((self.label, self.seed, self.fold)))
            if self.client_rounds and evaluation is not None and self.fold is None:
                columns = client_round_columns(self.label, self.seed, report.round, evaluation, self.clients)
                self.folder.write_client_round(self.label, self.seed, report.round, columns)
        return metrics

    def _evaluation_due(self, round: int) -> bool:
        return self.eval_every > 0 and round % self.eval_every == 0

    def _evaluate(self, last: bool) -> Evaluation:
        every = self.stopping is not None and self.stopping.keeps_models
        evaluation = self.loop.evaluate(self.split, keep_models=(last or every) and self.keep_models)
        if last:
            self._last_evaluation = evaluation
        return evaluation

    def _figures(self, evaluation: Evaluation | None, metrics: EvaluationMetrics | None) -> dict[str, Any]:
        """The algorithm's own numbers; those by client, and what belongs to an evaluation, only of evaluated rounds."""
        algorithm, server = self.loop.algorithm, self.loop.server
        figures: dict[str, Any] = algorithm.figures(server)
        if evaluation is None or metrics is None:
            return {name: value for name, value in figures.items() if not isinstance(value, Tensor) or not value.dim()}
        models = algorithm.server_models(server)
        if models is not None and models.assignment is not None:
            figures = {"assignment": models.assignment} | figures  # a method may know who has none yet
        sample = self.loop.schedule.evaluates
        if sample is not None:
            figures = of_sample(figures, sample, len(self.clients.names))
        if evaluation.figures and len(evaluation.ids) == len(self.clients.names if sample is None else sample):
            figures = figures | {"clients": evaluation.figures}
        headline = self.metric
        if self.stopping is not None:
            figures = figures | {"early_stopping": self.stopping.figures()}
        for name, other in metrics.alternatives.items():
            figures = figures | ({f"{name}_{headline}": other[headline]} if headline in other else {})
        if self.loop.privacy is not None:
            figures = figures | {"privacy": self.loop.privacy.figures()}
        if self.loop.user_level is not None:
            figures = figures | {"user_privacy": self.loop.user_level.figures()}
        return figures

    def _metrics(self, evaluation: Evaluation) -> tuple[EvaluationMetrics, EvaluationMetrics]:
        """Metrics of the clients that have taken part, which methods are compared by, and of all clients: the others
        have the server's model at best."""
        rows = took_part(evaluation).nonzero().squeeze(1)
        classifies = self.loop.task.classifies
        everyone = EvaluationMetrics.from_evaluation(evaluation, self.clients, classifies)
        if len(rows) == len(evaluation.ids):
            return everyone, everyone
        return EvaluationMetrics.from_evaluation(evaluation, self.clients, classifies, rows), everyone

    def _note_rejections(self, report: RoundReport) -> None:
        names, start = self.clients.names, f"{self.label}, round {report.round}: "
        explained = [k for k in report.rejected if k in report.reasons]
        for k in explained[:_NAMED_CLIENTS]:
            self.observer.note(f"{start}dropped {names[k]}: {report.reasons[k]}")
        if others := [k for k in report.rejected if k not in report.reasons]:
            who = ", ".join(names[k] for k in others[:_NAMED_CLIENTS])
            self.observer.note(f"{start}dropped {len(others)} update(s) with NaN or infinity, of {who}")
        if report.note:
            self.observer.note(start + report.note)


def of_sample(figures: dict[str, Any], ids: Tensor, num_clients: int) -> dict[str, Any]:
    """Figures of a method by client, of the clients `ids` alone: the journal does not grow with all others."""

    def rows(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for axis in range(value.dim()):
            if value.shape[axis] == num_clients:
                value = value.index_select(axis, ids.to(value.device))
        return value

    return {name: rows(value) for name, value in figures.items()}
