"""Boosted trees of other packages as references on pooled rows: LightGBM with the site as a category, and GPBoost,
which boosts trees beside an intercept per site (a random effect). Both are optional: the extra `references`.

Like estimators of scikit-learn they have `fit`, `predict`, `predict_proba` and `classes_`; the last column is the site.
A tenth of the rows is set aside to stop boosting early."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from kinfed.errors import MissingDataError

Floats = NDArray[np.float64]
STOP_AFTER = 20  # trees without a better loss on the rows set aside
HELD_OUT = 0.1


def package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDataError(f"{name} is not installed: pip install 'kinfed-papers[references]'") from error


def _held_out(y: NDArray[Any], classes: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of rows that train, and of those that stop boosting."""
    common = classes and int(np.unique(y, return_counts=True)[1].min()) > 1
    train, held = train_test_split(
        np.arange(len(y)), test_size=HELD_OUT, random_state=seed, stratify=y if common else None
    )
    return np.sort(train), np.sort(held)


class LightGBM:
    def __init__(self, classes: int, seed: int, **settings: Any) -> None:
        self._package, self._classes, self._seed, self._settings = package("lightgbm"), classes, seed, settings

    def fit(self, x: Floats, y: NDArray[Any], sample_weight: Floats | None = None) -> LightGBM:
        lgb, site = self._package, x.shape[1] - 1
        kind = lgb.LGBMClassifier if self._classes else lgb.LGBMRegressor
        train, held = _held_out(y, self._classes, self._seed)
        self._model = kind(random_state=self._seed, verbose=-1, n_jobs=1, deterministic=True, **self._settings)
        self._model.fit(
            x[train], y[train], sample_weight=None if sample_weight is None else sample_weight[train],
            eval_X=x[held], eval_y=y[held], categorical_feature=[site],
            callbacks=[lgb.early_stopping(STOP_AFTER, verbose=False), lgb.log_evaluation(0)],
        )  # fmt: skip
        self.classes_ = self._model.classes_ if self._classes else None
        return self

    def predict(self, x: Floats) -> Floats:
        return np.asarray(self._model.predict(x))

    def predict_proba(self, x: Floats) -> Floats:
        return np.asarray(self._model.predict_proba(x))


class GPBoost:
    """Numbers and two classes."""

    def __init__(self, classes: int, seed: int, trees: int, **settings: Any) -> None:
        self._package, self._classes, self._trees = package("gpboost"), classes, trees
        self._settings = {"verbose": -1, "num_threads": 1, "seed": seed, "deterministic": True, **settings}
        self._seed, self.classes_ = seed, np.arange(2) if classes else None

    def fit(self, x: Floats, y: NDArray[Any], sample_weight: Floats | None = None) -> GPBoost:
        gpb, likelihood = self._package, "bernoulli_logit" if self._classes else "gaussian"
        train, held = _held_out(y, self._classes, self._seed)

        def dataset(rows: NDArray[np.int64]) -> Any:
            counted = None if sample_weight is None else sample_weight[rows]
            return gpb.Dataset(x[rows, :-1], y[rows].astype(np.float64), weight=counted)

        groups = gpb.GPModel(group_data=x[train, -1], likelihood=likelihood, num_parallel_threads=1)
        groups.set_prediction_data(group_data_pred=x[held, -1])
        self._groups, inside = groups, dataset(train)
        self._model = gpb.train(
            params=self._settings, train_set=inside, gp_model=groups, num_boost_round=self._trees,
            valid_sets=dataset(held), early_stopping_rounds=STOP_AFTER, verbose_eval=False,
        )  # fmt: skip
        return self

    def predict(self, x: Floats) -> Floats:
        says = self._model.predict(
            x[:, :-1], group_data_pred=x[:, -1], pred_latent=False, num_iteration=self._model.best_iteration
        )
        return np.asarray(says["response_mean"], np.float64)

    def predict_proba(self, x: Floats) -> Floats:
        p = self.predict(x)
        return np.column_stack([1 - p, p])
