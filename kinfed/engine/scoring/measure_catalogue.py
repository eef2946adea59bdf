"""The measures that models are judged by, as kinfed.engine.scoring.measures explains them: names, definitions, and
their sums over a client's examples. Needs no torch: pages name and describe measures, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from kinfed.data import Kind, Problem
from kinfed.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Judged:
    """Test examples of n clients, one after the other, and what their models say of them."""

    output: np.ndarray  # [T, C] float64 logits; [T, 1] standardized predictions of a regression
    target: np.ndarray  # [T] int64 classes, or float64 standardized numbers
    owner: np.ndarray  # [T] in [0, n), ascending
    clients: int
    problem: Problem
    start_output: np.ndarray | None = None  # [T, C] of the model that all methods start from, for measures that need it
    weight: np.ndarray | None = None  # [T] float64 how much every example counts; None: all alike

    @cached_property
    def probability(self) -> np.ndarray:
        """[T, C]."""
        shifted = np.exp(self.output - self.output.max(1, keepdims=True))
        return np.asarray(shifted / shifted.sum(1, keepdims=True))

    @cached_property
    def truth(self) -> np.ndarray:
        """[T] the probability of the class that is there."""
        return np.asarray(self.probability[np.arange(len(self.target)), self.target])

    @cached_property
    def predicted(self) -> np.ndarray:
        return np.asarray(self.output.argmax(1))

    @cached_property
    def residual(self) -> np.ndarray:
        """[T] prediction − target, in the target's own unit."""
        return np.asarray((self.output[:, 0] - self.target) * self.problem.scale)

    def total(self, values: np.ndarray) -> np.ndarray:
        """[n] sums by client."""
        return np.bincount(self.owner, weights=self.weighted(values), minlength=self.clients)

    def weighted(self, values: np.ndarray) -> np.ndarray:
        """[T] every value as often as its example counts."""
        return values if self.weight is None else values * self.weight

    @property
    def count(self) -> np.ndarray:
        """[n] examples, each as often as it counts."""
        return np.bincount(self.owner, weights=self.weight, minlength=self.clients).astype(np.float64)

    @property
    def examples(self) -> np.ndarray:
        """[n] int64, whatever they count."""
        return np.bincount(self.owner, minlength=self.clients)

    def rows(self, index: np.ndarray) -> Judged:
        """Some of the examples, of the same clients."""
        return Drawn(self, index, self.owner[index], self.clients)


class Drawn(Judged):
    """The examples of `whole` at `index`, any number of times each, of other owners. What a measure asks of them is
    looked up there: a bootstrap computes it once for every example, not for every draw."""

    _whole: Judged
    _index: np.ndarray

    def __init__(self, whole: Judged, index: np.ndarray, owner: np.ndarray, clients: int) -> None:
        weight = None if whole.weight is None else whole.weight[index]
        vars(self).update(
            _whole=whole, _index=index, target=whole.target[index], owner=owner, clients=clients,
            problem=whole.problem, weight=weight,
        )  # fmt: skip

    @cached_property
    def output(self) -> np.ndarray:
        return np.asarray(self._whole.output[self._index])

    @cached_property
    def start_output(self) -> np.ndarray | None:
        start = self._whole.start_output
        return None if start is None else np.asarray(start[self._index])

    @cached_property
    def probability(self) -> np.ndarray:
        return np.asarray(self._whole.probability[self._index])

    @cached_property
    def truth(self) -> np.ndarray:
        return np.asarray(self._whole.truth[self._index])

    @cached_property
    def predicted(self) -> np.ndarray:
        return np.asarray(self._whole.predicted[self._index])

    @cached_property
    def residual(self) -> np.ndarray:
        return np.asarray(self._whole.residual[self._index])


Sums = tuple[np.ndarray, np.ndarray]  # numerators [n] and denominators [n]
Finish = Literal["", "root", "complement"]


@dataclass(frozen=True)
class Measure:
    name: str
    title: str
    definition: str
    sums: Callable[[Judged], Sums]
    higher_is_better: bool
    kinds: tuple[Kind, ...]
    percent: bool = True  # shown as 97.5 %; otherwise as it is
    finish: Finish = ""
    scorer: tuple[str, ...] = field(default=())  # what scikit-learn calls it
    slow: bool = False  # computed client by client: errors are estimated for few clients only
    needs_start: bool = False  # predictions of the model that all methods start from; computed for the headline only
    by_class: bool = False  # of two classes the rarer decides how sure it is, however many rows the other has

    def value(self, sums: Tensor) -> Tensor:
        """[...] from sums [..., 2]; NaN where it is undefined."""
        ratio = (sums[..., 0] / sums[..., 1].clamp_min(1e-300)).where(sums[..., 1] > 0, math.nan)
        return ratio.sqrt() if self.finish == "root" else 1 - ratio if self.finish == "complement" else ratio

    def support(self, judged: Judged) -> np.ndarray:
        """[n] how many examples a client's value rests on: all, or those of the rarer of two classes (`by_class`)."""
        if not self.by_class or judged.problem.kind != "binary":
            return judged.examples
        positive = np.bincount(judged.owner[judged.target == 1], minlength=judged.clients)
        return np.minimum(positive, judged.examples - positive)

    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"


def _accuracy(d: Judged) -> Sums:
    return d.total(d.predicted == d.target), d.count


def _recalls(d: Judged) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confusion by client: hits, examples and predictions [n, C] of every class."""
    classes, place = d.problem.num_classes, d.owner * d.problem.num_classes
    size = d.clients * classes
    hit = d.predicted == d.target
    tables = (
        np.bincount(place + d.target, weights=d.weighted(hit), minlength=size),
        np.bincount(place + d.target, weights=d.weight, minlength=size),
        np.bincount(place + d.predicted, weights=d.weight, minlength=size),
    )
    hits, examples, predictions = (table.reshape(-1, classes).astype(np.float64) for table in tables)
    return hits, examples, predictions


def _balanced_accuracy(d: Judged) -> Sums:
    hits, examples, _ = _recalls(d)
    present = examples > 0
    recall = np.divide(hits, examples, out=np.zeros_like(hits), where=present)
    mean = recall.sum(1) / present.sum(1).clip(1)
    return mean * d.count, d.count


def _f1(d: Judged) -> Sums:
    hits, examples, predictions = _recalls(d)
    if d.problem.kind == "binary":  # of the second class: 2 TP / (2 TP + FP + FN), which adds up over clients
        return 2 * hits[:, 1], examples[:, 1] + predictions[:, 1]
    either = examples + predictions
    f1 = np.divide(2 * hits, either, out=np.zeros_like(hits), where=either > 0)
    return f1.sum(1) / (either > 0).sum(1).clip(1) * d.count, d.count


def _auroc(d: Judged) -> Sums:
    """Pairs in the right order, ties half: U of Mann and Whitney; several classes one against the others, averaged over
    the classes that a client has."""
    if d.problem.kind == "binary":
        return _ordered_pairs(d, d.output[:, 1] - d.output[:, 0], d.target == 1)
    total, classes = np.zeros(d.clients), np.zeros(d.clients)
    for c in np.unique(d.target):
        # Only of clients that have the class: with many classes, and few of them at each client, that is what it costs.
        rows = np.flatnonzero((d.total(d.target == c) > 0)[d.owner])
        part = d.rows(rows)
        right, pairs = _ordered_pairs(part, part.probability[:, c], part.target == c)
        defined = pairs > 0
        total += np.divide(right, pairs, out=np.zeros_like(right), where=defined)
        classes += defined
    mean = np.divide(total, classes, out=np.zeros_like(total), where=classes > 0)
    weight = np.where(classes > 0, d.count, 0.0)
    return mean * weight, weight


def _ordered_pairs(d: Judged, score: np.ndarray, positive: np.ndarray) -> Sums:
    positives = d.total(positive)
    negatives = d.count - positives
    if d.weight is not None:
        return d.total(_weight_below(d, score, ~positive) * positive), positives * negatives
    rank_sum = d.total(_ranks(d.owner, score) * positive)
    return rank_sum - positives * (positives + 1) / 2, positives * negatives


def _ranks(owner: np.ndarray, score: np.ndarray) -> np.ndarray:
    """[T] the rank of every score among those of its client, from 1 on; equal scores share the mean of their ranks."""
    if not len(score):
        return np.zeros(0)
    order = np.lexsort((score, owner))
    sorted_owner, sorted_score = owner[order], score[order]
    first = np.r_[0, np.cumsum(np.bincount(owner))][sorted_owner]  # where a client begins
    new = np.r_[True, (sorted_owner[1:] != sorted_owner[:-1]) | (sorted_score[1:] != sorted_score[:-1])]
    group = np.cumsum(new) - 1
    begin = np.flatnonzero(new)
    end = np.r_[begin[1:], len(score)]
    ranks = np.empty(len(score))
    ranks[order] = (begin[group] + end[group] + 1) / 2 - first
    return ranks


def _weight_below(d: Judged, score: np.ndarray, of: np.ndarray) -> np.ndarray:
    """[T] the weight of the client's examples `of` (bool [T]) with a lower score, and half that of an equal one."""
    assert d.weight is not None
    below = np.zeros(len(score))
    if not len(score):
        return below
    order = np.lexsort((score, d.owner))
    owner, ordered = d.owner[order], score[order]
    passed = np.r_[0.0, np.cumsum((d.weight * of)[order])]
    begin = np.flatnonzero(np.r_[True, (owner[1:] != owner[:-1]) | (ordered[1:] != ordered[:-1])])
    end = np.r_[begin[1:], len(score)]
    first = np.r_[0, np.cumsum(d.examples)][owner]  # where a client begins
    below[order] = np.repeat((passed[begin] + passed[end]) / 2, end - begin) - passed[first]
    return below


def _average_precision(d: Judged) -> Sums:
    """Σ (recall step) · precision over thresholds, examples with equal scores together; weighted by positives."""
    score, positive = d.output[:, 1] - d.output[:, 0], d.target == 1
    order = np.lexsort((-score, d.owner))
    owner, hit, ordered = d.owner[order], d.weighted(positive)[order].astype(np.float64), score[order]
    start = np.r_[0, np.cumsum(d.examples)][owner]
    place = np.arange(len(owner))
    hits, passed = np.cumsum(hit), np.cumsum(np.ones(len(owner)) if d.weight is None else d.weight[order])
    before, passed_before = np.r_[0.0, hits][start], np.r_[0.0, passed][start]
    last = np.r_[(owner[1:] != owner[:-1]) | (ordered[1:] != ordered[:-1]), True] if len(owner) else np.zeros(0, bool)
    # Every example of a run of equal scores has the precision at the run's end.
    ends = np.flatnonzero(last)
    end = ends[np.searchsorted(ends, place)] if len(owner) else place
    precision = (hits[end] - before) / (passed[end] - passed_before)
    return np.bincount(owner, weights=precision * hit, minlength=d.clients), d.total(positive)


def _log_loss(d: Judged) -> Sums:
    with np.errstate(divide="ignore"):
        return d.total(-np.log(np.maximum(d.truth, 1e-300))), d.count


def _brier(d: Judged) -> Sums:
    if d.problem.kind == "binary":
        return d.total((d.probability[:, 1] - d.target) ** 2), d.count
    error = d.probability.copy()
    error[np.arange(len(d.target)), d.target] -= 1
    return d.total((error**2).sum(1)), d.count


def _calibration_error(d: Judged) -> Sums:
    """Of the class that is predicted: |share that is right − mean probability| over ten equal bins of probability."""
    sure = d.probability.max(1)
    bins = np.minimum((sure * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    gap = np.bincount(
        d.owner * CALIBRATION_BINS + bins,
        weights=d.weighted((d.predicted == d.target) - sure),
        minlength=d.clients * CALIBRATION_BINS,
    )
    return np.abs(gap).reshape(-1, CALIBRATION_BINS).sum(1), d.count


def _relative_false_accepts(d: Judged) -> Sums:
    if d.start_output is None:  # of what has no start, such as a constant prediction
        return np.zeros(d.clients), np.zeros(d.clients)
    from kinfed.engine.scoring.detection_rates import relative_sums  # with torch

    scores, start = (z[:, 1] - z[:, 0] for z in (d.output, d.start_output))
    return relative_sums(scores, start, d.target == 1, d.owner, d.clients)


def _squares(d: Judged) -> Sums:
    return d.total(d.residual**2), d.count


def _absolutes(d: Judged) -> Sums:
    return d.total(np.abs(d.residual)), d.count


def _unexplained(d: Judged) -> Sums:
    own = d.target * d.problem.scale
    mean = d.total(own) / np.maximum(d.count, 1e-300)
    spread = d.total((own - mean[d.owner]) ** 2)
    return d.total(d.residual**2), np.where(spread > 1e-12 * d.count, spread, 0.0)


_BOTH: tuple[Kind, ...] = ("binary", "multiclass")
_NUMBERS: tuple[Kind, ...] = ("regression",)


class _Measures(dict[str, Measure]):
    """Ours by name, over which one may iterate; scikit-learn's scorers are found by their names as well."""

    def __missing__(self, name: str) -> Measure:
        from kinfed.engine.scoring.scorers import scorer_measure  # it is made of measures

        measure = scorer_measure(name)
        if measure is None:
            raise KeyError(name)
        return measure


MEASURES = _Measures(
    (one.name, one)
    for one in (
        Measure("accuracy", "Accuracy", "Share of test examples that are classified correctly.", _accuracy, True, _BOTH,
                scorer=("accuracy",)),
        Measure("balanced_accuracy", "Balanced accuracy", "Mean over the classes of the share that is recognized, so "
                "that a rare class counts as much as a common one.", _balanced_accuracy, True, _BOTH,
                scorer=("balanced_accuracy",), by_class=True),
        Measure("f1", "F1", "Harmonic mean of precision and recall of the second class; of several classes the mean.",
                _f1, True, _BOTH, scorer=("f1", "f1_macro"), by_class=True),
        Measure("auroc", "AUROC", "Share of pairs of a positive and a negative example of one client that the model "
                "puts in the right order: 50 % is guessing, 100 % perfect; undefined where a client has one class.",
                _auroc, True, _BOTH, scorer=("roc_auc", "roc_auc_ovr"), by_class=True),
        Measure("average_precision", "Average precision", "Mean precision over the positive examples, from the surest "
                "to the least sure.", _average_precision, True, ("binary",), scorer=("average_precision",),
                by_class=True),
        Measure("log_loss", "Log loss", "Mean of −log of the probability given to the truth, in nats.", _log_loss,
                False, _BOTH, percent=False, scorer=("neg_log_loss",)),
        Measure("brier", "Brier score", "Mean squared distance of probabilities from the truth.", _brier, False, _BOTH,
                percent=False, scorer=("neg_brier_score",)),
        Measure("calibration_error", "Calibration error", "How far the probability of the predicted class is from the "
                "share that is right, over ten bins.", _calibration_error, False, _BOTH),
        Measure("relative_false_accepts", "Relative false accepts", "False accepts per false accept of the model that "
                "all methods start from, where both miss 5 % of the positive rows.", _relative_false_accepts, False,
                ("binary",), percent=False, slow=True, needs_start=True),
        Measure("rmse", "RMSE", "Root of the mean squared error, in the target's own unit: lower is better.", _squares,
                False, _NUMBERS, percent=False, finish="root", scorer=("neg_root_mean_squared_error",)),
        Measure("mae", "MAE", "Mean absolute error, in the target's own unit: lower is better.", _absolutes, False,
                _NUMBERS, percent=False, scorer=("neg_mean_absolute_error",)),
        Measure("r2", "R²", "Share of the variance inside a client that the model explains: 0 is as good as the "
                "client's own mean, below 0 worse.", _unexplained, True, _NUMBERS, percent=False, finish="complement",
                scorer=("r2",)),
    )
)  # fmt: skip
_SCORERS = {scorer: one.name for one in MEASURES.values() for scorer in one.scorer}


def measures_of(problem: Problem) -> list[Measure]:
    """All that are defined for the problem and need nothing but a model's predictions."""
    return [one for one in MEASURES.values() if problem.kind in one.kinds and not one.needs_start]


def headline_name(name: str) -> str:
    """Our name of a metric that may be given by scikit-learn's."""
    return _SCORERS.get(name, name)


def headline_measure(problem: Problem, name: str | None) -> Measure:
    """The measure by which a run's methods are compared: the one of that name, ours or scikit-learn's, else accuracy or
    RMSE. One that does not fit the problem is refused."""
    default = "rmse" if problem.is_regression else "accuracy"
    name = headline_name(name or default)
    if name not in MEASURES:
        from kinfed.engine.scoring.scorers import check_scorer, scorer_names  # they are made of measures

        if name not in scorer_names():
            raise unknown_name("metric", name, [*MEASURES, *scorer_names()])
        check_scorer(name, problem)
        return MEASURES[name]
    if problem.kind not in MEASURES[name].kinds:
        fitting = ", ".join(one.name for one in measures_of(problem))
        raise ConfigError(f"metric {name} is not for {problem.in_words()}; choose one of {fitting}")
    return MEASURES[name]


def find_measure(name: str) -> Measure | None:
    """The measure of that name, ours or scikit-learn's, if there is one."""
    try:
        return MEASURES[name]
    except KeyError:
        return None
