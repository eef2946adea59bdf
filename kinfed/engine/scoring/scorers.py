"""scikit-learn's scorers by name as metrics: what is computed from test predictions, client by client.

    --metric matthews_corrcoef          --metric neg_mean_absolute_percentage_error

A value has scikit-learn's sign (higher is better). A scorer knows no sums, so the value of all clients is the mean of
theirs, weighted by test rows; where it cannot be computed (a client with one class, a prediction outside of its domain)
it is undefined at that client. Weights of rows are its `sample_weight`; scorers without one are refused where rows have
weights. Those that kinfed computes itself, as sums, are in kinfed.engine.scoring.metric_catalogue. Refused by name:
scorers of clusterings, of several labels per row, and of the other kind of problem.
"""

import warnings
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from kinfed.data import Kind, Problem
from kinfed.engine.scoring.metrics import Judged, Metric, Sums
from kinfed.errors import ConfigError

CLUSTERINGS = (
    "adjusted_mutual_info_score", "adjusted_rand_score", "completeness_score", "fowlkes_mallows_score",
    "homogeneity_score", "mutual_info_score", "normalized_mutual_info_score", "rand_score", "v_measure_score",
)  # fmt: skip
NUMBERS = (
    "d2_absolute_error_score", "explained_variance", "neg_max_error", "neg_mean_absolute_error",
    "neg_mean_absolute_percentage_error", "neg_mean_gamma_deviance", "neg_mean_poisson_deviance",
    "neg_mean_squared_error", "neg_mean_squared_log_error", "neg_median_absolute_error", "neg_root_mean_squared_error",
    "neg_root_mean_squared_log_error", "r2",
)  # fmt: skip
SAMPLES = "_samples"  # the end of names for several labels per row
_CLASSES: tuple[Kind, ...] = ("binary", "multiclass")


@cache
def scorer_names() -> tuple[str, ...]:
    from sklearn.metrics import get_scorer_names

    return tuple(get_scorer_names())


@cache
def scorer_metric(name: str) -> Metric | None:
    """The metric of that name; None if scikit-learn has no such scorer, or none for one label per row."""
    if name not in scorer_names() or name in CLUSTERINGS or name.endswith(SAMPLES):
        return None
    return Metric(
        name=name, title=name,
        definition=f"scikit-learn's scorer {name}: higher is better; of all clients the mean by test rows.",
        function=lambda judged: _sums(name, judged), of="examples",
        kinds=("regression", "counts") if name in NUMBERS else _CLASSES, slow=True,
    )  # fmt: skip


def check_scorer(name: str, problem: Problem) -> None:
    """Refuse a scorer that does not fit the problem, with the reason."""
    if name in CLUSTERINGS:
        raise ConfigError(f"metric {name} compares clusterings, and here rows have labels; choose another one")
    if name.endswith(SAMPLES):
        raise ConfigError(f"metric {name} is for several labels per row, and here a row has one; choose another one")
    metric = scorer_metric(name)
    assert metric is not None  # the caller knows the name
    if problem.kind not in metric.kinds or problem.shape:
        what = "numbers" if name in NUMBERS else "classes"
        raise ConfigError(f"metric {name} is for {what}, and the problem is {problem.in_words()}; choose another one")
    if not problem.classifies:
        return
    # Three of four rows of every class are right: only the problem can be what a scorer objects to, or warns of.
    # `f1` is for two classes, `f1_macro` for more; the best two of two classes are always right.
    target = np.repeat(np.arange(problem.num_classes), 4)
    predicted = np.where(np.arange(len(target)) % 4, target, (target + 1) % problem.num_classes)
    trial = Judged(np.eye(problem.num_classes)[predicted], target, np.zeros(len(target), np.int64), 1, problem)
    try:
        _value(name, trial, warning="error")
    except (ValueError, UserWarning) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"metric {name} is not for {problem.in_words()}: {reason}") from None


def _sums(name: str, judged: Judged) -> Sums:
    values, weights = np.zeros(judged.clients), np.zeros(judged.clients)
    ends = np.searchsorted(judged.owner, np.arange(judged.clients + 1))
    for client, (begin, end) in enumerate(pairwise(ends)):
        if begin == end:
            continue
        try:
            value = _value(name, judged.rows(np.arange(begin, end)))
        except ValueError:  # undefined here
            continue
        if np.isfinite(value):
            count = end - begin if judged.weight is None else judged.weight[begin:end].sum()
            values[client], weights[client] = value * count, count
    return values, weights


def _value(name: str, judged: Judged, warning: Literal["ignore", "error"] = "ignore") -> float:
    """scikit-learn warns of what is undefined, and gives a number or NaN."""
    from sklearn.metrics import get_scorer

    classes, numbers = _estimators()
    rows, target = np.arange(len(judged.target))[:, None], judged.target
    model = classes(judged) if judged.problem.classifies else numbers(judged)
    if judged.problem.is_regression:
        target = judged.problem.restored(target)
    with warnings.catch_warnings():
        warnings.simplefilter(warning)
        weight = {} if judged.weight is None else {"sample_weight": judged.weight}
        try:
            return float(get_scorer(name)(model, rows, target, **weight))
        except TypeError:
            if judged.weight is None:
                raise
            raise ConfigError(f"metric {name} takes no weights of rows; leave them out, or choose another") from None


@cache
def _estimators() -> tuple[Any, Any]:
    """A classifier and a regressor for scikit-learn: they give the known predictions, by row."""
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

    class FixedClasses(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
        def __init__(self, judged: Judged) -> None:
            self.judged, self.classes_ = judged, np.arange(judged.problem.num_classes)

        def predict(self, rows: np.ndarray) -> Any:
            return self.judged.predicted[rows[:, 0]]

        def predict_proba(self, rows: np.ndarray) -> Any:
            return self.judged.probability[rows[:, 0]]

    class FixedNumbers(RegressorMixin, BaseEstimator):  # type: ignore[misc]
        def __init__(self, judged: Judged) -> None:
            self.judged = judged

        def predict(self, rows: np.ndarray) -> Any:
            return self.judged.problem.predicted(self.judged.output[rows[:, 0]])

    return FixedClasses, FixedNumbers
