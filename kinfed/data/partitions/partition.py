"""Sharing a data set out among clients.

    make_federation(load_source("mnist"), "classes", num_clients=40, options={"classes": 3}, seed=0)

A partition is a frozen dataclass: its fields are its options, `assign` is the rule. The result is a pure function of
(source, options, number of clients, seed). A new one is such a class under one line:

    @PARTITIONS.register("mine", summary="what `kinfed list` says of it")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kinfed.core import make_options
from kinfed.data.examples.features import Features
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.example_weights import scaled_weights
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions.base import Assignment, Partition
from kinfed.data.partitions.resplit import Resplit
from kinfed.data.sources.registered import PARTITIONS
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.data.preprocessing.column_statistics import ReadTable
    from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing

MANY_CLIENTS, FEW_ROWS = 20, 5  # so many clients with fewer rows each are worth a note


def make_federation(
    source: Source,
    partition: str | Partition,
    num_clients: int | None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    resplit: Resplit | None = None,
) -> Federation:
    """Share `source` out by a partition, given by name and options or as an object.

    `num_clients` may be None only where the data set knows its clients (partition column). `resplit` says how each
    client's rows are divided into train and test, where not by chance alone."""
    if isinstance(partition, str):
        rule = make_options(PARTITIONS[partition].options, options or {}, f"partition {partition}")
    elif options:
        raise ConfigError(f"partition {partition.name} is an object that has its options already; leave out {options}")
    else:
        rule = partition
    if num_clients is not None and not 1 <= num_clients <= len(source):
        raise ConfigError(
            f"{source.name} has {len(source):,} examples, so there can be 1 to {len(source):,} clients; "
            f"got {num_clients}"
        )
    assignment = rule.assign(source, num_clients, seed)
    if resplit is not None:
        official = rule.train_and_test_rows(source)[1] is not None
        assignment = resplit.apply(assignment, source, official, seed)
    features, clients = assignment.features or source.features, len(assignment.train)
    labels = source.labels if assignment.labels is None else assignment.labels
    preprocessing = None
    if source.table is not None and assignment.features is None:
        features, preprocessing = _learn(source.table, assignment.train, source.standardize, source.name)
    elif source.standardize:
        features = features.standardized(assignment.train.rows)
    width = len(str(clients - 1))
    problem = source.problem.fitted(labels[assignment.train.rows])
    notes = [*source.notes, *assignment.notes]
    if preprocessing is not None:
        from kinfed.data.preprocessing.target_leaks import leak_note  # with pydantic, which only tables need

        train = assignment.train.rows
        leak = leak_note(preprocessing.used, features.raw[train].numpy(), labels[train].numpy(), problem)
        notes += [*preprocessing.sentences(), *([leak] if leak else [])]
    notes += _note_on_sizes(assignment, source.options.get("client_column"))
    untested = int((assignment.test.count == 0).sum())
    if untested and len(assignment.test.rows):
        notes.append(f"{untested} of {clients} clients have no test example")
    if source.is_val is not None and bool(source.is_val.any()) and assignment.val is None:
        notes.append(f"partition {rule.name} does not keep the validation marks of {source.name}")
    return Federation(
        features=features,
        labels=labels,
        problem=problem,
        train=assignment.train,
        val=assignment.val or Ragged.empty(clients),
        test=assignment.test,
        names=assignment.names or [f"client-{k:0{width}d}" for k in range(clients)],
        groups=assignment.groups,
        group_names=assignment.group_names,
        description={
            "dataset": source.name,
            "dataset_options": source.options,
            "partition": rule.name,
            "options": dataclasses.asdict(rule),
            "clients": clients,
            "seed": seed,
        },
        notes=notes,
        tags=source.tags,
        tag_names=source.tag_names,
        preprocessing=preprocessing,
        weights=scaled_weights(source.weights, assignment.train.rows),
    )


def _note_on_sizes(assignment: Assignment, column: str | None) -> list[str]:
    """That most clients have hardly a row, where a column of the table names them: it may be the wrong one."""
    rows = assignment.train.count + assignment.test.count
    if column is None or len(rows) < MANY_CLIENTS or rows.median() >= FEW_ROWS:
        return []
    return [
        f"half of the {len(rows):,} clients have at most {int(rows.median())} row(s); is {column} the column that "
        "names them?"
    ]


def _learn(table: ReadTable, train: Ragged, standardize: bool, name: str) -> tuple[Features, TablePreprocessing]:
    """Learn what the columns become, from statistics of every client's training rows."""
    from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing  # with pyarrow, for tables alone

    learnt = TablePreprocessing.from_read(table, train.rows.numpy(), train.owner.numpy(), len(train), standardize)
    return Features(learnt.encode_cells(table.cells, table.rows, name).raw, learnt.mean, learnt.std), learnt
