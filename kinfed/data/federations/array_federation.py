"""From the caller's own arrays to the fields of a federation (`Federation.from_arrays`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.arrays import as_features, encode, groups_of, name_keys
from kinfed.data.examples.features import Features
from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import Ragged, hold_out
from kinfed.data.examples.target import read_target
from kinfed.data.federations.example_weights import read_weights, scaled_weights
from kinfed.data.federations.stratified import split_stratified
from kinfed.data.sources.table_options import TaskName
from kinfed.errors import ConfigError, DataError


def fields_from_arrays(
    x: Any,
    y: Any,
    clients: Any,
    *,
    test_fraction: float = 0.25,
    test_rows: Any = None,
    num_classes: int | None = None,
    task: TaskName = "auto",
    groups: Mapping[Any, Any] | None = None,
    tokens: bool = False,
    standardize: bool = False,
    weights: Any = None,
    stratify: bool = False,
    seed: int = 0,
    name: str = "arrays",
) -> dict[str, Any]:
    """The arguments are those of `Federation.from_arrays`, which says what they mean."""
    features = Features(as_features(x, tokens))
    has_classes = num_classes is not None and task == "auto"
    target = read_target(y, "y", "classification" if has_classes else task, codes=True)
    labels = target.labels
    index, names = encode(clients, "clients")
    if not len(features) == len(labels) == len(index):
        raise DataError(
            f"x, y and clients must have one entry per example; got {len(features)}, {len(labels)}, {len(index)}"
        )
    if len(labels) == 0:
        raise DataError("x, y and clients are empty; a federation needs at least one example")
    owned = Ragged.grouped(torch.arange(len(index)), index, len(names))
    if test_rows is None:
        keys = name_keys(rng.root(seed, "test-split"), names)
        train, test = hold_out(owned, test_fraction, keys)
        if stratify:
            train, test = split_stratified(owned, train.count, labels, target.problem, keys)
    else:
        marked = torch.as_tensor(np.asarray(test_rows))
        if marked.dtype != torch.bool or marked.shape != labels.shape:
            raise DataError(
                f"test_rows must be {len(labels)} booleans, one per example; "
                f"got {marked.dtype} of shape {tuple(marked.shape)}"
            )
        train, test = owned.filter(~marked[owned.rows]), owned.filter(marked[owned.rows])
    group_index, group_names = groups_of(names, groups)
    problem = fitted_problem(target.problem, labels, train)
    if num_classes is not None:
        if problem.is_regression:
            raise ConfigError(f"num_classes = {num_classes}: a regression has no classes; leave it out")
        problem = Problem.of_classes(num_classes, problem.class_names)
    if standardize:
        features = features.standardized(train.rows)
    counted = None if weights is None else read_weights(weights, "weights")
    return {
        "features": features, "labels": labels, "problem": problem, "train": train, "val": Ragged.empty(len(names)),
        "test": test, "names": names, "groups": group_index, "group_names": group_names,
        "description": {"dataset": name, "partition": "given"},
        "notes": [target.note] if problem.is_regression else [],
        "weights": scaled_weights(counted, train.rows),
    }  # fmt: skip


def fitted_problem(problem: Problem, labels: Tensor, train: Ragged) -> Problem:
    """The problem with what training rows say of a regression's target; their sums are all that clients would send."""
    return Problem.of_numbers(labels[train.rows].numpy()) if problem.is_regression else problem
