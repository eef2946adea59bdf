"""Weights of examples in training: class weights, and a weight of every row.

The loss of a batch of B examples is (1/B) Σ w_i loss_i. It is divided by B and not by Σ w_i: then the expected gradient
of a client is that of (1/n_k) Σ w_i loss_i, whatever falls into a batch, and FedAvg's mean by examples that of the
weighted loss over the rows of all clients in one place. Weights of mean one leave learning rates what they are.

    class_weights   weight of class c at client k
    none            1
    balanced        n / (C n_c), counted over the training rows of all clients; C classes occur there
    by_client       n_k / (C_k n_kc), counted over the client's own training rows
    sick=5,well=1   as they stand; classes that are not named have 1

`balanced` is one loss for everybody: probabilities of all clients lean to rare classes by the same odds, and a client
with few classes is judged like the others. The counts are a message of every client, counted in bytes before the first
round. `by_client` sends nothing, and the classes of each client count alike there.

Weights of rows (`weight_column`) are scaled to mean one over the training rows of all clients, and multiply class
weights. Validation losses that methods decide by are weighted, too: they stand for what is trained. Figures of test
rows are not: a run with weights and one without can be compared, and rare classes have measures of their own.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.data.examples.problem import Problem
from kinfed.errors import ConfigError, DataError, unknown_name

NONE, BALANCED, BY_CLIENT = "none", "balanced", "by_client"


def class_weight_table(rule: str, counts: Tensor, problem: Problem) -> Tensor | None:
    """[K, C] float32 by the rule, from training examples of every class at every client, `counts` [K, C]; None where
    all classes weigh alike."""
    if rule == NONE:
        return None
    if not problem.has_classes:
        raise ConfigError(f"class_weights = {rule}: the target is a number, without classes; leave it out")
    if rule == BALANCED:
        return _balanced(counts.sum(0, keepdim=True)).expand(len(counts), -1)
    if rule == BY_CLIENT:
        return _balanced(counts)
    weights = torch.tensor(parse_class_weights(rule, problem.class_labels), dtype=torch.float32)
    return weights.expand(len(counts), -1)


def _balanced(counts: Tensor) -> Tensor:
    """[m, C] weights of mean one over the examples of a row, the same total for every class that occurs in it."""
    n = counts.to(torch.float64)
    present = (n > 0).sum(1, keepdim=True).clamp_min(1)
    weights = n.sum(1, keepdim=True) / (present * n.clamp_min(1))
    return torch.where(n > 0, weights, 1.0).to(torch.float32)


def parse_class_weights(text: str, class_labels: list[str]) -> list[float]:
    """[C] from "sick=5,well=1"."""
    weights = dict.fromkeys(class_labels, 1.0)
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if not equals:
            raise ConfigError(
                f"class_weights is {NONE}, {BALANCED}, {BY_CLIENT}, or weights of classes such as "
                f"{class_labels[0]}=2,{class_labels[-1]}=1; got {text!r}"
            )
        if name not in weights:
            raise unknown_name("class in class_weights", name, class_labels)
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = float("nan")
        if not 0 < weights[name] < float("inf"):
            raise ConfigError(f"class_weights: the weight of {name} must be a positive number; got {number!r}")
    return list(weights.values())


def read_weights(values: Any, what: str) -> Tensor:
    """[N] float64 weights of rows: positive and finite."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf" or array.ndim != 1:
        raise DataError(f"{what} should hold a positive number for every row; got {array.dtype} of {array.ndim} axes")
    weights = array.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
    if len(bad):
        raise DataError(
            f"{what} has {len(bad)} weight(s) that are not positive and finite, the first ({weights[bad[0]]:g}) in row "
            f"{bad[0] + 1}; leave rows out that should not count"
        )
    return torch.from_numpy(weights)


def scaled_weights(weights: Tensor | None, training_rows: Tensor) -> Tensor | None:
    """[N] float32, with mean one over the training rows."""
    if weights is None:
        return None
    mean = weights[training_rows].to(torch.float64).mean() if len(training_rows) else torch.tensor(1.0)
    return (weights / mean).to(torch.float32)
