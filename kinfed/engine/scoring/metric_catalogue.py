"""The metrics of classes and numbers that kinfed brings: their sums over a client's examples. Needs no torch."""

import numpy as np

from kinfed.data import Kind
from kinfed.engine.scoring import outcome_metrics  # noqa: F401  # registers the metrics of all other kinds
from kinfed.engine.scoring.metrics import METRICS as METRICS
from kinfed.engine.scoring.metrics import Judged, Sums
from kinfed.engine.scoring.metrics import add_metric as _add

_CLASSES: tuple[Kind, ...] = ("binary", "multiclass")
_ORDERED: tuple[Kind, ...] = (*_CLASSES, "ordinal")
_NUMBERS: tuple[Kind, ...] = ("regression",)
_AMOUNTS: tuple[Kind, ...] = ("regression", "counts")
_SHARE = {"unit": "%", "kinds": _CLASSES}
_LOWER = {"higher_is_better": False}


@_add("accuracy", "Accuracy", "Share of test examples that are classified correctly.", "accuracy",
      unit="%", kinds=_ORDERED)  # fmt: skip
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


@_add("balanced_accuracy", "Balanced accuracy", "Mean over the classes of the share that is recognized, so that a rare "
      "class counts as much as a common one.", "balanced_accuracy", by_class=True, **_SHARE)  # fmt: skip
def _balanced_accuracy(d: Judged) -> Sums:
    hits, examples, _ = _recalls(d)
    present = examples > 0
    recall = np.divide(hits, examples, out=np.zeros_like(hits), where=present)
    mean = recall.sum(1) / present.sum(1).clip(1)
    return mean * d.count, d.count


@_add("f1", "F1", "Harmonic mean of precision and recall of the second class; of several classes the mean.",
      "f1", "f1_macro", by_class=True, **_SHARE)  # fmt: skip
def _f1(d: Judged) -> Sums:
    hits, examples, predictions = _recalls(d)
    if d.problem.kind == "binary":  # of the second class: 2 TP / (2 TP + FP + FN), which adds up over clients
        return 2 * hits[:, 1], examples[:, 1] + predictions[:, 1]
    either = examples + predictions
    f1 = np.divide(2 * hits, either, out=np.zeros_like(hits), where=either > 0)
    return f1.sum(1) / (either > 0).sum(1).clip(1) * d.count, d.count


@_add("auroc", "AUROC", "Share of pairs of a positive and a negative example of one client that the model puts in the "
      "right order: 50 % is guessing, 100 % perfect; undefined where a client has one class.",
      "roc_auc", "roc_auc_ovr", by_class=True, **_SHARE)  # fmt: skip
def _auroc(d: Judged) -> Sums:
    """Pairs in the right order, ties half (U of Mann and Whitney); the mean of a client's classes against others."""
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
    return d.total(_weight_below(d, score, ~positive) * positive), positives * negatives


def _weight_below(d: Judged, score: np.ndarray, of: np.ndarray) -> np.ndarray:
    """[T] the weight of the client's examples `of` (bool [T]) with a lower score, and half that of an equal one."""
    below = np.zeros(len(score))
    if not len(score):
        return below
    order = np.lexsort((score, d.owner))
    owner, ordered = d.owner[order], score[order]
    passed = np.r_[0.0, np.cumsum(d.weighted(of.astype(np.float64))[order])]
    begin = np.flatnonzero(np.r_[True, (owner[1:] != owner[:-1]) | (ordered[1:] != ordered[:-1])])
    end = np.r_[begin[1:], len(score)]
    first = np.r_[0, np.cumsum(d.examples)][owner]  # where a client begins
    below[order] = np.repeat((passed[begin] + passed[end]) / 2, end - begin) - passed[first]
    return below


@_add("average_precision", "Average precision", "Mean precision over the positive examples, from the surest to the "
      "least sure.", "average_precision", by_class=True, unit="%", kinds=("binary",))  # fmt: skip
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


@_add("log_loss", "Log loss", "Mean of −log of the probability given to the truth, in nats.", "neg_log_loss",
      kinds=_ORDERED, **_LOWER)  # fmt: skip
def _log_loss(d: Judged) -> Sums:
    with np.errstate(divide="ignore"):
        return d.total(-np.log(np.maximum(d.truth, 1e-300))), d.count


@_add("brier", "Brier score", "Mean squared distance of probabilities from the truth.", "neg_brier_score",
      kinds=_CLASSES, **_LOWER)  # fmt: skip
def _brier(d: Judged) -> Sums:
    if d.problem.kind == "binary":
        return d.total((d.probability[:, 1] - d.target) ** 2), d.count
    error = d.probability.copy()
    error[np.arange(len(d.target)), d.target] -= 1
    return d.total((error**2).sum(1)), d.count


@_add("calibration_error", "Calibration error", "How far the probability of the predicted class is from the share that "
      "is right, over ten bins.", **_SHARE, **_LOWER)  # fmt: skip
def _calibration_error(d: Judged) -> Sums:
    """|share that is right − mean probability| of the predicted class, over ten equal bins of probability."""
    sure = d.probability.max(1)
    gap = d.binned(sure, d.weighted((d.predicted == d.target) - sure))
    return np.abs(gap).sum(1), d.count


@_add("relative_false_accepts", "Relative false accepts", "False accepts per false accept of the model that all "
      "methods start from, where both miss 5 % of the positive rows.",
      kinds=("binary",), slow=True, needs_start=True, **_LOWER)  # fmt: skip
def _relative_false_accepts(d: Judged) -> Sums:
    if d.start_output is None:  # of what has no start, such as a constant prediction
        return np.zeros(d.clients), np.zeros(d.clients)
    from kinfed.engine.scoring.score import relative_sums  # with torch

    scores, start = (z[:, 1] - z[:, 0] for z in (d.output, d.start_output))
    return relative_sums(scores, start, d.target == 1, d.owner, d.clients)


@_add("rmse", "RMSE", "Root of the mean squared error, in the target's own unit: lower is better.",
      "neg_root_mean_squared_error", kinds=_AMOUNTS, finish="root", **_LOWER)  # fmt: skip
def _squares(d: Judged) -> Sums:
    return d.known_total(d.residual**2)


@_add("mae", "MAE", "Mean absolute error, in the target's own unit: lower is better.", "neg_mean_absolute_error",
      kinds=_AMOUNTS, **_LOWER)  # fmt: skip
def _absolutes(d: Judged) -> Sums:
    return d.known_total(np.abs(d.residual))


@_add("r2", "R²", "Share of the variance inside a client that the model explains: 0 is as good as the client's own "
      "mean, below 0 worse.", "r2", kinds=_NUMBERS, finish="complement")  # fmt: skip
def _unexplained(d: Judged) -> Sums:
    if d.problem.shape:
        return _several_unexplained(d)
    own = d.target * d.problem.scale
    mean = d.total(own) / np.maximum(d.count, 1e-300)
    spread = d.total((own - mean[d.owner]) ** 2)
    return d.total(d.residual**2), np.where(spread > 1e-12 * d.count, spread, 0.0)


def _several_unexplained(d: Judged) -> Sums:
    """Squares of residuals and of distances from the client's own means, over all numbers that are known."""
    flat = d.target.reshape(len(d.target), -1)
    sums = [d.known_total(column[:, None]) for column in flat.T]
    means = np.stack([total / np.maximum(count, 1e-300) for total, count in sums], 1)
    return d.known_total(d.residual**2)[0], d.known_total((flat - means[d.owner]) ** 2)[0]
