"""A run: several methods on the same clients, batches and starts, over several seeds, with a journal on disk.

    result = kinfed.run(algorithms="local,fedavg,ditto", rounds=30, out="runs/first")
    result.personal_model("3", "ditto")          a ready nn.Module

Per seed the federation, the starting model and the sampling are made once and shared by all methods.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from kinfed.algorithms import make_algorithm
from kinfed.algorithms.base import Algorithm
from kinfed.data.augment import augmentation
from kinfed.data.describe import describe
from kinfed.data.federation import SPLITS, Federation, fingerprint
from kinfed.engine.models import build_model
from kinfed.engine.task import ModuleTask, Task, make_task
from kinfed.errors import ConfigError, KinfedError
from kinfed.pools.base import Pool
from kinfed.pools.local_pool import LocalPool
from kinfed.privacy.budget import open_accounts
from kinfed.privacy.ledger import Ledger
from kinfed.privacy.noise import simulated
from kinfed.runs.build import build_federation
from kinfed.runs.checkpoint import Checkpoints
from kinfed.runs.config import RunConfig, make_config
from kinfed.runs.export import save_layout
from kinfed.runs.folder import RunFolder
from kinfed.runs.results import MethodResult, Metrics, RunResult, client_rows, judge, judge_alternatives
from kinfed.server.loop import Loop, RoundReport, Schedule, check_robust

if TYPE_CHECKING:
    from kinfed.pools.ray_pool import RayCluster

CHECKPOINT_SECONDS = 20.0  # what a killed run loses at most, or a round; states of many clients take long to write


class Observer(Protocol):
    """Hears what a run does; the command line draws its display with one."""

    def started(self, label: str, seed: int, first: int, rounds: int) -> None: ...
    def round(self, label: str, seed: int, report: RoundReport, personal: Metrics | None) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def started(self, label: str, seed: int, first: int, rounds: int) -> None:
        pass

    def round(self, label: str, seed: int, report: RoundReport, personal: Metrics | None) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Interrupted(KinfedError):
    """A run was asked to stop; its last finished round is on disk."""


def run(
    config: RunConfig | Path | str | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    federation: Federation | None = None,
    model: str | Mapping[str, Any] | Callable[[], nn.Module] | None = None,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> RunResult:
    """Run a configuration (a RunConfig, a TOML file, or settings by name).

    `federation` replaces the data set and its partition; `model` is a name, with options
    {"name": ..., ...}, or a function that makes an nn.Module.
    With `out` the run writes its folder and can be resumed; without, everything stays in memory."""
    build = None if isinstance(model, str | Mapping) else model
    if isinstance(model, str | Mapping):
        settings["model"] = model
    if isinstance(config, RunConfig):
        if settings:
            raise ConfigError("give either a RunConfig or settings by name, not both")
    else:
        config = make_config(None if config is None else Path(config), settings)
    experiment = Experiment(config, federation, build, observer or Silent(), should_stop)
    with closing(experiment):
        if out is None:
            return experiment.execute(None, None)
        identity = experiment.fingerprint()
        experiment.check()  # before a folder exists: a refused configuration leaves nothing behind
        with RunFolder.open(out, config.dump(), identity, resume=resume) as folder:
            return experiment.execute(folder, Checkpoints(folder.path / "checkpoints", identity))


def read_config(folder: Path) -> RunConfig:
    """The configuration that a run folder holds."""
    found: dict[str, Any] = RunFolder(folder).config()["config"]
    return make_config(None, found)


class Experiment:
    """All methods and seeds of one configuration."""

    def __init__(
        self,
        config: RunConfig,
        federation: Federation | None,
        model: Callable[[], nn.Module] | None,
        observer: Observer,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.observer = observer
        self.should_stop = should_stop
        self._given = federation
        self._model = model
        self._data: dict[int, Federation] = {}
        self._task: ModuleTask | None = None
        self._cluster: RayCluster | None = None
        self._asked = Ledger()  # of clients' data, before the methods of a seed begin
        self._starts: dict[int, tuple[Tensor | None, Ledger]] = {}  # common start of a seed, and what it asked
        self.algorithms = {
            label: make_algorithm(
                options["method"], config.training, {k: v for k, v in options.items() if k != "method"}
            )
            for label, options in config.algorithms.items()
        }

    def fingerprint(self) -> str:
        extra: dict[str, Any] = {}
        if self._given is not None:
            extra["federation"] = _identity(self._given)
        if self._model is not None:
            extra["model"] = [[layer.name, list(layer.shape)] for layer in self.task().slots]
        return self.config.fingerprint(extra)

    def federation(self, seed: int) -> Federation:
        if seed not in self._data:
            made = build_federation(self.config, seed) if self._given is None else self._given
            share = self.config.validation
            if share == "auto":
                share = 0.2 if any(a.needs_validation for a in self.algorithms.values()) else 0.0
            if share and not int(made.val.count.sum()):
                made = made.with_validation(share, seed)
            if self.config.foreign_targets:
                made = made.with_foreign_targets(seed)
            self._data[seed] = made
        return self._data[seed]

    def task(self) -> ModuleTask:
        if self._task is not None:
            return self._task
        data = self.federation(self.config.seeds[0])
        shape, classes, chosen = data.features.shape, data.num_classes, self.config.model
        build = self._model or (lambda: build_model(chosen.name, shape, classes, chosen.options))
        self._task = make_task(build, path=self.config.backend, device=check_device(self.config.device))
        return self._task

    def check(self) -> None:
        """Refuse the last method's settings before the first one runs."""
        task, rule = self.task(), self.config.robust_rule
        for seed in self.config.seeds:
            clients = self.federation(seed).population(seed, self.config.participation)
            for algorithm in self.algorithms.values():
                algorithm.check(task, clients)
                if rule is not None:
                    check_robust(rule, algorithm, self.config.schedule.size(clients.num_clients))
                if algorithm.training.augment is not None:
                    augmentation(algorithm.training.augment, self.federation(seed).features.shape)
        self._check_privacy()

    def _check_privacy(self) -> None:
        if self.config.privacy is None:
            return
        import kinfed.privacy.epsilon  # noqa: F401  (says what to install where it is missing)

        for seed in self.config.seeds:
            for label, algorithm in self.algorithms.items():
                self.config.privacy.check(label, algorithm, self.federation(seed))

    def execute(self, folder: RunFolder | None, checkpoints: Checkpoints | None) -> RunResult:
        config = self.config
        task = self.task()
        done: list[MethodResult] = []
        self._check_privacy()
        if folder is not None:
            save_layout(folder.path, config.model.name, task)
        for seed in config.seeds:
            data = self.federation(seed)
            for note in data.notes if seed == config.seeds[0] else []:  # other seeds say the same in other numbers
                self.observer.note(note)
            if config.privacy is not None and seed == config.seeds[0]:
                for label, algorithm in self.algorithms.items():
                    for note in config.privacy.notes(label, algorithm, data.train.count):
                        self.observer.note(note)
            if folder is not None:
                folder.write_federation(seed, describe(data).to_json())
            task.start, self._asked = self._common_start(task, data, seed, checkpoints)
            for label, algorithm in self.algorithms.items():
                done.append(self._method(label, algorithm, task, data, seed, folder, checkpoints))
                if folder is not None:
                    self._write(folder, done)
        result = RunResult(config, done, self._data, task, None if folder is None else folder.path)
        if folder is not None:
            folder.write_summary({"results": [r.summary() for r in done]})
        return result

    def begin(self, algorithm: Algorithm[Any, Any, Any, Any], seed: int) -> Loop:
        """A method before its first round, on the data, the common start and the schedule of this configuration."""
        task, data, warm = self.task(), self.federation(seed), self.config.warm_start
        if seed not in self._starts:
            self._starts[seed] = self._common_start(task, data, seed, None)
        task.start, self._asked = self._starts[seed]
        return self._loop(algorithm, task, data, seed, range(warm + 1, warm + self.config.rounds + 1))

    def _loop(self, algorithm: Algorithm[Any, Any, Any, Any], task: Task, data: Federation, seed: int, rounds: range,
              folder: RunFolder | None = None) -> Loop:  # fmt: skip
        states = folder.path / "states" if folder is not None and self.config.state == "disk" else None
        data, clients = algorithm.exchange(data, data.population(seed, self.config.participation))
        accounts, schedule = None, self.config.schedule
        if self.config.privacy is not None:
            active = [schedule.active(seed, number, data.num_clients) for number in rounds]
            calls = torch.bincount(torch.cat(active), minlength=data.num_clients)
            accounts = open_accounts(
                self.config.privacy, algorithm, task, simulated(seed), data.train.count, calls, self._asked
            )
            task = accounts.task
        pool: Pool
        if self.config.pool == "ray":
            pool = self._ray().pool(algorithm, task, data, seed)
        else:
            pool = LocalPool(algorithm, task, data, seed, workers=self.config.workers, state_folder=states)
        return Loop(
            algorithm, task, pool, clients, schedule, first_round=rounds.start, privacy=accounts,
            robust=self.config.robust_rule, largest_norm=self.config.largest_norm,
        )  # fmt: skip

    def _ray(self) -> RayCluster:
        """Workers for all methods and seeds, from the first one that needs them."""
        if self._cluster is None:
            from kinfed.pools.ray_pool import RayCluster

            self._cluster = RayCluster(self.config.ray_address, self.config.workers)
        return self._cluster

    def close(self) -> None:
        """End the workers in other processes, if there are any."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _common_start(
        self, task: ModuleTask, data: Federation, seed: int, checkpoints: Checkpoints | None
    ) -> tuple[Tensor | None, Ledger]:
        """Where all methods of a seed begin, and what it asked of the clients: pre-trained, then warmed up; None is
        the model's own random start."""
        task.start, self._asked = None, Ledger()
        if self.config.pretrain:
            task.start = self._pretrained(task, data, seed, checkpoints)
        if self.config.warm_start:
            return self._warm_start(task, data, seed, checkpoints)
        return task.start, Ledger()

    def _pretrained(self, task: ModuleTask, data: Federation, seed: int, checkpoints: Checkpoints | None) -> Tensor:
        """The model after some rounds on the training data of all clients in one place."""
        label, rounds = f"pretrained-{seed}", self.config.pretrain
        found = checkpoints.latest(label) if checkpoints is not None else None
        if found is not None:
            return found.tensors["w"].to(task.device)
        algorithm, pooled = make_algorithm("fedavg", self.config.training, {}), data.pooled()
        pool = LocalPool(algorithm, task, pooled, seed, workers=self.config.workers)
        loop = Loop(algorithm, task, pool, pooled.population(seed), Schedule(1.0))
        self.observer.started("pre-training", seed, 0, rounds)
        with closing(pool):
            while loop.completed < rounds:
                self.observer.round("pre-training", seed, loop.round(), None)
                self._stop_if_asked()
        w = algorithm.global_model(loop.server)
        assert w is not None
        if checkpoints is not None:
            checkpoints.save(label, rounds, {"w": w}, {})
        return w

    def _warm_start(
        self, task: ModuleTask, data: Federation, seed: int, checkpoints: Checkpoints | None
    ) -> tuple[Tensor, Ledger]:
        """The model after some rounds of FedAvg, the common start of all methods of the seed; and what it cost."""
        label = f"warm-start-{seed}"
        found = checkpoints.latest(label) if checkpoints is not None else None
        if found is not None:
            asked = Ledger() if self.config.privacy is None else Ledger.load(found.tensors)
            return found.tensors["w"].to(task.device), asked
        strict = self.config.privacy is not None and self.config.privacy.strict
        algorithm = make_algorithm("fedavg", self.config.training, {"weights": "equal"} if strict else {})
        loop = self._loop(algorithm, task, data, seed, range(1, self.config.warm_start + 1))
        self.observer.started("warm start", seed, 0, self.config.warm_start)
        while loop.completed < self.config.warm_start:
            self.observer.round("warm start", seed, loop.round(), None)
            self._stop_if_asked()
        loop.pool.close()
        w = loop.algorithm.global_model(loop.server)
        assert w is not None
        asked = Ledger() if loop.privacy is None else loop.privacy.ledger
        if checkpoints is not None:
            checkpoints.save(label, self.config.warm_start, {"w": w} | asked.named(), {})
        return w, asked

    def _method(
        self,
        label: str,
        algorithm: Algorithm[Any, Any, Any, Any],
        task: ModuleTask,
        data: Federation,
        seed: int,
        folder: RunFolder | None,
        checkpoints: Checkpoints | None,
    ) -> MethodResult:
        config, name = self.config, f"{label}-{seed}"
        last = config.warm_start + config.rounds
        loop = self._loop(algorithm, task, data, seed, range(config.warm_start + 1, last + 1), folder)
        if loop.privacy is not None and config.dp_epsilon is not None:
            self.observer.note(f"{label} seed {seed}: noise {loop.privacy.noise:.4g} for epsilon {config.dp_epsilon:g}")
        totals = {"bytes_down": 0, "bytes_up": 0, "seconds": 0.0}
        snapshot = checkpoints.latest(name) if checkpoints is not None else None
        if snapshot is not None:
            loop.load(snapshot.round, snapshot.tensors)
            totals = dict(snapshot.extra["totals"])
        if folder is not None:
            folder.rewind(label, seed, loop.completed)
        self.observer.started(label, seed, loop.completed - config.warm_start, config.rounds)
        saved = time.monotonic()
        try:
            while loop.completed < last:
                report = loop.round()
                totals["bytes_down"] += report.bytes_down
                totals["bytes_up"] += report.bytes_up
                totals["seconds"] += report.seconds
                personal = self._after_round(label, loop, report, last, data, folder)
                self.observer.round(label, seed, report, personal)
                due = report.round == last or self._checkpoint_due(report.round, time.monotonic() - saved)
                if checkpoints is not None and folder is not None and (due or self.should_stop()):
                    folder.sync()
                    checkpoints.save(name, report.round, loop.state(), {"totals": totals})
                    saved = time.monotonic()
                self._stop_if_asked()
            evaluation = loop.evaluate(keep_models=config.save_models)
        finally:
            loop.pool.close()
        personal, server_model = judge(evaluation, data, task)
        w = algorithm.global_model(loop.server)
        if folder is not None and evaluation.models is not None:
            folder.write_models(label, seed, evaluation.models, w)
        return MethodResult(
            label, seed, config.rounds, personal, server_model, int(totals["bytes_down"]), int(totals["bytes_up"]),
            float(totals["seconds"]), evaluation, w, judge_alternatives(evaluation, data, task),
            None if loop.privacy is None else loop.privacy.summary(data.names),
        )  # fmt: skip

    def _checkpoint_due(self, round: int, seconds: float) -> bool:
        """So many seconds after the last one."""
        every = self.config.checkpoint_every
        return seconds >= CHECKPOINT_SECONDS if every is None else round % every == 0

    def _after_round(
        self, label: str, loop: Loop, report: RoundReport, last: int, data: Federation, folder: RunFolder | None
    ) -> Metrics | None:
        """Evaluate where due, and write the round's line."""
        every = self.config.eval_every
        due = report.round == last or (every > 0 and report.round % every == 0)
        personal = server_model = None
        figures = loop.algorithm.server_figures(loop.server)
        method: dict[str, Any] = {k: v for k, v in figures.items() if not isinstance(v, Tensor) or v.dim() == 0}
        if due:
            evaluation = loop.evaluate()
            personal, server_model = judge(evaluation, data, loop.task)
            method = figures | ({"clients": evaluation.figures} if evaluation.figures else {})
            headline = "accuracy" if loop.task.classifies else "loss"
            for name, metrics in judge_alternatives(evaluation, data, loop.task).items():
                method |= {f"{name}_{headline}": metrics[headline]} if headline in metrics else {}
            if loop.privacy is not None:
                method["privacy"] = loop.privacy.figures()
        if folder is not None:
            folder.append_round({
                "algorithm": label, "seed": loop.clients.seed, "round": report.round, "seconds": report.seconds,
                "active": report.active, "dropped": report.dropped, "bytes_down": report.bytes_down,
                "bytes_up": report.bytes_up, "personal": personal, "server": server_model, "method": _plain(method),
            })  # fmt: skip
        if report.rejected:
            finite = [k for k in report.rejected if k in report.reasons]
            for k in finite[:5]:
                self.observer.note(f"{label}, round {report.round}: dropped {data.names[k]}: {report.reasons[k]}")
            if other := [k for k in report.rejected if k not in report.reasons]:
                who = ", ".join(data.names[k] for k in other[:5])
                self.observer.note(
                    f"{label}, round {report.round}: dropped {len(other)} update(s) with NaN or infinity, of {who}"
                )
        if report.note:
            self.observer.note(f"{label}, round {report.round}: {report.note}")
        return personal

    def _stop_if_asked(self) -> None:
        if self.should_stop():
            raise Interrupted("stopped as asked; the last finished round is saved")

    def _write(self, folder: RunFolder, done: list[MethodResult]) -> None:
        rows = []
        for r in done:
            data = self._data[r.seed]
            rows += client_rows(r, data)
        folder.write_clients(rows)


def _identity(federation: Federation) -> str:
    """A fingerprint of given data: its arrays, and who owns which rows of them."""
    digest = hashlib.sha256(fingerprint(federation.features, federation.labels).encode())
    for name in SPLITS:
        ragged = federation.split(name)
        for tensor in (ragged.offsets, ragged.rows):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_device(name: str) -> torch.device:
    """The torch device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} is not available here ({first}); use --device cpu") from error
    return device


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
