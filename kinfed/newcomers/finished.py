"""One seed of a finished run, for what goes on from there: newcomers, and studies of its models.
A newcomer is made from its table, with features scaled and classes numbered as the run wrote them down.

FinishedRun.open("runs/first")                 from its folder
RunInMemory.of_result(result, "ditto")         from its result; nothing of any training row is kept
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, make_algorithm
from kinfed.config import RunConfig
from kinfed.core import Tree, make_options
from kinfed.data import Description, Features, Federation, Population, TablePreprocessing, describe
from kinfed.data.sources import LabelledRows, TableOptions, load_like
from kinfed.engine import Architectures, Builder, ModuleTask, Task
from kinfed.errors import ConfigError, ModelError
from kinfed.records import RunFiles, pick
from kinfed.runs import RunOutcome, build_models
from kinfed.serving import ModelInputs

NAME = "newcomer"


@dataclass(frozen=True)
class EndedRun(ABC):
    """Common parts of runs in a folder and in memory."""

    config: RunConfig
    seed: int
    description: Description  # who holds what

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the run in messages."""

    @abstractmethod
    def server_state(self, label: str) -> Mapping[str, Tensor]:
        """The tensors of an algorithm's server after its last round."""

    @abstractmethod
    def start(self) -> Tensor | None:
        """[P] where all algorithms of the run began, if not at random."""

    @property
    def num_clients(self) -> int:
        return self.description.num_clients

    @property
    def groups(self) -> list[str]:
        """Names of the clients' groups, by number; none if they have no groups."""
        groups = self.description.groups
        return [] if groups is None else self.description.group_names or [str(n) for n in range(max(groups) + 1)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an example."""
        return tuple(self.description.inputs["shape"])

    @property
    def inputs(self) -> ModelInputs:
        """Inputs of its models."""
        return ModelInputs.of_description(self.description, self.config.model.options)

    def label(self, name: str | None) -> str:
        """The algorithm of that label; the only one if none is named."""
        return pick("algorithm", name, list(self.config.algorithms))

    def algorithm(self, label: str) -> AnyAlgorithm:
        options = dict(self.config.algorithms[self.label(label)])
        training = replace(self.config.training, poisson=False)  # what a newcomer computes stays with it
        return make_algorithm(options.pop("method"), training, options)

    def models(self, model: Builder | None = None, example: Tensor | None = None) -> ModuleTask | Architectures:
        """The model of the run, or its architectures; `model` builds it where the run was given a module of the
        caller's own. It is tried on an `example` batch, if given."""
        return build_models(
            self.config, self.shape, self.description.problem, build=model, example=example, packing=self.inputs.packing
        )

    def task(self, model: Builder | None = None, example: Tensor | None = None, group: str | None = None) -> ModuleTask:
        """The model of a newcomer in this group: where clients have several architectures, that of its group, or
        without groups the next in turn."""
        models = self.models(model, example)
        return models.tasks[self.architecture(models, group)] if isinstance(models, Architectures) else models

    def architecture(self, models: Architectures, group: str | None) -> int:
        """The number of a newcomer's architecture."""
        if self.groups and group is None:
            raise ConfigError(
                f"clients of {self.name} have the architecture of their group; say which group the newcomer is in: "
                f"{', '.join(self.groups)}"
            )
        number = self.groups.index(pick("group", group, self.groups)) if group is not None and self.groups else 0
        population = self.population(1, number)
        return int(models.of_clients(population.groups, self.groups, population.num_clients)[-1])

    def population(self, newcomers: int = 0, group: int = 0) -> Population:
        """The run's clients, and `newcomers` more at the end, of this group where clients have groups."""
        groups = self.description.groups
        if groups is not None and self.description.listed is not None:
            raise ConfigError(
                f"{self.name} recorded the groups of a sample of its clients only (eval_clients), but newcomers need "
                "the groups of all; run without eval_clients"
            )
        by_client = None if groups is None else torch.tensor([*groups, *[group] * newcomers])
        number, share = self.num_clients + newcomers, self.config.participation
        return Population(number, self.seed, share, by_client, 0 if groups is None else max(groups) + 1)

    def server(self, label: str, algorithm: AnyAlgorithm, task: Task) -> Tree:
        """The algorithm's server after its last round."""
        server: Tree = algorithm.init_server(task, self.population()).like(dict(self.server_state(label)))
        return server


@dataclass(frozen=True)
class FinishedRun(EndedRun):
    """A finished run in a folder."""

    files: RunFiles

    @classmethod
    def open(cls, folder: Path | str, seed: int | None = None) -> FinishedRun:
        """The run in a folder; its first seed by default."""
        files = RunFiles(folder)
        number = files.seed(seed)
        return cls(files.config, number, files.description(number), files)

    @property
    def name(self) -> str:
        return str(self.files.path)

    def models(self, model: Builder | None = None, example: Tensor | None = None) -> ModuleTask | Architectures:
        models, layout = super().models(model, example), self.files.layout()
        if isinstance(models, Architectures):
            for name, task in zip(models.names, models.tasks, strict=True):
                self._check_layout(task, layout["architectures"][name], model)
        else:
            self._check_layout(models, layout, model)
        return models

    def _check_layout(self, task: ModuleTask, layout: Mapping[str, Any], model: Builder | None) -> None:
        """Refuse a model whose rows are not those of the run."""
        what = "the model given" if model else f"model {self.config.model.name}, which the configuration names,"
        if layout.get("constants", "") != task.constants_digest():
            raise ModelError(
                f"{what} has other frozen weights than the models in {self.name} were trained on; give those weights"
            )
        layers = layout["layers"]
        if [(one["name"], tuple(one["shape"])) for one in layers] != [(one.name, one.shape) for one in task.slots]:
            raise ModelError(
                f"{what} has other parameters than the models in {self.name}; pass the function that builds theirs"
            )

    def start(self) -> Tensor | None:
        for name, rounds in (("warm-start", self.config.warm_start), ("pretrained", self.config.pretrain)):
            if rounds:
                return self.files.final_state(f"{name}-{self.seed}", rounds)["w"]
        return None

    def server_state(self, label: str) -> Mapping[str, Tensor]:
        last = 0 if self.files.is_finished else self.config.warm_start + self.config.rounds
        tensors = self.files.final_state(f"{label}-{self.seed}", last)
        return {name.removeprefix("server."): t for name, t in tensors.items() if name.startswith("server.")}


@dataclass(frozen=True)
class RunInMemory(EndedRun):
    """A finished run without a folder, as far as new clients need it; it can be pickled."""

    states: Mapping[str, Mapping[str, Tensor]]  # of servers, by label

    @classmethod
    def of_result(cls, result: RunOutcome, *labels: str, seed: int | None = None) -> RunInMemory:
        """Make it for these algorithms; for all if none is named."""
        states = {}
        for label in labels or result.config.algorithms:
            method = result.result(label, seed)
            if method.server_state is None:
                raise ConfigError(f"the run of {label} kept no server (save_models = false, folds, or it has a folder)")
            states[label] = method.server_state
        if result.config.warm_start or result.config.pretrain:
            raise ConfigError(
                "newcomers need the models that the run started from; run it with a folder (out) and adopt from that"
            )
        number = result.config.seeds[0] if seed is None else seed
        return cls(result.config, number, describe(result.federations[number]), states)

    @property
    def name(self) -> str:
        return "this run"

    def start(self) -> Tensor | None:
        return None

    def server_state(self, label: str) -> Mapping[str, Tensor]:
        return self.states[label]


def newcomer_from_table(
    ended: EndedRun | Path | str, table: Any, label_column: str | None, *, test_fraction: float = 0.25,
    seed: int | None = None, **columns: Any,
) -> Federation:  # fmt: skip
    """The newcomer as a federation of one: features and classes as in the run, some examples held out. `table` is a
    file, a frame or a dictionary of columns; `columns` are options of a table (kinfed.data.sources.TableOptions). Of a
    run on texts, `text_column` and `tokenizer` are the run's unless they are given. Weights of rows are scaled to mean
    one over the newcomer's own."""
    run, inputs = opened(ended, seed), opened(ended, seed).inputs
    options = make_options(TableOptions, {"label_column": label_column, **columns}, "the newcomer's table")
    if (text := inputs.text) is not None:
        column, tokenizer = options.text_column or text.column, options.tokenizer or text.tokenizer
        options = replace(options, text_column=column, tokenizer=tokenizer, length=text.length)
    elif options.text_column or options.tokenizer:
        raise ConfigError(f"the models of {run.name} read no texts; leave out text_column and tokenizer")
    source = load_like(table, options, inputs.columns, run.description.problem)
    path = source.name
    raw, mean, std = _examples(source, inputs, path)
    return source.federation(
        NAME, run.description.problem, Features(inputs.examples(raw, path), mean, std), test_fraction, run.seed,
        preprocessing=inputs.preprocessing, keyed_by_name=False,
    )  # fmt: skip


def opened(ended: EndedRun | Path | str, seed: int | None = None) -> EndedRun:
    """A run in memory as it is, or that of a folder."""
    return ended if isinstance(ended, EndedRun) else FinishedRun.open(ended, seed)


def _examples(source: LabelledRows, inputs: ModelInputs, path: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The newcomer's examples, and how they are scaled."""
    learnt = inputs.preprocessing
    if source.features is not None:  # images
        return source.features.raw, inputs.mean, inputs.std
    assert source.read is not None
    if learnt is not None:
        return source.encode(learnt, path).raw, learnt.mean, learnt.std
    return source.encode(TablePreprocessing.plain(source.read.cells), path).raw, inputs.mean, inputs.std
