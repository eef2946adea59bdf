"""Personal models as scikit-learn estimators.

    model = PersonalizedClassifier().fit(X, y, client=hospital)      hospital [n]: whose row it is
    model.predict(X_new, client=hospital_new)                        each row by its client's own model
    model.predict(X_new)                                             the server's model: clients that were not there
    model.adopt(X_new, y_new, client="new")                          a model of its own for one that was not there

`algorithm="auto"` chooses for every client among a portfolio, by folds of its rows and partial pooling (`kinfed fit`);
any name of `kinfed list algorithms` trains that one method. Rows are arrays of numbers or frames (pandas, polars,
pyarrow) with categories, dates and gaps. Without `client` all rows are of one client.

`sample_weight` says how much rows count: in training, and with "auto" in the choice, too. Rows of weight 0 are left
out. A row of weight 2 counts twice in the loss; it is not drawn twice into batches, so that models are not those of a
table in which it stands twice, but close to them.

A client that was not there gets the server's model. `adopt` gives it one of its own, from labelled rows of its own and
what the others have learnt: by the method's own rule for newcomers (kinfed.newcomers.adoption), with "auto" by what
serves the clients of the fit best on average. No other model changes.

In pipelines, searches and cross-validation clients are best a column of the frame, which every step and every scorer
sees:

    model = PersonalizedClassifier(client_column="hospital")
    cross_validate(model, X, y, scoring="roc_auc")                   X has a column hospital; it is no feature

As an argument, `client` is metadata, which scikit-learn routes where it is asked to; but its scorers by name, such as
roc_auc, know no metadata of predictions, and ask the server's model then:

    sklearn.set_config(enable_metadata_routing=True)
    model = PersonalizedClassifier().set_fit_request(client=True).set_score_request(client=True)
    cross_validate(model, X, y, params={"client": hospital})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from kinfed.data import Problem, example_weights, read_target
from kinfed.engine import METRICS, Judged
from kinfed.errors import KinfedError
from kinfed.tabular import TARGET, Array, PersonalizedEstimator, client_names, rows_that_count


class PersonalizedClassifier(ClassifierMixin, PersonalizedEstimator):  # type: ignore[misc]
    """A classifier for every client, and one for clients that were not there."""

    __doc__ = f"""{__doc__}

    class_weight   how much classes count in training: None, "balanced" (over the rows of all clients), "by_client"
                   (over those of each), or {{class: weight}}, where others have 1

    {PersonalizedEstimator.__doc__}"""
    _task = "classification"

    def __init__(
        self, algorithm: str = "auto", *, model: str = "mlr", options: Mapping[str, Any] | None = None,
        rounds: int = 30, steps: int = 20, lr: float = 0.05, trials: int = 1, folds: int = 3, metric: str = "auto",
        class_weight: Mapping[Any, float] | str | None = None, client_column: str | None = None,
        person_column: str | None = None, order_column: str | None = None, random_state: int | None = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            algorithm, model=model, options=options, rounds=rounds, steps=steps, lr=lr, trials=trials, folds=folds,
            metric=metric, client_column=client_column, person_column=person_column, order_column=order_column,
            random_state=random_state,
        )  # fmt: skip
        self.class_weight = class_weight

    @property
    def _class_weights(self) -> str:
        if self.class_weight is None:
            return example_weights.NONE
        if isinstance(self.class_weight, str):
            if self.class_weight not in (example_weights.BALANCED, example_weights.BY_CLIENT):
                raise ValueError(
                    f"class_weight is {example_weights.BALANCED}, {example_weights.BY_CLIENT} or {{class: weight}}; "
                    f"got {self.class_weight!r}"
                )
            return self.class_weight
        codes = {label: f"{code:09d}" for code, label in enumerate(self.classes_.tolist())}
        if unknown := [label for label in self.class_weight if label not in codes]:
            raise ValueError(f"class_weight names {unknown[0]!r}, which is no class of y; these are {list(codes)}")
        return (
            ",".join(f"{codes[label]}={weight!r}" for label, weight in self.class_weight.items())
            or example_weights.NONE
        )

    def fit(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> PersonalizedClassifier:
        """Rows X [n, d], their classes y [n], whose they are, client [n], and how much they count."""
        X, client = self._rows(X, client)
        X, y = self._validated(X, y, reset=True)
        check_classification_targets(y)
        X, y, client, weights = rows_that_count(sample_weight, X, y, client)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class only ({self.classes_[0]}); a classifier needs two")
        self._fit(X, self._class_names(y), client, weights)
        return self

    def adopt(self, X: Any, y: Any, client: str, sample_weight: Any = None) -> PersonalizedClassifier:
        """A model for a client that was not there, from its own rows X [n, d] and their classes y [n], of which it
        need not have all."""
        check_is_fitted(self)
        X, y = self._validated(self._features_alone(X), y, reset=False)
        if unknown := sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()), key=str):
            known = ", ".join(map(str, self.classes_))
            raise ValueError(f"y holds classes that were not there at fit ({unknown[0]!r}); known are {known}")
        X, y, _, weights = rows_that_count(sample_weight, X, y, None)
        self._adopt(X, self._class_names(y), client, weights)
        return self

    def _class_names(self, y: Array) -> list[str]:
        """Texts in the order of the classes."""
        return [f"{code:09d}" for code in np.searchsorted(self.classes_, y)]

    def predict_proba(self, X: Any, client: Any = None) -> Array:
        """[n, C] in the order of `classes_`."""
        return _softmax(self._outputs(X, client))

    def predict(self, X: Any, client: Any = None) -> Array:
        """[n] classes."""
        logits = self._outputs(X, client)
        return np.asarray(self.classes_[logits.argmax(1)])

    def predict_set(self, X: Any, client: Any = None, level: float = 0.9) -> Array:
        """[n, C] which of `classes_` are in each row's prediction set, the likeliest always: it holds the truth about
        so often (algorithm="auto" has folds to calibrate it by; sets of new clients count all clients alike)."""
        logits, thresholds = self._answers(X, client, level)
        p = _softmax(logits)
        inside = 1 - p <= thresholds[:, None]
        inside[np.arange(len(p)), p.argmax(1)] = True
        return np.asarray(inside)

    def score(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> float:
        """Accuracy."""
        return float(np.average(self.predict(X, client) == np.asarray(y), weights=sample_weight))


class PersonalizedRegressor(RegressorMixin, PersonalizedEstimator):  # type: ignore[misc]
    """A regression for every client, and one for clients that were not there."""

    __doc__ = f"{__doc__}\n\n    {PersonalizedEstimator.__doc__}"
    _task = "regression"

    def fit(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> PersonalizedRegressor:
        """Rows X [n, d], their numbers y [n], whose they are, client [n], and how much they count."""
        X, client = self._rows(X, client)
        X, y = self._validated(X, y, reset=True, y_numeric=True)
        X, y, client, weights = rows_that_count(sample_weight, X, y, client)
        self._fit(X, np.asarray(y, dtype=np.float64).tolist(), client, weights)
        return self

    def adopt(self, X: Any, y: Any, client: str, sample_weight: Any = None) -> PersonalizedRegressor:
        """A model for a client that was not there, from its own rows X [n, d] and their numbers y [n]."""
        check_is_fitted(self)
        X, y = self._validated(self._features_alone(X), y, reset=False, y_numeric=True)
        X, y, _, weights = rows_that_count(sample_weight, X, y, None)
        self._adopt(X, np.asarray(y, dtype=np.float64).tolist(), client, weights)
        return self

    def predict(self, X: Any, client: Any = None) -> Array:
        """[n] numbers in the target's own unit."""
        return np.asarray(self._outputs(X, client)[:, 0])

    def predict_set(self, X: Any, client: Any = None, level: float = 0.9) -> Array:
        """[n, 2] ends of intervals that hold the truth about so often (with algorithm="auto", which has folds to
        calibrate them; at a new client they count all clients alike)."""
        outputs, thresholds = self._answers(X, client, level)
        return np.asarray(np.stack([outputs[:, 0] - thresholds, outputs[:, 0] + thresholds], 1))

    def score(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> float:
        """R²."""
        from sklearn.metrics import r2_score

        return float(r2_score(y, self.predict(X, client), sample_weight=sample_weight))


TIME, EVENT = "time of the row", "event of the row"  # columns beside the features


class PersonalizedSurvival(PersonalizedEstimator):
    """A survival model for every client, and one for clients that were not there.

    `y` is [n, 2], time and event, or a structured array of a boolean and a number, as scikit-survival has it."""

    __doc__ = f"{__doc__}\n\n    {PersonalizedEstimator.__doc__}"
    _task = "survival"

    def fit(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> PersonalizedSurvival:
        """Rows X [n, d], their times and events y, whose they are, client [n], and how much they count."""
        X, client = self._rows(X, client)
        X = self._validated(X, reset=True)
        X, y, client, weights = rows_that_count(sample_weight, X, _times_and_events(y), client)
        self._fit(X, y.tolist(), client, weights)
        self.periods_ = np.array(next(iter(self._pipelines.values())).inputs.problem.periods)
        return self

    def adopt(self, X: Any, y: Any, client: str, sample_weight: Any = None) -> PersonalizedSurvival:
        """A model for a client that was not there, from its own rows X [n, d] and their times and events."""
        check_is_fitted(self)
        X = self._validated(self._features_alone(X), reset=False)
        X, y, _, weights = rows_that_count(sample_weight, X, _times_and_events(y), None)
        self._adopt(X, y.tolist(), client, weights)
        return self

    def _table(self, X: Any, labels: list[Any], weights: Array | None) -> dict[str, Any]:
        times, events = zip(*labels, strict=True)
        table = super()._table(X, list(times), weights)
        return {TIME if name == TARGET else name: values for name, values in table.items()} | {EVENT: list(events)}

    def _table_options(self, weights: Array | None) -> dict[str, Any]:
        survival = {"label_column": None, "time_column": TIME, "event_column": EVENT}
        return {**super()._table_options(weights), **survival}

    def predict_survival(self, X: Any, client: Any = None) -> Array:
        """[n, periods] chances of being without the event at the end of each period, `periods_`."""
        outputs = self._outputs(X, client)
        problem = next(iter(self._pipelines.values())).inputs.problem
        return np.asarray(problem.predicted(outputs))

    def predict(self, X: Any, client: Any = None) -> Array:
        """[n] risks: the cumulative hazard at the end of the last period. Higher is earlier."""
        return np.asarray(-np.log(np.maximum(self.predict_survival(X, client)[:, -1], 1e-300)))

    def score(self, X: Any, y: Any, client: Any = None) -> float:
        """C-index of pairs of rows of the same client."""
        frame, names = self._rows(X, client)
        owners = np.unique(client_names(names, len(frame)), return_inverse=True)[1]
        risk, target = self.predict(X, client), _times_and_events(y)
        problem = Problem("survival", shape=(2,), periods=(1.0,), hazards=(1.0,))
        order = np.argsort(owners, kind="stable")
        output = np.log(np.maximum(risk[order, None], 1e-300))
        judged = Judged(output, target[order], owners[order], int(owners.max()) + 1, problem)
        right, pairs = METRICS.named("concordance").sums(judged)
        return float(right.sum() / pairs.sum()) if pairs.sum() else float("nan")


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(shifted / shifted.sum(1, keepdims=True))


def _times_and_events(y: Any) -> Array:
    """[n, 2] float64; errors are scikit-learn's kind."""
    try:
        return np.asarray(read_target(y, "y", "survival").labels.numpy())
    except KinfedError as error:
        raise ValueError(str(error)) from error
