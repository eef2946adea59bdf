"""A run: several algorithms on the same clients, batches and starts, over several seeds, with a journal on disk.

    result = kinfed.run(algorithms="local,fedavg,ditto", rounds=30, out="runs/first")
    result.personal_model("3", "ditto").predict(rows)

Per seed the federation, the starting model and the sampling are made once and shared by all algorithms.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.algorithms import make_algorithm, prepare_data
from kinfed.algorithms.averaging import COUNT
from kinfed.algorithms.base import AnyAlgorithm, check_algorithm_settings
from kinfed.data.augment import augmentation
from kinfed.data.describe import describe
from kinfed.data.description import Description
from kinfed.data.features import Features, features_digest
from kinfed.data.federation import Federation, Population
from kinfed.engine.frozen_prefix import FrozenPrefix, frozen_prefix
from kinfed.engine.models import Builder
from kinfed.engine.task import ModuleTask, Task, would_compile
from kinfed.errors import ConfigError, KinfedError
from kinfed.pools.base import Pool
from kinfed.pools.local_pool import LocalPool
from kinfed.pools.memory import physical_memory
from kinfed.privacy.budget import make_budget
from kinfed.privacy.ledger import Ledger
from kinfed.privacy.noise import seeded_noise
from kinfed.privacy.policy import check_statistics
from kinfed.privacy.secure_sum import SecureSum
from kinfed.privacy.user_level import UserLevel, update_template
from kinfed.runs.algorithm_choice import METHOD, OPTIONAL, split_choice
from kinfed.runs.build import build_federation, build_task, example_batch, local_examples
from kinfed.runs.checkpoint import Checkpoints
from kinfed.runs.config import RunConfig, make_config
from kinfed.runs.export import save_layout
from kinfed.runs.folder import RunFolder
from kinfed.runs.method_run import Interrupted, MethodRun
from kinfed.runs.observer import NullObserver, Observer
from kinfed.runs.results import ClientTable, MethodResult, RunResult
from kinfed.runs.run_files import RunFiles
from kinfed.server.loop import Loop
from kinfed.server.robust import check_robust
from kinfed.server.schedule import Schedule

if TYPE_CHECKING:
    from kinfed.pools.ray_pool import RayCluster


FEW_CALLS = 5  # calls of a client in a run on average, below which a note says so


@dataclass(frozen=True)
class CommonStart:
    """Where all algorithms of a seed begin."""

    model: Tensor | None = None  # [P]; None: the module's own random start
    ledger: Ledger = field(default_factory=Ledger)  # what it has asked of clients' data


MISSING_NUMBA = (
    "numba is not installed: this long run of a dense network trains by torch (backend stacked) in place of compiled "
    "loops (fused), which takes longer; pip install 'kinfed[fast]'"
)


def run(
    config: RunConfig | Path | str | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    federation: Federation | None = None,
    model: str | Mapping[str, Any] | Builder | None = None,
    observer: Observer | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> RunResult:
    """Run a configuration (a RunConfig, a TOML file, or settings by name).

    `federation` replaces the data set and its partition; `model` is a name, with options
    {"name": ..., ...}, or a function that makes an nn.Module: without arguments, or from the shape of an example and
    the number of classes.
    With `out` the run writes its folder and can be resumed; without, everything stays in memory."""
    build = None if isinstance(model, str | Mapping) else model
    if isinstance(model, str | Mapping):
        settings["model"] = model
    if isinstance(config, RunConfig):
        if settings:
            raise ConfigError("give either a RunConfig or settings by name, not both")
    else:
        config = make_config(None if config is None else Path(config), settings)
    experiment = Experiment(config, federation, build, observer or NullObserver(), should_stop)
    with closing(experiment):
        if out is None:
            return experiment.execute(None)
        contents = experiment.contents()
        experiment.check()  # before a folder exists: a refused configuration leaves nothing behind
        identity = experiment.config.fingerprint(contents)
        settings = experiment.config.dump()
        with RunFolder.open(out, settings, identity, contents=contents, resume=resume) as folder:
            if folder.version_change:
                experiment.observer.note(folder.version_change)
            return experiment.execute(folder)


def read_config(folder: Path) -> RunConfig:
    """The configuration that a run folder holds."""
    return RunFiles(folder).config


class Experiment:
    """All methods and seeds of one configuration."""

    def __init__(
        self,
        config: RunConfig,
        federation: Federation | None,
        model: Builder | None,
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
        self._prefix: tuple[FrozenPrefix | None] | None = None  # once it was looked for
        self._activations: dict[str, tuple[ModuleTask, Features]] = {}  # by the examples that they are of
        self._cluster: RayCluster | None = None
        self._starts: dict[int, CommonStart] = {}
        self._evaluated: dict[int, Tensor] = {}
        self.left_out: dict[str, str] = {}  # of "all", what cannot run here, and why
        self.algorithms = self._make_algorithms()
        if any(choice.get(OPTIONAL) for choice in config.algorithms.values()):
            self._leave_out_what_cannot_run()

    def _make_algorithms(self) -> dict[str, AnyAlgorithm]:
        algorithms = {}
        for label, choice in self.config.algorithms.items():
            name, options, is_optional = split_choice(choice)
            try:
                algorithms[label] = make_algorithm(name, self.config.training, options)
            except ConfigError as error:
                if not is_optional:
                    raise
                self.left_out[label] = str(error)
        return algorithms

    def _leave_out_what_cannot_run(self) -> None:
        """The configuration without what "all" names and this model, these data or settings do not admit."""
        self.task()  # what is wrong with data and model is no algorithm's fault
        share = self._validation_share()
        for label, choice in self.config.algorithms.items():
            if choice.get(OPTIONAL) and label in self.algorithms:
                try:
                    self._check_algorithm(label)
                except KinfedError as error:
                    self.left_out[label] = str(error)
                    del self.algorithms[label]
        if not self.algorithms:
            first, reason = next(iter(self.left_out.items()))
            raise ConfigError(f"no algorithm can run with these settings; {first}: {reason}")
        if self._validation_share() != share:
            self._data.clear()
        chosen = {label: split_choice(self.config.algorithms[label]) for label in self.algorithms}
        algorithms = {label: {METHOD: name, **options} for label, (name, options, _) in chosen.items()}
        self.config = self.config.model_copy(update={"algorithms": algorithms})

    def contents(self) -> dict[str, str]:
        """What decides results and is not written in the configuration, as digests by a name that a reader understands:
        a run is resumed only where all are equal. Whatever else comes from outside joins here."""
        contents = {f"data of seed {seed}": self.federation(seed).digest() for seed in self.config.seeds}
        if self._model is not None:
            contents["model"] = _digest(_outline(self.task()))
        if digest := self.task().constants_digest():
            contents["frozen weights"] = digest
        if self.task().backend == "fused":
            contents["backend (fused needs numba)"] = "fused"
        for label, algorithm in self.algorithms.items():
            if (source := _foreign_source(type(algorithm))) is not None:
                contents[f"code of {label}"] = _digest(source)
        return contents

    def federation(self, seed: int) -> Federation:
        if seed not in self._data:
            made = build_federation(self.config, seed) if self._given is None else self._given
            share = self._validation_share()
            if share and not int(made.val.count.sum()):
                made = made.with_validation(share, seed)
            if (public := self._public_share()) and made.public is None:
                made = made.with_public(public, seed)
            if self.config.foreign_targets:
                made = made.with_foreign_targets(seed)
            self._data[seed] = made
        return self._data[seed]

    def _validation_share(self) -> float:
        if self.config.validation != "auto":
            return self.config.validation
        return 0.2 if any("needs validation" in a.traits for a in self.algorithms.values()) else 0.0

    def _public_share(self) -> float:
        if self.config.public != "auto":
            return self.config.public
        return 0.1 if any("needs public data" in a.traits for a in self.algorithms.values()) else 0.0

    def task(self) -> ModuleTask:
        if self._task is not None:
            return self._task
        data = self.federation(self.config.seeds[0])
        self._task = build_task(
            self.config, data.features.shape, data.problem, build=self._model,
            device=check_device(self.config.device), example=example_batch(data),
            examples=local_examples(self.config, data),
        )  # fmt: skip
        return self._task

    def training_parts(self, seed: int, algorithm: AnyAlgorithm) -> tuple[ModuleTask, Federation]:
        """What an algorithm trains, and on what. Where the model is frozen below everything that trains, these are the
        part above and activations in the place of examples: the same results, without computing them in every step."""
        task, data = self.task(), self.federation(seed)
        if not self.config.cache or algorithm.training.augment is not None:
            return task, data
        if self._prefix is None:
            self._prefix = (frozen_prefix(task, example_batch(data)),)
        prefix = self._prefix[0]
        if prefix is None:
            return task, data
        key = features_digest(data.features)
        if key not in self._activations:
            activations = prefix.activations(data.features)
            above = prefix.upper_task(activations, backend=self.config.backend, batch=self.config.batch)
            self._activations[key] = above, activations
        above, activations = self._activations[key]
        return above, replace(data, features=activations)

    def check(self) -> None:
        """Refuse the last method's settings before the first one runs."""
        for label in self.algorithms:
            self._check_algorithm(label)
        self._check_models_fit()

    def _check_models_fit(self) -> None:
        """Personal models of all evaluated clients are in memory at once when they are saved."""
        ids, memory = self.evaluated(self.config.seeds[0]), physical_memory()
        clients = self.federation(self.config.seeds[0]).num_clients if ids is None else len(ids)
        size = 4 * clients * self.task().num_params
        if self.config.save_models and memory is not None and size > memory:
            raise ConfigError(
                f"personal models of {clients:,} clients take {size / 1e9:.0f} GB and this machine has "
                f"{memory / 1e9:.0f}; give --eval-clients N, a sample whose models are kept, or --no-save-models"
            )

    def _check_algorithm(self, label: str) -> None:
        algorithm, rule = self.algorithms[label], self.config.robust_rule
        for seed in self.config.seeds:
            clients = self.federation(seed).population(seed, self.config.participation)
            check_algorithm_settings(algorithm, self.task(), clients)
            if rule is not None:
                check_robust(rule, algorithm, self.config.schedule.size(clients.num_clients))
            if algorithm.training.augment is not None:
                augmentation(algorithm.training.augment, self.federation(seed).features.shape)
            self._secure_sum(label, algorithm, self.task(), self.federation(seed), clients)
        self._check_privacy(label)

    def _check_privacy(self, label: str) -> None:
        privacy, user_privacy = self.config.privacy, self.config.user_privacy
        if privacy is None and user_privacy is None:
            return
        import kinfed.privacy.epsilon  # noqa: F401  (says what to install where it is missing)

        for seed in self.config.seeds:
            check_statistics(self.federation(seed))
        algorithm = self.algorithms[label]
        if user_privacy is not None:
            user_privacy.check(label, algorithm, self.task())
        if privacy is not None:
            for seed in self.config.seeds:
                privacy.check(label, algorithm, self.federation(seed))

    def execute(self, folder: RunFolder | None) -> RunResult:
        """Run everything; what the folder holds already is taken up where it ends."""
        results: list[MethodResult] = []
        for label in self.algorithms:
            self._check_privacy(label)
        own = None if self._model is None else type(self.task().module).__name__
        if folder is not None:
            save_layout(folder.path, own or self.config.model.name, self.task())
        self._write_notes()
        for seed in self.config.seeds:
            if folder is not None:
                folder.write_federation(seed, self._description(seed).to_json())
            self._starts[seed] = self._common_start(seed, None if folder is None else folder.checkpoints)
            for label in self.algorithms:
                results.append(self._run_method(label, seed, folder))
        if folder is not None:
            folder.write_summary({"results": [result.summary() for result in results]})
        return RunResult(self.config, results, self._data, self.task(), None if folder is None else folder.path, own)

    def evaluated(self, seed: int) -> Tensor | None:
        """[n] ids of the clients that are evaluated, where these are not all."""
        data, count = self.federation(seed), self.config.eval_clients
        if count is None or count >= data.num_clients:
            return None
        if seed not in self._evaluated:
            rounds = range(self.config.warm_start + 1, self.config.warm_start + self.config.rounds + 1)
            self._evaluated[seed] = self.config.schedule.evaluated(seed, rounds, data.num_clients, count)
        return self._evaluated[seed]

    def _description(self, seed: int) -> Description:
        """Who holds what, of the clients that are evaluated; a note where these are not all."""
        data, ids = self.federation(seed), self.evaluated(seed)
        description = describe(data, ids)
        return description if ids is None else replace(description, notes=[*data.notes, self._note_on_sample(seed)])

    def _note_on_sample(self, seed: int) -> str:
        ids, clients = self.evaluated(seed), self.federation(seed).num_clients
        if ids is None:
            return ""
        return (
            f"figures, clients.csv and saved models are of a fixed sample of {len(ids):,} of {clients:,} clients, "
            "drawn from those whom the rounds call (and from others where these are too few), the same for all methods"
        )

    def _write_notes(self) -> None:
        """What a reader should know about the data and their privacy; other seeds say the same in other numbers."""
        data, privacy = self.federation(self.config.seeds[0]), self.config.privacy
        user_privacy, sampling = self.config.user_privacy, self.config.schedule.client_sampling(data.num_clients)
        for note in (*self.left_out_notes(), *data.notes):
            self.observer.note(note)
        for note in (self._note_on_calls(data.num_clients), self._note_on_sample(self.config.seeds[0])):
            if note:
                self.observer.note(note)
        if self.config.backend == "auto" and would_compile(self.task(), local_examples(self.config, data)):
            self.observer.note(MISSING_NUMBA)
        if privacy is not None:
            for label, algorithm in self.algorithms.items():
                for note in privacy.notes(label, algorithm, data.train.count):
                    self.observer.note(note)
        if user_privacy is not None:
            for label, algorithm in self.algorithms.items():
                for note in user_privacy.notes(label, algorithm, data.num_clients, sampling):
                    self.observer.note(note)

    def left_out_notes(self) -> list[str]:
        return [f"{label} is left out: {reason}" for label, reason in self.left_out.items()]

    def _note_on_calls(self, num_clients: int) -> str:
        """That clients are called seldom, where they are."""
        config, size = self.config, self.config.schedule.size(num_clients)
        calls = size / num_clients * config.rounds * (1 - config.dropout)
        if calls >= FEW_CALLS:
            return ""
        never = num_clients * (1 - size / num_clients * (1 - config.dropout)) ** config.rounds
        outside = f", and about {never:.0f} of {num_clients} never" if never >= 0.5 else ""
        return (
            f"participation {config.participation:g} in {config.rounds} rounds calls a client {calls:.1f} times on "
            f"average{outside}; figures are of clients that took part. More rounds or a larger participation give "
            "clients more training of their own"
        )

    def _run_method(self, label: str, seed: int, folder: RunFolder | None) -> MethodResult:
        config = self.config
        states = folder.path / "states" if folder is not None and config.state != "memory" else None
        with self.make_loop(self.algorithms[label], seed, states) as loop:
            if loop.privacy is not None and config.dp_epsilon is not None:
                noise = f"noise {loop.privacy.noise:.4g} for epsilon {config.dp_epsilon:g}"
                self.observer.note(f"{label} seed {seed}: {noise}")
            if loop.user_level is not None and config.user_epsilon is not None and loop.algorithm.averages:
                noise = f"noise {loop.user_level.noise:.4g} for user-level epsilon {config.user_epsilon:g}"
                self.observer.note(f"{label} seed {seed}: {noise}")
            return MethodRun(
                label,
                loop,
                ClientTable.from_federation(self.federation(seed)),
                config.rounds,
                eval_every=config.eval_every,
                checkpoint_every=config.checkpoint_every,
                keep_models=config.save_models,
                folder=folder,
                observer=self.observer,
                should_stop=self.should_stop,
            ).execute()

    def make_loop(self, algorithm: AnyAlgorithm, seed: int, state_folder: Path | None = None) -> Loop:
        """An algorithm before its first round, on the data, the common start and the schedule of this configuration.
        Clients' states are kept in `state_folder` where there is one, otherwise in memory."""
        if seed not in self._starts:
            self._starts[seed] = self._common_start(seed, None)
        warm = self.config.warm_start
        rounds = range(warm + 1, warm + self.config.rounds + 1)
        return self._make_loop(algorithm, seed, rounds, self._starts[seed], state_folder)

    def _make_loop(
        self, algorithm: AnyAlgorithm, seed: int, rounds: range, start: CommonStart, state_folder: Path | None = None
    ) -> Loop:
        config, schedule = self.config, self.config.schedule
        whole, data = self.training_parts(seed, algorithm)
        data, population = prepare_data(algorithm, data, data.population(seed, config.participation))
        task: Task = whole.starting_at(start.model)
        user_level = self._user_level(algorithm, task, data, population, rounds)
        secure = self._secure_sum(type(algorithm).__name__, algorithm, task, data, population)
        budget = None
        if config.privacy is not None:
            active = [schedule.active(seed, number, data.num_clients) for number in rounds]
            calls = torch.bincount(torch.cat(active), minlength=data.num_clients)
            budget = make_budget(
                config.privacy, algorithm, task, seeded_noise(seed), data.train.count, calls, start.ledger
            )
            task = budget.task
        pool: Pool
        if config.pool == "ray":
            pool = self._ray().pool(algorithm, task, data, seed)
        else:
            pool = LocalPool(
                algorithm, task, data, seed, workers=config.workers, state_folder=state_folder,
                state_bytes=(physical_memory() or 0) // 4 if config.state == "auto" else 0,
                evaluated=self.evaluated(seed),
            )  # fmt: skip
        return Loop(
            algorithm, task, pool, population, schedule, first_round=rounds.start, privacy=budget,
            user_level=user_level, robust=config.robust_rule, largest_norm=config.largest_norm, secure=secure,
            evaluated=self.evaluated(seed),
        )  # fmt: skip

    def _user_level(
        self, algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population, rounds: range
    ) -> UserLevel | None:
        privacy, schedule, clients = self.config.user_privacy, self.config.schedule, data.num_clients
        if privacy is None:
            return None
        privacy.check(type(algorithm).__name__, algorithm, task)
        assert not isinstance(algorithm.averages, str)  # checked
        template = update_template(algorithm, task, data, algorithm.init_server(task, population))
        expected = schedule.expected_replies(clients, keeps_stragglers="keeps stragglers" in algorithm.traits)
        sampling = schedule.client_sampling(clients)
        # A warm start is over before the rounds of a method begin, and has the noise that is right for both together.
        last = self.config.warm_start + self.config.rounds
        return UserLevel(
            privacy, template, algorithm.averages, seeded_noise(population.seed), sampling, expected,
            range(rounds.start, last + 1), summands=clients if self.config.secure_sum else None,
        )  # fmt: skip

    def _secure_sum(
        self, label: str, algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population
    ) -> SecureSum | None:
        settings = self.config.secure
        if settings is None:
            return None
        settings.check_method(label, algorithm)
        assert not isinstance(algorithm.averages, str)  # checked
        update = update_template(algorithm, task, data, algorithm.init_server(task, population)).named()
        settings.check_update(label, algorithm, update, self.config.schedule.size(data.num_clients))
        total = int(data.train.count.sum()) if COUNT in update else data.num_clients
        return SecureSum(settings, algorithm.averages, total)

    def _ray(self) -> RayCluster:
        """Workers for all methods and seeds, from the first one that needs them."""
        if self._cluster is None:
            from kinfed.pools.ray_pool import RayCluster

            self._cluster = RayCluster(self.config.ray_address, self.config.workers, self.observer.note)
        return self._cluster

    def close(self) -> None:
        """End the workers in other processes, if there are any."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # ---- the common start ----

    def _common_start(self, seed: int, checkpoints: Checkpoints | None) -> CommonStart:
        """Pre-trained where that is asked for, then warmed up."""
        start = CommonStart()
        if self.config.pretrain:
            start = self._pretrained(seed, checkpoints)
        if self.config.warm_start:
            start = self._warm_start(seed, start, checkpoints)
        return start

    def _pretrained(self, seed: int, checkpoints: Checkpoints | None) -> CommonStart:
        """After some rounds on the training data of all clients in one place."""
        task, label, rounds = self.task(), f"pretrained-{seed}", self.config.pretrain
        snapshot = checkpoints.latest(label) if checkpoints is not None else None
        if snapshot is not None:
            return CommonStart(snapshot.tensors["w"].to(task.device))
        algorithm = make_algorithm("fedavg", self.config.training, {})
        task, data = self.training_parts(seed, algorithm)
        pooled = data.pooled()
        pool = LocalPool(algorithm, task, pooled, seed, workers=self.config.workers)
        with Loop(algorithm, task, pool, pooled.population(seed), Schedule(1.0)) as loop:
            w = self._server_model_after(rounds, loop, "pre-training")
        if checkpoints is not None:
            checkpoints.save(label, rounds, {"w": w}, {})
        return CommonStart(w)

    def _warm_start(self, seed: int, start: CommonStart, checkpoints: Checkpoints | None) -> CommonStart:
        """After some rounds of FedAvg, with what they cost."""
        label, rounds, privacy = f"warm-start-{seed}", self.config.warm_start, self.config.privacy
        snapshot = checkpoints.latest(label) if checkpoints is not None else None
        if snapshot is not None:
            ledger = Ledger() if privacy is None else Ledger.load(snapshot.tensors)
            return CommonStart(snapshot.tensors["w"].to(self.task().device), ledger)
        strict = privacy is not None and privacy.strict
        algorithm = make_algorithm("fedavg", self.config.training, {"weights": "equal"} if strict else {})
        with self._make_loop(algorithm, seed, range(1, rounds + 1), start) as loop:
            w = self._server_model_after(rounds, loop, "warm start")
            ledger = Ledger() if loop.privacy is None else loop.privacy.ledger
        if checkpoints is not None:
            checkpoints.save(label, rounds, {"w": w} | ledger.named(), {})
        return CommonStart(w, ledger)

    def _server_model_after(self, rounds: int, loop: Loop, label: str) -> Tensor:
        """[P]"""
        seed = loop.population.seed
        self.observer.started(label, seed, 0, rounds)
        for report in loop.rounds(rounds):
            self.observer.round(label, seed, report, None)
            if self.should_stop():
                raise Interrupted("stopped as asked; the last finished round is saved")
        models = loop.algorithm.server_models(loop.server)
        assert models is not None  # of FedAvg
        return models.models[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _outline(task: ModuleTask) -> str:
    """What of a user's model can be told apart: its row, and its layers with their settings (a rate of dropout, say),
    without the places in memory that some settings are printed with."""
    slots = [(slot.name, list(slot.shape)) for slot in task.slots]
    return f"{slots}\n{re.sub(r' at 0x[0-9a-fA-F]+', '', repr(task.module))}"


def _foreign_source(kind: type) -> str | None:
    """The source of an algorithm that is not kinfed's own (of which the version is written down); None where there is
    no file of it, as for a class typed in a shell."""
    if kind.__module__.partition(".")[0] == "kinfed":
        return None
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return None


def check_device(name: str) -> torch.device:
    """The torch device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} is not available here ({first}); use --device cpu") from error
    return device
