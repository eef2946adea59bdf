"""ROC and calibration curves of every client's personal model, on its own test rows, in a few numbers.

The ROC curve is read off at fixed false-positive rates; of several classes it is the mean over the classes, each
against the others. Calibration is counted in ten bins of probability: of the second of two classes, or of the
class that is predicted among more. Both are sums over test rows, so that the folds of a cross-validation add
up: true positives found at the same false-positive rate (vertical averaging), and bins.

Curves are made for personal models that are kept, of at most MOST_CLIENTS clients: a page names each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kinfed.engine import Judged

if TYPE_CHECKING:
    from kinfed.data import Federation
    from kinfed.engine import Architectures, ModuleTask
    from kinfed.pools import Evaluation

MOST_CLIENTS = 300
_SUMS = ("rows", "smaller", "roc", "positives", "bins")


@dataclass(frozen=True)
class Curves:
    """ROC and calibration curves of n clients."""

    FALSE_POSITIVE_RATES: ClassVar[np.ndarray] = np.linspace(0, 1, 34)  # [G] that ROC curves are read off at

    clients: tuple[str, ...]
    rows: np.ndarray  # [n] test rows
    smaller: np.ndarray  # [n] rows of the rarer of two classes; of all but the largest of more than two
    roc: np.ndarray  # [n, G] true positives found at each false-positive rate; classes are averaged where several
    positives: np.ndarray  # [n] of how many; 0 where a client has one class
    bins: np.ndarray  # [n, 10, 3] rows, their summed probability, and how many are as predicted

    def to_json(self) -> dict[str, Any]:
        return {"clients": list(self.clients), **{name: np.round(getattr(self, name), 6).tolist() for name in _SUMS}}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Curves:
        curves = cls(tuple(map(str, record["clients"])), **{name: np.asarray(record[name], float) for name in _SUMS})
        n = len(curves.clients)
        wanted = {"roc": (n, len(cls.FALSE_POSITIVE_RATES)), "bins": (n, 10, 3)}
        for name in _SUMS:
            if (shape := getattr(curves, name).shape) != wanted.get(name, (n,)):
                raise ValueError(f"{name} of {n} clients has the shape {wanted.get(name, (n,))}; got {shape}")
        return curves

    @classmethod
    def joined(cls, parts: Sequence[Curves]) -> Curves:
        """Sums for the same clients on disjoint test rows, or with several seeds."""
        sums = {name: np.sum([getattr(part, name) for part in parts], axis=0) for name in _SUMS}
        return cls(parts[0].clients, **sums)


def evaluated_curves(task: ModuleTask | Architectures, data: Federation, evaluation: Evaluation) -> Curves | None:
    """None for a regression, for too many clients, and where models were not kept."""
    models, ids = evaluation.models, evaluation.ids
    if not data.problem.classifies or models is None or len(ids) > MOST_CLIENTS or not len(ids):
        return None
    part = data.cohort(ids, 0, 0).test.on(task.device)
    if not int(part.count.sum()):
        return None
    import torch  # which a page does not need, nor what follows

    from kinfed.engine import judged_outputs, task_for

    with torch.no_grad():
        judged = judged_outputs(task_for(task, models), models.to(task.device), part, data.problem)
    return client_curves(judged, [data.names[k] for k in ids.tolist()])


def client_curves(judged: Judged, clients: Sequence[str]) -> Curves:
    n, grid = judged.clients, len(Curves.FALSE_POSITIVE_RATES)
    smaller, roc, positives = np.zeros(n), np.zeros((n, grid)), np.zeros(n)
    for client in range(n):
        own = judged.owner == client
        target, probability = judged.target[own], judged.probability[own]
        if not len(target):
            continue
        counts = np.bincount(target, minlength=judged.problem.num_classes)
        smaller[client] = counts.sum() - counts.max()
        classes = [1] if judged.problem.kind == "binary" else np.flatnonzero(counts)
        rates = [_roc(probability[:, c], target == c) for c in classes if 0 < counts[c] < len(target)]
        if rates:
            positives[client] = counts[1] if judged.problem.kind == "binary" else len(target)
            roc[client] = positives[client] * np.mean(rates, axis=0)
    return Curves(tuple(clients), judged.count, smaller, roc, positives, _bins(judged))


def _roc(score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """[G] true-positive rates at FALSE_POSITIVE_RATES, straight between thresholds; equal scores are one threshold."""
    order = np.argsort(-score, kind="stable")
    last = np.flatnonzero(np.r_[np.diff(score[order]) != 0, True])
    hits = np.cumsum(positive[order])[last]
    false = last + 1 - hits
    x, y = np.r_[0.0, false / false[-1]], np.r_[0.0, hits / hits[-1]]
    # Of several thresholds with one false-positive rate the best counts; np.interp takes the last of equal abscissae.
    rates: np.ndarray = np.interp(Curves.FALSE_POSITIVE_RATES, x, y)
    rates[0] = y[x == 0].max()
    return rates


def _bins(judged: Judged) -> np.ndarray:
    """[n, 10, 3]."""
    if judged.problem.kind == "binary":
        sure, right = judged.probability[:, 1], judged.target == 1
    else:
        sure, right = judged.probability.max(1), judged.predicted == judged.target
    return np.stack([judged.binned(sure, values) for values in (np.ones(len(sure)), sure, right.astype(float))], 2)
