"""Sharing a data set out among clients.

    make_federation(load_source("mnist"), "classes", num_clients=40, options={"classes": 3}, seed=0)

A partition is a frozen dataclass: its fields are its options, `assign` is the rule. The result is a pure function of
(source, options, number of clients, seed). A new one is such a class under one line:

    @PARTITIONS.register("mine", summary="what `kinfed list` says of it")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kinfed.core import make_options, rng
from kinfed.data.audit.findings import Finding
from kinfed.data.examples.arrays import name_keys
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged, split_stratified
from kinfed.data.examples.row_ties import RowTies, split_fold
from kinfed.data.federations.example_weights import scaled_weights
from kinfed.data.federations.federation import Federation
from kinfed.data.partitions import partition_file
from kinfed.data.partitions.base import Assignment, Partition
from kinfed.data.sources.registered import PARTITIONS
from kinfed.data.sources.source import Source
from kinfed.data.sources.table_options import SHARED
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.data.preprocessing.column_statistics import ReadTable
    from kinfed.data.preprocessing.encodings import OwnColumn
    from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing


@dataclass(frozen=True)
class Resplit:
    """Train and test rows divided anew: by label, as many test rows as the partition gave (`folds` None), or as fold
    number `fold` of a cross-validation.

    It happens between a partition, which says who holds which rows, and what is learnt of training rows (columns,
    scales), so that a fold's test rows never enter what its models are fed."""

    folds: int | None = None
    fold: int = 0

    def apply(self, assignment: Assignment, source: Source, official: bool, seed: int) -> Assignment:
        """`official`: test rows are the data set's own."""
        if official and self.folds is None:
            return assignment
        if official:
            raise ConfigError(
                f"folds: {source.name} names its test rows (a split of its own, by time or by patient), and folds "
                "would mix them with training rows; leave out folds, or take --set partition.split=train for folds of "
                "its training rows"
            )
        owned = assignment.train.joined(assignment.test).ascending()
        if len(torch.unique(owned.rows)) < len(owned.rows):
            raise ConfigError(
                "stratify and folds divide every client's own rows, and here clients hold the same rows (overlap); "
                "choose a partition without overlap"
            )
        key = rng.root(seed, "stratified-split" if self.folds is None else "folds")
        keys = name_keys(key, assignment.names) if assignment.names else rng.fold(key, torch.arange(len(owned)))
        ties = RowTies.of(source.persons, source.order)
        if self.folds is None:
            train, test = split_stratified(owned, assignment.train.count, source.labels, source.problem, keys)
            return replace(assignment, train=train, test=test)
        train, test = split_fold(owned, self.fold, self.folds, source.problem.strata(source.labels)[0], keys, ties)
        notes = [*assignment.notes, *fold_notes(owned, self.folds, ties)]
        return replace(assignment, train=train, test=test, notes=notes)


def make_federation(
    source: Source, partition: str | Partition, num_clients: int | None, options: Mapping[str, Any] | None = None,
    seed: int = 0, *, resplit: Resplit | None = None, audit: bool = True, save_partition: Path | None = None,
) -> Federation:  # fmt: skip
    """Share `source` out by a partition, given by name and options or as an object.

    `num_clients` may be None only where the data set knows its clients (partition column). `resplit` says how each
    client's rows are divided into train and test, where not by chance alone. The table is audited (kinfed.data.audit)
    unless `audit` is false: where the same rows are divided again and again. `save_partition` names a file for who
    holds which rows (kinfed.data.partitions.partition_file)."""
    rule = partition
    if isinstance(rule, str):
        rule = make_options(PARTITIONS[rule].options, options or {}, f"partition {rule}")
    elif options:
        raise ConfigError(f"partition {rule.name} is an object that has its options already; leave out {options}")
    if num_clients is not None and not 1 <= num_clients <= len(source):
        most = f"{len(source):,}"
        raise ConfigError(f"{source.name} has {most} examples, so there can be 1 to {most} clients; got {num_clients}")
    ties = RowTies.of(source.persons, source.order)
    names_test_rows = source.has_official_test
    if ties is not None and not names_test_rows and (resplit is None or resplit.folds is None):
        source = replace(source, is_test=_test_rows(source, ties, rule.test_fraction, seed))
    assignment = rule.assign(source, num_clients, seed)
    if resplit is not None:
        official = rule.train_and_test_rows(source)[1] is not None
        assignment = resplit.apply(assignment, source, official, seed)
    features, clients = assignment.features or source.features, len(assignment.train)
    labels = source.labels if assignment.labels is None else assignment.labels
    preprocessing: TablePreprocessing | None = None
    own: tuple[tuple[OwnColumn, ...], ...] = ()
    problem = source.problem.fitted(labels[assignment.train.rows])
    if source.table is not None and assignment.features is None:
        features, preprocessing, own = _learn(source, source.table, assignment, labels, problem)
    elif source.standardize:
        features = features.standardized(assignment.train.rows)
    notes = [*source.notes, *assignment.notes, *([] if preprocessing is None else preprocessing.sentences())]
    findings = []
    if audit:
        findings = _findings(source, rule.name, assignment, labels, problem, preprocessing, names_test_rows)
    notes += [finding.sentence for finding in findings]
    if source.persons is not None:
        notes += _persons_apart(source.persons, assignment)
    untested = int((assignment.test.count == 0).sum())
    if untested and len(assignment.test.rows):
        notes.append(f"{untested} of {clients} clients have no test example")
    if source.is_val is not None and bool(source.is_val.any()) and assignment.val is None:
        notes.append(f"partition {rule.name} does not keep the validation marks of {source.name}")
    names = assignment.names or [f"client-{k:0{len(str(clients - 1))}d}" for k in range(clients)]
    description = {
        "dataset": source.name, "dataset_options": source.options, "partition": rule.name, "options": asdict(rule),
        "clients": clients, "seed": seed,
    }  # fmt: skip
    if save_partition is not None:
        partition_file.save_partition(save_partition, source, replace(assignment, names=names), description)
    return Federation(
        features, labels, problem, assignment.train, assignment.val or Ragged.empty(clients), assignment.test, names,
        assignment.groups, assignment.group_names, description, notes, source.tags, source.tag_names, preprocessing,
        weights=scaled_weights(source.weights, assignment.train.rows), findings=findings,
        persons=source.persons, order=source.order, own_columns=own,
    )  # fmt: skip


def _findings(
    source: Source, partition: str, assignment: Assignment, labels: Tensor, problem: Problem,
    preprocessing: TablePreprocessing | None, names_test_rows: bool,
) -> list[Finding]:  # fmt: skip
    """Findings of the audit in what only the source shows: how it names test rows, and the columns of a table."""
    findings = []
    if source.is_test is not None and not names_test_rows and source.persons is None and source.order is None:
        column = source.options.get("split_column") or "its split"
        text = (
            f"{column} of {source.name} marks no row for testing, so that test rows would be drawn from all. Mark some "
            "(test), or leave the column out."
        )
        findings.append(Finding("split", text, refused=True))
    if source.table is None or preprocessing is None:
        return findings
    from kinfed.data.audit.table_audit import TableParts, audit_table  # with pyarrow, for tables alone

    train, by_site = assignment.train, partition == "column"
    parts = TableParts(
        source.table.cells, {one.name: one.kind for one in preprocessing.used}, labels.numpy(), problem,
        train.rows.numpy(), train.owner.numpy(), assignment.names or [], assignment.test.rows.numpy(),
        (train.count + assignment.test.count).numpy(), source.options.get("label_column") or "label",
        (source.options.get("client_column") or "client") if by_site else None,
        names_test_rows=names_test_rows, keeps_persons=source.persons is not None,
        keeps_order=source.order is not None,
    )  # fmt: skip
    return [*findings, *audit_table(parts)]


def _persons_apart(persons: Tensor, assignment: Assignment) -> list[str]:
    """Clients draw their own persons: one who has rows at several may be for training here and for testing there."""
    train, test = (torch.unique(persons[part.rows]) for part in (assignment.train, assignment.test))
    both = int(torch.isin(test, train).sum())
    if not both:
        return []
    return [
        f"{both} of {len(test)} persons with test rows have training rows at other clients: what clients learn "
        "together has seen them, so its test figures, and what is gained by learning together, are too good"
    ]


def _test_rows(source: Source, ties: RowTies, share: float, seed: int) -> Tensor:
    """[N] bool: rows for testing, a share of those of every client (of all, where the data set names no clients)."""
    owner = torch.zeros(len(source), dtype=torch.int64) if source.owners is None else source.owners
    owned = Ragged.grouped(torch.arange(len(source)), owner, int(owner.max()) + 1)
    key = rng.root(seed, "test-persons")
    names = source.owner_names
    keys = name_keys(key, names) if source.owners is not None and names else rng.fold(key, torch.arange(len(owned)))
    _, test = ties.hold_out(owned, share, keys)
    chosen = torch.zeros(len(source), dtype=torch.bool)
    chosen[test.rows] = True
    return chosen


def _learn(
    source: Source, table: ReadTable, assignment: Assignment, labels: Tensor, problem: Problem
) -> tuple[Features, TablePreprocessing, tuple[tuple[OwnColumn, ...], ...]]:
    """Learn what the columns become, from statistics of every client's training rows, and at every client what its own
    columns do. Scores of training texts and effects of own columns there are those of models that did not see them."""
    from kinfed.data.preprocessing.table_preprocessing import TablePreprocessing  # with pyarrow, for tables alone
    from kinfed.data.preprocessing.text_scores import TextScores, TextTarget

    train, target = assignment.train, TextTarget.of(labels.numpy(), source.problem)
    texts = TextScores(table.cells, train.rows.numpy(), train.owner.numpy(), len(train), target)
    held = train.joined(assignment.test)
    held = held if assignment.val is None else held.joined(assignment.val)
    alone = len(torch.unique(held.rows)) == len(held.rows)  # a row that several hold would have an effect at each
    apart = alone and source.options.get("own_columns") != SHARED
    outputs = TablePreprocessing.outputs_with_effects(problem) if apart else ()
    learnt = TablePreprocessing.from_read(table, texts, source.standardize, outputs)
    raw = learnt.encode_cells(table.cells, table.rows, source.name).raw
    for one in learnt.used:
        if one.name in texts.fitted:
            columns = [learnt.features.index(name) for name in one.features]
            raw[train.rows[:, None], torch.tensor(columns)] = torch.from_numpy(texts.fitted[one.name])
    own: list[tuple[OwnColumn, ...]] = []
    for client in range(len(train) if learnt.own else 0):
        rows = held[client], train[client]
        own.append(learnt.learn_own(table, raw, *rows, labels, problem, source.name, source.persons))
    return Features(raw, learnt.mean, learnt.std), learnt, tuple(own)


def fold_notes(owned: Ragged, folds: int, ties: RowTies | None) -> list[str]:
    if ties is not None and ties.order is not None:
        return [
            f"rolling origin in {folds} folds: each client's rows, in order, lie in {folds + 1} blocks, and every "
            "block but the first is tested by models of the blocks before it; a seed counts once"
        ]
    note = (
        f"cross-validation in {folds} folds: every row is tested once, by models that were not trained on it; figures "
        "of a client add up its folds, and a seed counts once, however many folds it has"
    )
    single = int((owned.count == 1).sum())
    few = f"{single} client(s) with a single row train on it in every fold and are not tested"
    return [note, few] if single else [note]


def fold_of_federation(data: Federation, folds: int, fold: int, seed: int) -> Federation:
    """One fold of clients that have been split before, all of whose rows but validation ones are dealt anew."""
    learnt = data.preprocessing
    if (learnt is not None and not learnt.learns_nothing) or data.features.mean is not None:
        raise ConfigError(
            "folds: the scales of this federation's features were learnt from its training rows, some of which a fold "
            "uses for testing; give the table or the data set instead, or arrays with standardize = false"
        )
    owned = data.train.joined(data.test).ascending()
    keys = name_keys(rng.root(seed, "folds"), data.names)
    train, test = split_fold(owned, fold, folds, data.problem.strata(data.labels)[0], keys, data.ties)
    problem = data.problem.fitted(data.labels[train.rows])
    return replace(
        data, train=train, test=test, problem=problem, notes=[*data.notes, *fold_notes(owned, folds, data.ties)]
    )
