"""A deployment on the server's side: clients are enrolled, then a run like any other, with a pool of nodes.

    <out>/deployment.json    the run's own name, the clients in the order of their numbers, and the common scaling;
                             written once (kinfed.deploy.server.enrol), so that a run that is resumed is the same run
    <out>/messages.json      fields of an update that every node sends in a round, with shapes and types
    <out>/log.txt            what happened, for people: tail -f it
    <out>/status.json        what happens now: rounds, clients, who is awaited (kinfed.deploy.server.status)
    <out>/transfers.jsonl    the audit log: every message to and from a client (kinfed.deploy.operations.audit_log)
    <out>/...                otherwise a run folder like any other (kinfed.records.run_folder): rounds.jsonl,
                             clients.csv, summary.json and a checkpoint after every round

There are no models in it: personal ones are in the vaults of the nodes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kinfed.algorithms import check_algorithm_settings, sample_update
from kinfed.config import RunConfig
from kinfed.core import storage
from kinfed.data import Population
from kinfed.deploy.operations.audit_log import TRANSFERS, AuditLog
from kinfed.deploy.operations.log_lines import place_lines
from kinfed.deploy.server.enrol import Roster, TooFewClients, enrol_clients
from kinfed.deploy.server.fit_server import FitServer
from kinfed.deploy.server.membership import note_members, present, widen_checkpoint, with_newcomers
from kinfed.deploy.server.node_pool import NodePool, made_up_cohort, make_pool
from kinfed.deploy.server.question_server import QuestionServer
from kinfed.deploy.server.server_privacy import SecretSchedule, make_example_budget, make_user_level, notes
from kinfed.deploy.server.status import DONE, RUNNING, STOPPED, WAITING, StatusWriter
from kinfed.deploy.settings import Deployment
from kinfed.deploy.transport.exchange import Exchange, Transport
from kinfed.engine import ModuleTask, Task
from kinfed.errors import ConfigError, KinfedError
from kinfed.records import FolderInUse, RunFiles, RunFolder, headline_text
from kinfed.runs import ClientTable, MethodResult, MethodRun, Metrics, NullObserver, build_task
from kinfed.server import Loop, RoundReport
from kinfed.serving import save_layout
from kinfed.updates import ExampleLevel, RobustAverage, Screening, trained_columns

Say = Callable[[str], None]


def serve(
    deployment: Deployment, transport: Transport, say: Say = print, *,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> Path:  # fmt: skip
    """Run a deployment to its end, from where its folder says it stopped; returns the folder with the results."""
    with _open_folder(deployment, say, clock, sleep) as folder:
        log = _log_to(folder.path / "log.txt", say)
        exchange = Exchange(transport, log, clock, sleep)
        about = {"method": deployment.method, "rounds": deployment.run.rounds, **_limits(deployment.run)}
        status = StatusWriter(folder.path, exchange, about, deployment.client_names or [])
        exchange.watch, exchange.record = status.watch, AuditLog(folder.path / TRANSFERS).append
        if folder.version_change:
            log(folder.version_change)
        try:
            status.update(WAITING, "waiting for clients to appear")
            if deployment.search is not None:
                FitServer(deployment, exchange, folder, status).execute()
                folder.seal_files("deployment.json", "columns.json", "rounds.jsonl", "fit.json")
                log(f"done; results in {folder.path}, models and pages of the sites in the vaults of the nodes")
                status.update(DONE, "done")
                return folder.path
            if deployment.question:
                page = QuestionServer(deployment, exchange, folder.path).execute()
                folder.seal_files("deployment.json", "describe.json", "evaluate.json")
                log(f"done; {page}")
                status.update(DONE, "done")
                return folder.path
            path = folder.path / "deployment.json"
            run, roster = enrol_clients(deployment, exchange, path)
            roster = with_newcomers(deployment, exchange, run, roster, path)
            log(
                f"run {run} in {folder.path}: {deployment.method} with {deployment.run.model.name} for "
                f"{deployment.run.rounds} rounds; clients {', '.join(roster.names)}"
            )
            status.names = roster.names
            place_lines(run=run)
            result = _run_rounds(deployment, run, roster, exchange, folder, status)
        except BaseException as error:
            reason = str(error) if isinstance(error, KinfedError) else f"{type(error).__name__}: {error}"
            log(f"stopped: {reason}")
            status.update(STOPPED, "stopped", reason=reason)
            raise
        evaluated = result.evaluation.ids.tolist()
        if absent := [
            name for k, name in enumerate(roster.names) if k not in evaluated and name not in deployment.left_names
        ]:
            log(f"the last evaluation is without {', '.join(absent)}; their vaults hold an older model")
        log(f"done; results in {folder.path}, personal models in the vaults of the nodes")
        status.update(DONE, "done")
    return folder.path


def _limits(config: RunConfig) -> dict[str, Any]:
    """Limits of privacy, for the status of a run."""
    rows, clients = config.privacy, config.user_privacy
    return {
        "epsilon_limit": None if rows is None else rows.limit,
        "user_epsilon_limit": None if clients is None else clients.epsilon,
        "secret_choice": clients is not None and not clients.at_nodes,
    }


def _log_to(path: Path, say: Say) -> Say:
    """`say`, and a line with the time in a file."""

    def log(text: str) -> None:
        with storage.storage_errors("append to", path), path.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
        say(text)

    return log


def _open_folder(
    deployment: Deployment, say: Say, clock: Callable[[], float], sleep: Callable[[float], None]
) -> RunFolder:
    """The run's folder. The server of a superlink that was killed may live on for some seconds and hold it: wait."""
    end, waiting = clock() + deployment.wait, False
    while True:
        try:
            return RunFolder.open(deployment.folder, deployment.run.dump(), deployment.fingerprint(), resume=True)
        except FolderInUse as error:
            if clock() >= end:
                raise
            if not waiting:
                say(f"waiting: {error}")
                waiting = True
            sleep(1.0)


def _run_rounds(
    deployment: Deployment, run: str, roster: Roster, exchange: Exchange, folder: RunFolder, status: StatusWriter
) -> MethodResult:
    config = deployment.run
    task = build_task(config, roster.shape, deployment.problem)
    _check_weights(folder.path, task)
    save_layout(folder.path, config.model.name, task)
    pool, loop = _make_loop(deployment, run, roster, exchange, task, folder.path)
    label = f"{deployment.method}-{deployment.seed}"
    for sentence in note_members(folder.path, deployment, folder.checkpoints.newest_round(label)):
        exchange.say(sentence)
    widen_checkpoint(folder.checkpoints, label, loop)
    with loop:
        clients = ClientTable(roster.names, n_train=roster.counts[:, 0], n_test=roster.counts[:, 2])
        method_run = MethodRun(
            deployment.method, loop, clients, _num_rounds(deployment, folder, loop, exchange.say),
            eval_every=config.eval_every, checkpoint_every=config.checkpoint_every, folder=folder,
            observer=_LogObserver(
                exchange.say, loop.algorithm.rounds_in(config.rounds), status, config.metric, pool
            ),
        )  # fmt: skip
        for report in method_run.rounds():
            if pool.rounds_without_quorum >= deployment.patience:
                raise TooFewClients(
                    f"{pool.rounds_without_quorum} rounds in a row had too few updates; the run stops after round "
                    f"{report.round}. Start it again (flwr run) when clients are back, and it goes on from there"
                )
        if not bool(pool.accepted.any()):
            raise TooFewClients(
                f"no round of {method_run.num_rounds} had enough updates, so nothing was learnt; the log says why. "
                "Mend it and begin again in another folder (out)"
            )
        if pool.rounds_without_quorum:
            exchange.say(f"the last {pool.rounds_without_quorum} round(s) had too few updates, and changed nothing")
        result = method_run.finish()
    seconds, down, up = pool.evaluations.tolist()
    counted = {"seconds": seconds, "bytes_down": int(down), "bytes_up": int(up)}
    folder.write_summary({"results": [result.to_json()], "evaluations": counted})
    exchange.say(
        f"{result.seconds + seconds:.1f} s in all: {result.seconds:.1f} of rounds, {seconds:.1f} of evaluations; "
        f"{(result.bytes_down + result.bytes_up) / 1e6:.2f} MB in rounds, {(down + up) / 1e6:.2f} MB in evaluations"
    )
    return result


def _num_rounds(deployment: Deployment, folder: RunFolder, loop: Loop, say: Say) -> int:
    """The configured number; less if rounds were repeated whose sums count against a promised user-level epsilon."""
    rounds = deployment.run.rounds
    if loop.user_level is None or deployment.run.user_epsilon is None:
        return rounds
    repeated = loop.user_level.spent - folder.checkpoints.newest_round(f"{deployment.method}-{deployment.seed}")
    if repeated:
        say(
            f"{repeated} noisy sum(s) were released by rounds that did not finish; the run has {rounds - repeated} "
            f"rounds, so that no more than {rounds} sums are released, the number that user_epsilon was planned for"
        )
    return rounds - repeated


def _check_weights(folder: Path, task: ModuleTask) -> None:
    """Refuse to go on with other frozen weights than a run began with."""
    if (folder / "model.json").exists() and RunFiles(folder).layout().get("constants", "") != task.constants_digest():
        raise ConfigError(
            f"the model has other frozen weights than the run in {folder} began with; give it those again, or begin "
            "another run (out)"
        )


def _make_loop(
    deployment: Deployment, run: str, roster: Roster, exchange: Exchange, task: Task, folder: Path
) -> tuple[NodePool, Loop]:
    config, algorithm = deployment.run, deployment.algorithm
    population = roster.population(deployment.seed, config.participation)
    budget = None if config.privacy is None else make_example_budget(deployment, roster, task, exchange.say)
    task = task if budget is None else budget.task
    check_algorithm_settings(algorithm, task, population)  # before a round is tried out
    server = algorithm.init_server(task, population)
    plain, cohort = task if budget is None else budget.task.inner, made_up_cohort(roster, deployment.problem)
    up = sample_update(algorithm, plain, server, cohort, Population(len(roster.names), 0)).named()
    sent = {name: [list(one.shape[1:]), str(one.dtype).removeprefix("torch.")] for name, one in up.items()}
    storage.write_json(folder / "messages.json", {deployment.method: sent if algorithm.sends else {}})
    members = present(deployment, roster.names)
    schedule = replace(config.schedule, members=members, evaluates=members)
    pool = make_pool(deployment, run, roster, exchange, task, up)
    if config.secure is not None and algorithm.sends:
        exchange.say(
            f"secure sums: no update leaves a node but masked, in a sum of {config.secure.least} clients at least"
        )
    user_level = make_user_level(deployment, run, folder, len(roster.names), task, up)
    if user_level is not None:
        if user_level.hides_absence:
            schedule = SecretSchedule(schedule.participation, sampling=schedule.sampling)
        for note in notes(deployment, user_level, len(roster.names), task):
            exchange.say(note)
    rule, trained = config.robust_rule, trained_columns(algorithm, task)
    stages = (
        None if budget is None else ExampleLevel(budget), None if rule is None else Screening(0.0, trained),
        None if rule is None else RobustAverage(rule, algorithm, trained), user_level,
    )  # fmt: skip
    return pool, Loop(algorithm, task, pool, population, schedule, [stage for stage in stages if stage is not None])


@dataclass(frozen=True)
class _LogObserver(NullObserver):
    """Writes reports of a run into the log (kinfed.runs.observer)."""

    say: Say
    num_rounds: int
    status: StatusWriter
    metric: str | None
    pool: NodePool
    before: list[float] = field(default_factory=lambda: [0.0])  # seconds of evaluations up to the last round

    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        if first:
            self.say(f"resumed after round {first}")
        place_lines(round=first + 1)
        self.status.update(RUNNING, f"round {first + 1} of {self.num_rounds}")

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        figure = f"; personal {headline_text(personal, self.metric)}" if personal else ""
        seconds = float(self.pool.evaluations[0])
        evaluated = f", evaluated in {seconds - self.before[0]:.1f} s" if seconds > self.before[0] else ""
        self.before[0] = seconds
        self.say(
            f"round {report.round} of {self.num_rounds}: {report.active - report.dropped} of {report.active} "
            f"updates in {report.seconds:.1f} s{evaluated}{figure}"
        )
        if report.round < self.num_rounds:
            place_lines(round=report.round + 1)
            self.status.update(RUNNING, f"round {report.round + 1} of {self.num_rounds}")

    def note(self, text: str) -> None:
        self.say(text)
