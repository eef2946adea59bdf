"""References: what a data scientist would take instead, on the same encoded rows and the same splits.

    linear alone    ridge or logistic regression at every site by itself; its penalty by cross-validation there
    trees alone     boosted trees at every site by itself (scikit-learn's HistGradientBoosting)
    pooled trees    one of these on the rows of all sites in one place, with the site as a category or without it

None of them is federated, and nothing is chosen by them. Pooled trees need all rows in one place: they show what could
be had without sites. Test rows are not seen.

Probabilities of a class are (n p + 1 / C) / (n + 1) with n training rows, as if one more row were shared out among the
classes: a class that a site has never seen has a chance there, as it has in every network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder
from threadpoolctl import threadpool_limits
from torch import Tensor

from kinfed.data import Federation

Floats = NDArray[np.float64]
Settings = Mapping[str, Any]
Maker = Callable[[Settings], Any]  # an estimator with these settings

LINEAR_ALONE, TREES_ALONE, POOLED_TREES = "linear_alone", "trees_alone", "pooled_trees"
POOLED = (POOLED_TREES,)  # references that need the rows of all sites in one place
ALPHAS = tuple(np.logspace(-2, 4, 13))  # of ridge, for standardized columns
STRENGTHS = tuple({"C": float(C)} for C in np.logspace(-3, 2, 6))  # of logistic regression
# Values of a table from which the threads of trees pay: on small ones they wait for each other at every node, and on a
# busy machine hardly come to anything else.
WORTH_THREADS = 1_000_000
MOST_CATEGORIES = 254  # that HistGradientBoosting takes; more sites enter by the mean of their training targets
FEW_OF_A_CLASS = 10  # rows up to which none is set aside to stop boosting early


@dataclass(frozen=True)
class ReferenceRows:
    """ReferenceRows as arrays: what references are trained on and asked about."""

    x: Floats  # [n, F] as models of kinfed see them
    y: NDArray[Any]  # [n] classes, or numbers in their own unit
    site: NDArray[np.int64]  # [n]
    weight: Floats | None  # [n] how much each counts in training

    def take(self, places: NDArray[Any]) -> ReferenceRows:
        weight = None if self.weight is None else self.weight[places]
        return replace(self, x=self.x[places], y=self.y[places], site=self.site[places], weight=weight)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class ReferenceData:
    """Training and test rows of a federation of classes or single numbers; test rows in the order of `data.test`."""

    train: ReferenceRows
    test: ReferenceRows
    sites: int
    classes: int  # 0: numbers
    seed: int = 0

    @classmethod
    def of(cls, data: Federation, seed: int = 0) -> ReferenceData:
        def rows(split: str) -> ReferenceRows:
            ragged = data.split(split)
            x = data.features.gather(ragged.rows).flatten(1).double().numpy()
            weight = None if data.weights is None else data.weights[ragged.rows].double().numpy()
            return ReferenceRows(x, data.labels[ragged.rows].numpy(), ragged.owner.numpy(), weight)

        classes = data.num_classes if data.problem.classifies else 0
        return cls(rows("train"), rows("test"), data.num_clients, classes, seed)

    def fitted(self, make: Maker, tries: Sequence[Settings], train: ReferenceRows, folds: int = 5) -> Any:
        """An estimator with the settings that cross-validation of these rows prefers; the first where they are too few,
        and None if all are of one class."""
        if self.classes and len(np.unique(train.y)) < 2:
            return None
        best = tries[0] if len(tries) == 1 else min(tries, key=self._losses(make, tries, train, folds))
        return _fit(make(best), train)

    def _losses(
        self, make: Maker, tries: Sequence[Settings], train: ReferenceRows, folds: int
    ) -> Callable[[Settings], float]:
        """Mean loss of settings over folds: log loss of classes, squared error of numbers."""
        rarest = int(np.unique(train.y, return_counts=True)[1].min()) if self.classes else len(train)
        folds = min(folds, rarest)
        if folds < 2:
            return lambda settings: 0.0
        split = (StratifiedKFold if self.classes else KFold)(folds, shuffle=True, random_state=self.seed)
        parts = list(split.split(train.x, train.y if self.classes else None))
        losses = {}
        for place, settings in enumerate(tries):
            total = 0.0
            for inside, outside in parts:
                part = train.take(inside)
                says = self.says(_fit(make(settings), part), part, train.take(outside))
                total += self._loss(says, train.y[outside])
            losses[id(tries[place])] = total
        return lambda settings: losses[id(settings)]

    def _loss(self, says: Floats, y: NDArray[Any]) -> float:
        if not self.classes:
            return float(((says[:, 0] - y) ** 2).sum())
        return float(-says[np.arange(len(y)), y.astype(np.int64)].sum())

    def says(self, model: Any, train: ReferenceRows, rows: ReferenceRows) -> Floats:
        """[n, C] log p of classes, or [n, 1] numbers; None is a model of the shares of classes alone."""
        if not self.classes:
            return np.asarray(model.predict(rows.x), np.float64)[:, None]
        n, C = len(train), self.classes
        p = np.zeros((len(rows), C))
        if model is None:
            p += np.bincount(train.y.astype(np.int64), minlength=C) / n
        else:
            p[:, model.classes_.astype(np.int64)] = model.predict_proba(rows.x)
        return np.asarray(np.log((n * p + 1 / C) / (n + 1)))

    @cached_property
    def with_site(self) -> tuple[ReferenceData, int | None]:
        """The data with one more column, the site, and its place where it is a category: beyond MOST_CATEGORIES sites
        the column is the mean of a site's training targets, cross-fitted."""
        train, test = self.train, self.test
        if self.sites <= MOST_CATEGORIES:
            columns, place = (train.site, test.site), train.x.shape[1]
            more = [column[:, None].astype(np.float64) for column in columns]
        else:
            kind = "continuous" if not self.classes else "binary" if self.classes == 2 else "multiclass"
            encoder = TargetEncoder(target_type=kind, cv=KFold(5, shuffle=True, random_state=self.seed))
            more = [encoder.fit_transform(train.site[:, None], train.y), encoder.transform(test.site[:, None])]
            place = None
        wide = [replace(rows, x=np.column_stack([rows.x, column]))
                for rows, column in zip((train, test), more, strict=True)]  # fmt: skip
        return replace(self, train=wide[0], test=wide[1]), place

    # ---- references ----

    def every(self) -> dict[str, Tensor]:
        """Outputs [T, C] of the references of a fit, by name; trees on pooled rows have the site."""
        return {
            LINEAR_ALONE: self.linear_alone(), TREES_ALONE: self.trees_alone(),
            POOLED_TREES: self.pooled_trees(site=True),
        }  # fmt: skip

    def titles(self) -> dict[str, str]:
        linear = "logistic" if self.classes else "ridge"
        return {
            LINEAR_ALONE: f"{linear} regression alone", TREES_ALONE: "boosted trees alone",
            POOLED_TREES: "boosted trees on pooled rows",
        }  # fmt: skip

    def linear_alone(self) -> Tensor:
        def make(settings: Settings) -> Any:
            solver = "newton-cholesky" if self.classes == 2 else "lbfgs"
            return LogisticRegression(**settings, solver=solver, max_iter=200) if self.classes else RidgeCV(ALPHAS)

        tries = STRENGTHS if self.classes else ({},)
        return self.at_every_site(lambda settings, rows: make_pipeline(StandardScaler(), make(settings)), tries)

    def trees_alone(self) -> Tensor:
        """Default settings, but leaves of a tenth of the rows, 2 at least and 20 at most: a small site could not split
        otherwise."""

        def make(settings: Settings, rows: int) -> Any:
            return boosted_trees(self.classes, {"min_samples_leaf": max(2, min(20, rows // 10))}, self.seed)

        return self.at_every_site(make, ({},))

    def at_every_site(self, make: Callable[[Settings, int], Any], tries: Sequence[Settings]) -> Tensor:
        """[T, C] of the test rows, each site by an estimator of its own rows."""
        out = np.full((len(self.test), self.classes or 1), np.nan)
        for k in range(self.sites):
            train, places = self.train.take(np.flatnonzero(self.train.site == k)), np.flatnonzero(self.test.site == k)
            if len(places) and len(train) > 1:
                model = self.fitted(lambda settings: make(settings, len(train)), tries, train)  # noqa: B023
                out[places] = self.says(model, train, self.test.take(places))
            elif len(places) and len(train):
                out[places] = self.says(None, train, self.test.take(places)) if self.classes else train.y[0]
        return torch.from_numpy(out)

    def pooled(self, make: Maker, tries: Sequence[Settings]) -> Tensor:
        """Any estimator on the rows of all sites, whose number is the last column."""
        train, test = (
            replace(rows, x=np.column_stack([rows.x, rows.site.astype(np.float64)])) for rows in (self.train, self.test)
        )
        return torch.from_numpy(self.says(self.fitted(make, tries, train), train, test))

    def pooled_trees(self, tries: Sequence[Settings] = ({},), *, site: bool) -> Tensor:
        """One estimator on the rows of all sites; settings by cross-validation if there are several tries."""
        data, place = self.with_site if site else (self, None)
        stops = not self.classes or int(np.unique(self.train.y, return_counts=True)[1].min()) > FEW_OF_A_CLASS

        def make(settings: Settings) -> Any:
            return boosted_trees(self.classes, {"early_stopping": stops, **settings}, self.seed, place)

        model = data.fitted(make, tries, data.train)
        return torch.from_numpy(data.says(model, data.train, data.test))


def boosted_trees(classes: int, settings: Settings, seed: int, category: int | None = None) -> Any:
    kind = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    return kind(categorical_features=None if category is None else [category], random_state=seed, **settings)


def _fit(model: Any, rows: ReferenceRows) -> Any:
    counted = {} if rows.weight is None else {f"{_last_step(model)}sample_weight": rows.weight}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a penalty that is too weak to converge is not chosen
        if rows.x.size < WORTH_THREADS:
            with threadpool_limits(1, user_api="openmp"):
                return model.fit(rows.x, rows.y, **counted)
        return model.fit(rows.x, rows.y, **counted)


def _last_step(model: Any) -> str:
    """The prefix by which a pipeline hands a setting to its last step."""
    return f"{model.steps[-1][0]}__" if hasattr(model, "steps") else ""
