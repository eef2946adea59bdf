"""Builds the federation and the task of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.core import option_types
from kinfed.data import Federation, Problem, Resplit, fold_of_federation, make_federation
from kinfed.data.sources import SOURCES, names_clients
from kinfed.engine import (
    METRICS,
    Builder,
    ModuleTask,
    build_model,
    make_objective,
    make_task,
    own_model,
    parse_patterns,
)
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.config import RunConfig

DEFAULT_CLIENTS = 20
DEFAULT_PARTITION = "dirichlet"
COLUMNS = ("client_column", "label_column", "group_column", "split_column", "weight_column", "columns")


def build_federation(config: RunConfig, seed: int, fold: int = 0) -> Federation:
    """The clients of a run: a saved federation's folder, a user's table, or a named data set, shared out; with `folds`
    in that fold of its cross-validation."""
    from kinfed.data.sources import is_table, load_source

    name, source_options = config.dataset.name, dict(config.dataset.options)
    columns = {column: getattr(config, column) for column in COLUMNS if getattr(config, column) is not None}
    if config.task != "auto":
        columns["task"] = config.task
    if (Path(name) / "federation.json").is_file():
        _refuse(columns, f"{name} is a saved federation")
        saved = Federation.load(Path(name))
        return saved if config.folds is None else fold_of_federation(saved, config.folds, fold, seed)
    names_columns = name in SOURCES and "columns" in option_types(SOURCES[name].options)
    if is_table(name) or (names_columns and columns.keys() <= {"columns", "task"}):
        source_options |= columns
    else:
        _refuse(columns, f"it is for a table of your own, and {name!r} is not one")
    source = load_source(name, config.data, seed, source_options)
    partition = partition_name(config)
    clients = config.clients if partition == "column" else config.clients or DEFAULT_CLIENTS
    options = {} if config.partition is None else config.partition.options
    resplit = Resplit(config.folds, fold) if config.stratify or config.folds is not None else None
    return make_federation(source, partition, clients, options, seed, resplit=resplit)


def partition_name(config: RunConfig) -> str:
    """The partition of a configuration: the one named, the data's own clients, or uneven shares of every class."""
    if config.partition is not None:
        return config.partition.name
    own = names_clients(config.dataset.name) or config.client_column or "client_column" in config.dataset.options
    return "column" if own else DEFAULT_PARTITION


def build_task(
    config: RunConfig,
    shape: tuple[int, ...],
    problem: Problem,
    *,
    build: Builder | None = None,
    device: torch.device | str = "cpu",
    example: Tensor | None = None,
    examples: float = 0,
) -> ModuleTask:
    """The task of a configuration's model (or of the module that `build` makes) for examples of this shape; it is tried
    on an `example` batch at once, where there is one. `examples` are those of all local steps together."""
    name, options, outputs = config.model.name, config.model.options, problem.outputs
    METRICS.headline(problem, config.metric)  # refuses a metric that is not the problem's
    task = make_task(
        (lambda: build_model(name, shape, outputs, options)) if build is None else own_model(build, shape, outputs),
        backend=config.backend,
        device=device,
        frozen=parse_patterns(config.frozen),
        example=example,
        shape=shape,
        batch=config.batch,
        outputs=outputs,
        objective=make_objective(problem, config.loss, config.huber_delta),
        examples=examples,
    )
    task.problem, task.metric = problem, config.metric
    return task


def local_examples(config: RunConfig, data: Federation) -> float:
    """Examples in all local steps of a run, on average over who takes part: those of one loop for every method."""
    count, training = data.train.count, config.training
    a_round = float((training.num_steps(count) * count.clamp_max(training.batch)).to(torch.float64).mean())
    active = config.schedule.size(data.num_clients)
    return a_round * active * config.rounds * len(config.algorithms) * len(config.seeds)


def example_batch(data: Federation) -> Tensor:
    """[2, ...]: a few examples to try a model on; of tokens, one with the largest, which an embedding must know."""
    features, numbers = data.features, torch.arange(min(len(data.features), 2))
    if features.raw.dtype == torch.int64 and features.vectors is None and len(numbers) == 2:
        largest = int(features.raw.flatten(1).amax(1).argmax())
        numbers = torch.tensor([0, largest or 1])
    return features.gather(numbers)


def _refuse(columns: dict[str, Any], reason: str) -> None:
    if columns:
        option = "--" + next(iter(columns)).replace("_", "-")
        raise ConfigError(f"{option} does not apply: {reason}")
