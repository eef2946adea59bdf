"""Inputs of a run: each seed's data, the model and the algorithms, made once and shared by all."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, Local, make_algorithm
from kinfed.config import Named, RunConfig, split_choice
from kinfed.core import option_types, plugins
from kinfed.data import (
    Features,
    Federation,
    Packing,
    Problem,
    Resplit,
    audited,
    example_weights,
    features_digest,
    findings,
    fold_of_federation,
    make_federation,
)
from kinfed.data.sources import PARTITIONS, SOURCES, Source, is_table, load_source, names_clients
from kinfed.engine import (
    LOSSES,
    METRICS,
    Architectures,
    Builder,
    FrozenPrefix,
    ModuleTask,
    frozen_prefix,
    make_objective,
    make_task,
    model_for,
    parse_patterns,
)
from kinfed.errors import ConfigError
from kinfed.records import FUSED_CONTENT

DEFAULT_CLIENTS = 20
DEFAULT_PARTITION = "dirichlet"
COLUMNS = (
    "client_column", "label_column", "group_column", "split_column", "weight_column", "time_column", "event_column",
    "person_column", "order_column", "columns", "encoding",
)  # fmt: skip


class RunInputs:
    """Data, model and algorithms of a configuration, made when they are first asked for.

    `federation` replaces the configuration's data set and `model` its network; `fold` is the number of the fold, where
    the run is a cross-validation. `left_out` says of the algorithms that "all" names which cannot run here, and why."""

    def __init__(
        self, config: RunConfig, federation: Federation | None = None, model: Builder | None = None, fold: int = 0
    ) -> None:
        if config.preset is not None:
            config.preset.check_model(is_own=model is not None)
        if federation is not None:
            _refuse_replaced(config, federation)
        self.config = config
        self.fold = fold
        self._own_federation = federation
        self._own_model = model
        self._federations: dict[int, Federation] = {}
        self._task: ModuleTask | Architectures | None = None
        self._prefix: tuple[FrozenPrefix | None] | None = None  # once it was looked for
        self._activations: dict[str, tuple[ModuleTask, Features]] = {}  # by the examples that they are of
        self._evaluated: dict[int, Tensor] = {}
        self.left_out: dict[str, str] = {}
        self.algorithms = self._make_algorithms()

    @property
    def order(self) -> list[str]:
        """Labels of the methods as they are run: training alone comes first, since the others are compared with
        it client by client as soon as they are done."""
        return sorted(self.algorithms, key=lambda label: not isinstance(self.algorithms[label], Local))

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

    def narrow(self, config: RunConfig) -> None:
        """Go on with fewer algorithms; data are made again where they now need no validation or public examples."""
        shares = self.validation_share(), self.public_share()
        self.config = config
        self.algorithms = {label: self.algorithms[label] for label in config.algorithms}
        if (self.validation_share(), self.public_share()) != shares:
            self._federations.clear()

    @property
    def fold_mark(self) -> str:
        """Suffix in names of a fold's checkpoints; "" without folds."""
        return "" if self.config.folds is None else f"-fold-{self.fold + 1}"

    @property
    def model_name(self) -> str:
        return self.config.model.name if self._own_model is None else type(self.task().module).__name__

    @property
    def own_model_name(self) -> str | None:
        """The class of a user's module; None for a model by name."""
        return None if self._own_model is None else self.model_name

    @property
    def federations(self) -> dict[int, Federation]:
        """Federations by seed, those made so far."""
        return self._federations

    def contents(self) -> dict[str, str]:
        """Digests of data, model and code that decide results beside the configuration, by names for readers. A run is
        resumed only where all are equal."""
        fold = "" if self.config.folds is None else f", fold {self.fold + 1}"
        contents = {f"data of seed {seed}{fold}": self.federation(seed).digest() for seed in self.config.seeds}
        if self._own_model is not None:
            contents["model"] = _digest(_outline(self.task()))
        if digest := self.models().constants_digest():
            contents["frozen weights"] = digest
        if self.task().backend == "fused":
            contents[FUSED_CONTENT] = "fused"
        loss = self.config.loss.partition(":")[0]
        if loss != "auto":
            function: Any = LOSSES[loss].target
            if code := plugins.class_digest(function if hasattr(function, "__qualname__") else type(function)):
                contents[f"code of loss {loss}"] = code
        for label, algorithm in self.algorithms.items():
            if (code := plugins.class_digest(type(algorithm))) is not None:
                contents[f"code of {label}"] = code
        return contents | self.config.code

    def federation(self, seed: int) -> Federation:
        if seed not in self._federations:
            data = self._split_federation(seed)
            if self.fold == 0:  # the others divide the same rows
                data = audited(data, self.config.accept)
            share = self.validation_share()
            if share and not int(data.val.count.sum()):
                by_label = self.config.stratify or self.config.folds is not None
                data = data.with_validation(share, seed, stratify=by_label)
            if (public := self.public_share()) and data.public is None:
                data = data.with_public(public, seed)
            if self.config.foreign_targets:
                data = data.with_foreign_targets(seed)
            if self.config.loss.partition(":")[0] == "partial_likelihood":  # which learns one risk for all times
                data = replace(data, problem=replace(data.problem, proportional=True))
            if self.config.class_weights != example_weights.NONE:
                data = data.with_class_weights(self.config.class_weights)
            self._federations[seed] = data
        return self._federations[seed]

    def _split_federation(self, seed: int) -> Federation:
        """Federation split into train and test."""
        if self._own_federation is None:
            return build_federation(self.config, seed, self.fold)
        if self.config.folds is None:
            return self._own_federation
        return fold_of_federation(self._own_federation, self.config.folds, self.fold, seed)

    def validation_share(self) -> float:
        """Share of training rows, where the data have no validation rows of their own."""
        return self._share(self.config.validation, 0.2, "needs validation")

    def public_share(self) -> float:
        """Share of training rows, where the data have no public rows of their own."""
        return self._share(self.config.public, 0.1, "needs public data")

    def _share(self, chosen: Any, usual: float, trait: str) -> float:
        if chosen != "auto":
            return float(chosen)
        return usual if any(trait in algorithm.traits for algorithm in self.algorithms.values()) else 0.0

    def task(self) -> ModuleTask:
        """The model of all clients; of several architectures the server's."""
        task = self.models()
        return task.server_task if isinstance(task, Architectures) else task

    def models(self) -> ModuleTask | Architectures:
        """The model of all clients, or the architectures that they have."""
        if self._task is None:
            data = self.federation(self.config.seeds[0])
            # Ray's workers move their copy to a GPU; the server computes here. There are no compiled loops for GPUs.
            on_workers = self.config.ray_gpus > 0
            if self.config.models and self._own_model is not None:
                raise ConfigError("models names the architectures of all clients; leave out the model that is given")
            self._task = build_models(
                self.config, data.features.shape, data.problem, build=self._own_model,
                device=check_device("cpu" if on_workers else self.config.device), example=example_batch(data),
                examples=0 if on_workers else local_examples(self.config, data), packing=data.features.packing,
            )  # fmt: skip
        return self._task

    def training_parts(self, seed: int, algorithm: AnyAlgorithm) -> tuple[ModuleTask, Federation]:
        """Task and data that an algorithm trains on. Where the model is frozen below everything that trains, these are
        the part above and activations in place of examples: the same results, without computing them in every step."""
        task, data = self.task(), self.federation(seed)
        if not self.config.cache or self.config.models or algorithm.training.augment is not None:
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

    def evaluated_ids(self, seed: int) -> Tensor:
        """[n] ids of all clients that are evaluated."""
        ids = self.evaluated(seed)
        return torch.arange(self.federation(seed).num_clients) if ids is None else ids

    def evaluated(self, seed: int) -> Tensor | None:
        """[n] ids of the clients that are evaluated, where these are not all."""
        data, count = self.federation(seed), self.config.eval_clients
        if count is None or count >= data.num_clients:
            return None
        if seed not in self._evaluated:
            rounds, schedule = self.config.round_numbers, self.config.schedule
            self._evaluated[seed] = schedule.evaluated(seed, rounds, data.num_clients, count)
        return self._evaluated[seed]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _outline(task: ModuleTask) -> str:
    """Description that tells users' models apart: its row, and its layers with their settings (a rate of dropout, say),
    without the places in memory that some settings are printed with."""
    slots = [(slot.name, list(slot.shape)) for slot in task.slots]
    return f"{slots}\n{re.sub(r' at 0x[0-9a-fA-F]+', '', repr(task.module))}"


def check_device(name: str) -> torch.device:
    """The torch device of that name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} is not available here ({first}); use --device cpu") from error
    return device


def build_federation(config: RunConfig, seed: int, fold: int = 0, save_partition: Path | None = None) -> Federation:
    """The clients of a run: a saved federation's folder, a user's table, or a named data set, shared out; with `folds`
    in that fold of its cross-validation. `save_partition` names a file for who holds which rows."""
    name = config.dataset.name
    if (Path(name) / "federation.json").is_file():
        _refuse(_columns(config), f"{name} is a saved federation")
        if save_partition is not None:
            raise ConfigError(f"{name} is a saved federation, whose data set is not known; a partition file needs it")
        saved = Federation.load(Path(name))
        return saved if config.folds is None else fold_of_federation(saved, config.folds, fold, seed)
    source = load_run_source(config, seed)
    partition = partition_name(config)
    clients = config.clients or (None if PARTITIONS[partition].facts.get("names_clients") else DEFAULT_CLIENTS)
    options = {} if config.partition is None else config.partition.options
    resplit = Resplit(config.folds, fold) if config.stratify or config.folds is not None else None
    audit = fold == 0 and config.accept != findings.EVERYTHING
    return make_federation(
        source, partition, clients, options, seed, resplit=resplit, audit=audit, save_partition=save_partition
    )


def load_run_source(config: RunConfig, seed: int) -> Source:
    """The data set of a run before it is shared out: a table with the columns that the configuration names, or one that
    goes by a name."""
    name, options, columns = config.dataset.name, dict(config.dataset.options), _columns(config)
    names_columns = name in SOURCES and "columns" in option_types(SOURCES[name].options)
    if is_table(name) or (names_columns and columns.keys() <= {"columns", "task"}):
        options |= columns
    else:
        _refuse(columns, f"it is for a table of your own, and {name!r} is not one")
    return load_source(name, config.data, seed, options)


def _columns(config: RunConfig) -> dict[str, Any]:
    """Settings about the columns of a table that are set."""
    columns = {column: getattr(config, column) for column in COLUMNS if getattr(config, column) is not None}
    return columns if config.task == "auto" else columns | {"task": config.task}


def partition_name(config: RunConfig) -> str:
    """The partition of a configuration: the one named, the data's own clients, or uneven shares of every class."""
    if config.partition is not None:
        return config.partition.name
    own = names_clients(config.dataset.name) or config.client_column or "client_column" in config.dataset.options
    return "column" if own else DEFAULT_PARTITION


def build_models(
    config: RunConfig, shape: tuple[int, ...], problem: Problem, *, build: Builder | None = None, **how: Any
) -> ModuleTask | Architectures:
    """The task of a configuration's model, or of all its architectures, as `build_task` makes one."""
    if not config.models:
        return build_task(config, shape, problem, build=build, **how)
    tasks = {name: build_task(config, shape, problem, model=one, **how) for name, one in config.architectures.items()}
    return Architectures(tasks)


def build_task(
    config: RunConfig, shape: tuple[int, ...], problem: Problem, *, build: Builder | None = None,
    model: Named | None = None, device: torch.device | str = "cpu", example: Tensor | None = None, examples: float = 0,
    packing: Packing | None = None,
) -> ModuleTask:  # fmt: skip
    """The task of a `model`, by default the configuration's (or of the module that `build` makes), for examples of this
    shape; it is tried on an `example` batch at once, if given. `examples` are those of all local steps together."""
    model = config.model if model is None else model
    METRICS.headline(problem, config.metric)  # refuses a metric that is not the problem's
    task = make_task(
        model_for(problem, shape, model.name, model.options, packing) if build is None
        else model_for(problem, shape, build, packing=packing),
        backend=config.backend, device=device, frozen=parse_patterns(config.frozen), example=example, shape=shape,
        batch=config.batch, objective=make_objective(problem, config.loss, config.huber_delta),
        outputs=problem.output_shapes,
        examples=examples,
    )  # fmt: skip
    task.problem, task.metric = problem, config.metric
    return task


def local_examples(config: RunConfig, data: Federation) -> float:
    """Examples in all local steps of a run, on average over participants: those of one loop for every method."""
    count, training = data.train.count, config.training
    a_round = float((training.num_steps(count) * count.clamp_max(training.batch)).to(torch.float64).mean())
    active = config.schedule.size(data.num_clients)
    return a_round * active * config.rounds * len(config.algorithms) * len(config.seeds)


def example_batch(data: Federation) -> Tensor:
    """[2, ...] a few examples to try a model on; of tokens, one with the largest, which an embedding must know."""
    features, numbers = data.features, torch.arange(min(len(data.features), 2))
    if features.packing is not None:
        whole = [features.raw[:, place].amax(1) for one, place in features.packing.places if one.kind == "whole"]
        return features.gather(torch.unique(torch.tensor([*numbers.tolist(), *(int(w.argmax()) for w in whole)])))
    if features.raw.dtype == torch.int64 and features.vectors is None and len(numbers) == 2:
        largest = int(features.raw.flatten(1).amax(1).argmax())
        numbers = torch.tensor([0, largest or 1])
    return features.gather(numbers)


def _refuse_replaced(config: RunConfig, federation: Federation) -> None:
    """Refuse settings that a federation of one's own replaces: they would be recorded as if they had been used."""
    replaced = [name for name in ("partition", "clients", "task", *COLUMNS) if name in config.changed]
    if "dataset" in config.changed and config.dataset.name != federation.description.get("dataset"):
        replaced.insert(0, "dataset")
    if replaced:
        raise ConfigError(
            f"{', '.join(replaced)}: the federation that is given has its data and clients already, and would silently "
            "take their place; leave out one of the two"
        )


def _refuse(columns: dict[str, Any], reason: str) -> None:
    if columns:
        option = "--" + next(iter(columns)).replace("_", "-")
        raise ConfigError(f"{option} does not apply: {reason}")
