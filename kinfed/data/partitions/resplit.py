"""Train and test rows divided anew: by label, or as one fold of a cross-validation.

It happens between a partition, which says who holds which rows, and what is learnt of training rows (columns, scales):
so that a fold's test rows never enter what its models are fed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from kinfed.core import rng
from kinfed.data.examples.arrays import name_keys
from kinfed.data.examples.ragged import Ragged
from kinfed.data.federations.federation import Federation
from kinfed.data.federations.stratified import split_fold, split_stratified
from kinfed.data.partitions.base import Assignment
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class Resplit:
    """`folds` None: as many test rows as the partition gave, by label; otherwise fold number `fold` of so many."""

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
        if self.folds is None:
            train, test = split_stratified(owned, assignment.train.count, source.labels, source.problem, keys)
            return dataclasses.replace(assignment, train=train, test=test)
        train, test = split_fold(owned, self.fold, self.folds, source.labels, keys)
        notes = [*assignment.notes, *fold_notes(owned, self.folds)]
        return dataclasses.replace(assignment, train=train, test=test, notes=notes)


def fold_notes(owned: Ragged, folds: int) -> list[str]:
    single = int((owned.count == 1).sum())
    notes = [
        f"cross-validation in {folds} folds: every row is tested once, by models that were not trained on it; figures "
        "of a client add up its folds, and a seed counts once, however many folds it has"
    ]
    if single:
        notes.append(f"{single} client(s) with a single row train on it in every fold and are not tested")
    return notes


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
    train, test = split_fold(owned, fold, folds, data.labels, keys)
    problem = data.problem.fitted(data.labels[train.rows])
    return dataclasses.replace(
        data, train=train, test=test, problem=problem, notes=[*data.notes, *fold_notes(owned, folds)]
    )
