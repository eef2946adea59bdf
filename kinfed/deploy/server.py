"""A whole run on the server's side: find the clients, agree on what they are fed, then the server loop of kinfed.

    <out>/deployment.json    the run's own name, the clients in the order of their numbers, and the common scaling;
                             written once, so that a run that is resumed is the same run
    <out>/log.txt            what happened, for people: tail -f it
    <out>/...                otherwise a run folder like any other (kinfed.runs.folder): rounds.jsonl, clients.csv,
                             summary.json and a checkpoint after every round

There are no models in it: personal ones are in the vaults of the nodes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import privacy_profile
from kinfed.core import storage
from kinfed.data.features import spread
from kinfed.deploy.exchange import Exchange, Transport
from kinfed.deploy.node import SUMS
from kinfed.deploy.node_data import scale
from kinfed.deploy.node_pool import NodePool, Roster, sample_update
from kinfed.deploy.settings import STANDARD, Deployment
from kinfed.deploy.wire import MessageError, Packet
from kinfed.engine.models import build_model
from kinfed.engine.task import ModuleTask, Score, make_task
from kinfed.errors import ConfigError, DataError, KinfedError
from kinfed.pools.base import Evaluation
from kinfed.privacy.budget import Accounts, open_accounts
from kinfed.privacy.noise import simulated
from kinfed.runs.checkpoint import Checkpoints
from kinfed.runs.export import save_layout
from kinfed.runs.folder import FolderInUse, RunFolder
from kinfed.runs.metrics import summarize
from kinfed.server.loop import Loop, RoundReport

Metrics = dict[str, float]
Say = Callable[[str], None]


class TooFewClients(KinfedError):
    """Clients did not appear, or too few answered for too long. What was done is saved."""


def serve(deployment: Deployment, transport: Transport, say: Say = print, **clock: Any) -> Path:
    """Run the deployment, or take up the one in its folder; the folder."""
    with _opened(deployment, say, **clock) as folder:
        logged = _logged(say, folder.path / "log.txt")
        exchange = Exchange(transport, logged, **clock)
        try:
            run, roster = _known(folder) or _begin(deployment, exchange, folder)
            logged(
                f"run {run} in {folder.path}: {deployment.method} with {deployment.model} for {deployment.rounds} "
                f"rounds; clients {', '.join(roster.names)}"
            )
            _Run(deployment, run, roster, exchange, folder, logged).execute()
        except KinfedError as error:
            logged(f"stopped: {error}")
            raise
    return folder.path


def _logged(say: Say, path: Path) -> Say:
    """Also in a file, one line each, with the time."""

    def both(text: str) -> None:
        with storage.storage_errors("append to", path), path.open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
        say(text)

    return both


def _opened(
    deployment: Deployment,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RunFolder:
    """The run's folder. The server of a superlink that was killed may live on for some seconds and hold it: wait."""
    end, said = clock() + deployment.wait, False
    while True:
        try:
            return RunFolder.open(deployment.folder, deployment.run.dump(), deployment.fingerprint(), resume=True)
        except FolderInUse as error:
            if clock() >= end:
                raise
            if not said:
                say(f"waiting: {error}")
                said = True
            sleep(1.0)


class _Run:
    def __init__(
        self, deployment: Deployment, run: str, roster: Roster, exchange: Exchange, folder: RunFolder, say: Say
    ) -> None:
        self.deployment, self.roster, self.folder, self.say = deployment, roster, folder, say
        config, seed = deployment.run, deployment.seed
        self.algorithm = deployment.algorithm
        classes = len(deployment.class_names)
        task = make_task(lambda: build_model(config.model.name, roster.shape, classes, config.model.options))
        save_layout(folder.path, config.model.name, task)
        self.plain: ModuleTask = task
        clients = roster.population(seed, config.participation)
        accounts = self._accounts()
        used = task if accounts is None else accounts.task
        self.algorithm.check(used, clients)
        up = sample_update(self.algorithm, used, self.algorithm.init_server(used, clients), roster, classes)
        self.pool = NodePool(deployment, run, roster, exchange, used, up)
        self.loop = Loop(
            self.algorithm, used, self.pool, clients, config.schedule, privacy=accounts, robust=config.robust_rule
        )
        self.checkpoints = Checkpoints(folder.path / "checkpoints", deployment.fingerprint())
        self.totals = {"bytes_down": 0, "bytes_up": 0, "seconds": 0.0}

    def _accounts(self) -> Accounts | None:
        config, seed, K = self.deployment.run, self.deployment.seed, len(self.roster.names)
        privacy, count = config.privacy, self.roster.counts[:, 0]
        if privacy is None:
            return None
        label = self.deployment.method
        privacy.check_method(label, self.algorithm, count)
        profile = privacy_profile(self.algorithm, count)
        if profile is None or profile.per_round is None:
            raise ConfigError(
                f"{label} has no largest number of gradients per round; what a client that does not answer was asked "
                "could not be counted. Bound its local steps, such as l_max"
            )
        if "needs validation" in self.algorithm.traits and not bool((self.roster.counts[:, 1] > 0).all()):
            raise ConfigError(f"{label} judges models on validation examples, and a client has none")
        for note in privacy.notes(label, self.algorithm, count):
            self.say(note)
        if self.deployment.scaling == STANDARD:
            self.say(f"{label}: not covered by epsilon: sums of features over each client's training examples")
        active = [config.schedule.active(seed, number, K) for number in range(1, self.deployment.rounds + 1)]
        calls = torch.bincount(torch.cat(active), minlength=K)
        return open_accounts(privacy, self.algorithm, self.plain, simulated(seed), count, calls)

    def execute(self) -> None:
        loop, label, seed = self.loop, self.deployment.method, self.deployment.seed
        found = self.checkpoints.latest(label)
        if found is not None:
            loop.load(found.round, found.tensors)
            self.totals = dict(found.extra["totals"])
            self.say(f"resumed after round {found.round}")
        self.folder.rewind(label, seed, loop.completed if found is not None else None)
        last = self.deployment.rounds
        evaluation = None
        while loop.completed < last:
            report = loop.round()
            for key in self.totals:
                self.totals[key] += getattr(report, key)
            every = self.deployment.eval_every
            due = report.round == last or (every > 0 and report.round % every == 0)
            evaluation = loop.evaluate() if due else None
            self._write_round(report, evaluation)
            self.folder.sync()
            self.checkpoints.save(label, report.round, loop.state(), {"totals": self.totals})
            if self.pool.short >= self.deployment.patience:
                raise TooFewClients(
                    f"{self.pool.short} rounds in a row had too few updates; the run stops after round {report.round}. "
                    "Start it again (flwr run) when clients are back, and it goes on from there"
                )
        if evaluation is None:
            evaluation = loop.evaluate()
        self._write_end(evaluation)

    def _write_round(self, report: RoundReport, evaluation: Evaluation | None) -> None:
        figures = self.algorithm.figures(self.loop.server)
        plain = {name: _plain(v) for name, v in figures.items() if not isinstance(v, Tensor) or v.dim() == 0}
        personal = server_model = None
        if evaluation is not None:
            personal, server_model = (
                self._judge(evaluation.personal, evaluation),
                self._judge(evaluation.server_model, evaluation),
            )
            plain = {name: _plain(value) for name, value in figures.items()}
            if evaluation.figures and len(evaluation.ids) == len(self.roster.names):
                plain["clients"] = {name: value.tolist() for name, value in evaluation.figures.items()}
            if self.loop.privacy is not None:
                plain["privacy"] = self.loop.privacy.figures()
        self.folder.append_round({
            "algorithm": self.deployment.method, "seed": self.deployment.seed, "round": report.round,
            "seconds": report.seconds, "active": report.active, "dropped": report.dropped,
            "bytes_down": report.bytes_down, "bytes_up": report.bytes_up, "personal": personal, "server": server_model,
            "method": plain,
        })  # fmt: skip
        accuracy = f"; personal accuracy {100 * personal['accuracy']:.2f} %" if personal else ""
        self.say(
            f"round {report.round} of {self.deployment.rounds}: {report.active - report.dropped} of {report.active} "
            f"updates in {report.seconds:.1f} s{accuracy}"
        )

    def _judge(self, score: Score | None, evaluation: Evaluation) -> Metrics | None:
        if score is None:
            return None
        n_train = self.roster.counts[evaluation.ids, 0]
        return summarize(score.correct if self.plain.classifies else None, score.loss, score.count, n_train)

    def _write_end(self, evaluation: Evaluation) -> None:
        label, seed, privacy = self.deployment.method, self.deployment.seed, self.loop.privacy
        spent = None if privacy is None else privacy.summary(self.roster.names)
        rows = []
        for position, k in enumerate(evaluation.ids.tolist()):
            row: dict[str, Any] = {
                "algorithm": label, "seed": seed, "client": self.roster.names[k],
                "n_train": int(self.roster.counts[k, 0]), "n_test": int(self.roster.counts[k, 2]),
            }  # fmt: skip
            for kind, score in (("personal", evaluation.personal), ("server", evaluation.server_model)):
                n = 0 if score is None else int(score.count[position])
                row[f"{kind}_accuracy"] = float(score.correct[position]) / n if score is not None and n else None
                row[f"{kind}_loss"] = float(score.loss[position]) / n if score is not None and n else None
            if spent is not None:
                row["epsilon"] = spent["epsilon"][k]
            rows.append(row)
        self.folder.append_clients({name: [row[name] for row in rows] for name in rows[0]} if rows else {"client": []})
        result = {
            "algorithm": label, "seed": seed, "rounds": self.deployment.rounds, **self.totals,
            "personal": self._judge(evaluation.personal, evaluation) or {},
            "server": self._judge(evaluation.server_model, evaluation),
            "alternatives": {name: self._judge(s, evaluation) for name, s in evaluation.alternatives.items()},
            **({} if spent is None else {"privacy": spent}),
        }  # fmt: skip
        self.folder.write_summary({"results": [result]})
        absent = [name for k, name in enumerate(self.roster.names) if k not in evaluation.ids.tolist()]
        if absent:
            self.say(f"the last evaluation is without {', '.join(absent)}; their vaults hold an older model")
        self.say(f"done; results in {self.folder.path}, personal models in the vaults of the nodes")


def _begin(deployment: Deployment, exchange: Exchange, folder: RunFolder) -> tuple[str, Roster]:
    """All clients are there for the first time."""
    wanted, listed = deployment.num_clients, deployment.client_names

    def present() -> list[str]:
        there = exchange.present()
        return sorted(there if listed is None else there & set(listed))

    exchange.say(f"waiting for {wanted} clients" + (f": {', '.join(listed)}" if listed else ""))
    exchange.find(lambda: len(present()) >= wanted, deployment.wait)
    names = present()
    if len(names) < wanted:
        lacking = "" if listed is None else f"; missing: {', '.join(sorted(set(listed) - set(names)))}"
        troubles = "".join(f"; a node said: {trouble}" for trouble in exchange.troubles.values())
        raise TooFewClients(
            f"{len(names)} of {wanted} clients appeared within {deployment.wait:g} s "
            f"({', '.join(names) or 'none'}){lacking}{troubles}"
        )
    if len(names) > wanted:
        raise ConfigError(
            f"there are {len(names)} clients ({', '.join(names)}), and the configuration says {wanted}; set clients to "
            "how many there are, or to the names of those that take part"
        )
    roster = _roster(deployment, listed or names, exchange)
    if deployment.scaling == STANDARD:
        rows = {name: exchange.hellos[name].want("rows", int) for name in roster.names}
        mean, std = _together(deployment, exchange, roster, sum(rows.values()))
    else:
        mean, std = scale(deployment)
    made = Roster(**{**roster.__dict__, "mean": mean, "std": std})
    run = secrets.token_hex(8)
    _write(folder, run, made)
    return run, made


def _roster(deployment: Deployment, names: list[str], exchange: Exchange) -> Roster:
    hellos = [exchange.hellos[name] for name in names]
    for key, what in (("shape", "shape of an example"), ("columns", "feature columns"), ("tokens", "kind of features")):
        for name, hello in zip(names, hellos, strict=True):
            ours, theirs = hellos[0].about.get(key), hello.about.get(key)
            if ours != theirs:
                raise DataError(
                    f"{names[0]} and {name} differ in the {what}: {_short(ours)} and {_short(theirs)}. Make the data "
                    "alike, or list the columns in their order in the setting features"
                )
    counts = torch.tensor([hello.want("counts", list) for hello in hellos], dtype=torch.int64)
    groups = [str(hello.about.get("group", "")) for hello in hellos]
    if any(groups) and not all(groups):
        raise ConfigError(f"{names[groups.index('')]} has no group, and others have; give every node one, or none")
    shape = tuple(int(side) for side in hellos[0].want("shape", list))
    return Roster(
        names, counts, shape, [str(column) for column in hellos[0].want("columns", list)],
        hellos[0].want("tokens", bool), groups if any(groups) else [],
    )  # fmt: skip


def _together(
    deployment: Deployment, exchange: Exchange, roster: Roster, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Mean and deviation of every feature over all clients' training rows, from two sums of each client."""
    if roster.tokens:
        return None, None

    def total(mean: Tensor | None) -> Tensor:
        groups = {} if mean is None else {"sums": {"mean": mean}}
        questions = {name: Packet({"kind": SUMS, "name": name}, groups) for name in roster.names}
        parts: dict[str, Tensor] = {}

        def take(name: str, answer: Packet) -> None:
            part = answer.group("sums").get("total")
            if part is None or tuple(part.shape) != roster.shape or not bool(torch.isfinite(part).all()):
                raise MessageError("no finite sum per feature")
            parts[name] = part.to(torch.float64)

        reasons = exchange.ask(SUMS, questions, deployment.wait, take)
        if reasons:
            name, why = next(iter(sorted(reasons.items())))
            raise TooFewClients(f"the common scaling needs every client, and {name} did not answer: {why}")
        return torch.stack([parts[name] for name in roster.names]).sum(0)

    mean = total(None) / max(rows, 1)
    return mean.to(torch.float32), spread(mean, total(mean), rows).to(torch.float32)


def _known(folder: RunFolder) -> tuple[str, Roster] | None:
    path = folder.path / "deployment.json"
    if not path.exists():
        return None
    found = storage.read_json(path)
    mean, std = (None if found[name] is None else torch.tensor(found[name]) for name in ("mean", "std"))
    counts = torch.tensor(found["counts"], dtype=torch.int64)
    roster = Roster(
        found["names"], counts, tuple(found["shape"]), found["columns"], found["tokens"], found["groups"], mean, std
    )
    return found["run"], roster


def _write(folder: RunFolder, run: str, roster: Roster) -> None:
    plain = {name: _plain(value) for name, value in roster.__dict__.items()}
    storage.write_json(folder.path / "deployment.json", {"run": run, **plain})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
