"""Checks of a federation: refused at its making, in words, and not deep inside of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfed.data.examples.problem import Problem
from kinfed.data.examples.ragged import SPLITS
from kinfed.errors import DataError

if TYPE_CHECKING:
    from kinfed.data.federations.federation import Federation


def check_federation(data: Federation) -> None:
    """Refuse what would fail later or, worse, train on nonsense."""
    clients = len(data.train)
    if clients < 1:
        raise DataError("a federation needs at least one client; got none")
    for name in SPLITS:
        ragged = data.split(name)
        if len(ragged) != clients:
            raise DataError(f"split {name} lists {len(ragged)} clients, train lists {clients}")
        if len(ragged.rows) and (ragged.rows.min() < 0 or ragged.rows.max() >= len(data.features)):
            raise DataError(f"split {name} points outside the {len(data.features)} examples")
    if data.public is not None:
        outside = len(data.public) and (data.public.min() < 0 or data.public.max() >= len(data.features))
        private = torch.cat([data.split(name).rows for name in SPLITS])
        if outside or not len(data.public) or bool(torch.isin(data.public, private).any()):
            raise DataError("public examples are some of the data set, and in no client's train, val or test split")
    if len(data.labels) != len(data.features):
        raise DataError(f"{len(data.features)} examples but {len(data.labels)} labels")
    if data.tags is not None and len(data.tags) != len(data.labels):
        raise DataError(f"{len(data.labels)} labels but {len(data.tags)} tags")
    if data.weights is not None and len(data.weights) != len(data.labels):
        raise DataError(f"{len(data.labels)} labels but {len(data.weights)} weights of examples")
    if len(data.names) != clients or len(set(data.names)) != clients:
        raise DataError(f"every one of the {clients} clients needs a name of its own")
    if data.groups is not None and len(data.groups) != clients:
        raise DataError(f"{clients} clients but {len(data.groups)} group labels")
    check_labels(data.labels, data.problem)
    data.features.check_finite()
    empty = (data.train.count == 0).nonzero().squeeze(1)
    if len(empty):
        who = ", ".join(data.names[int(k)] for k in empty[:5])
        raise DataError(
            f"{len(empty)} client(s) have no training example ({who}); give each at least one or leave them out"
        )
    trained = torch.zeros(len(data.features), dtype=torch.bool)
    trained[data.train.rows] = True
    leaked = trained[data.test.rows]
    if bool(leaked.any()):
        first = int(data.test.rows[leaked][0])
        raise DataError(
            f"{int(leaked.sum())} test example(s) are training examples too (first: row {first}); "
            "accuracy on them would say nothing"
        )


def check_labels(labels: Tensor, problem: Problem, what: str = "labels") -> None:
    """Refuse labels that do not fit their problem."""
    if problem.is_regression:
        if not labels.is_floating_point() or not bool(torch.isfinite(labels).all()):
            raise DataError(f"{what} of a regression are finite numbers of a float type; got {labels.dtype}")
        return
    if labels.is_floating_point():
        raise DataError(f"{what} of a {problem.kind} problem are whole numbers of classes; got {labels.dtype}")
    if len(labels) and (labels.min() < 0 or labels.max() >= problem.num_classes):
        raise DataError(
            f"{what} must lie in 0..{problem.num_classes - 1}; found {int(labels.min())}..{int(labels.max())}"
        )
