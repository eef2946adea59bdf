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
what the others have learnt: by the method's own rule for newcomers (kinfed.runs.adopt), with "auto" by what serves the
clients of the fit best on average. Nobody else's model changes.

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

import copy
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import nn

from kinfed.data.example_weights import BALANCED, BY_CLIENT, NONE
from kinfed.data.preprocessing import as_table
from kinfed.errors import KinfedError
from kinfed.runs.config_reading import make_config
from kinfed.runs.experiment import run
from kinfed.runs.finished import RunInMemory
from kinfed.runs.newcomer import newcomer_from_table
from kinfed.runs.pipeline import WIDTH, ModelPipeline
from kinfed.sites.estimator_rows import apart, client_names, rows_that_count
from kinfed.sites.fit import SiteFit
from kinfed.sites.fit_settings import FitSettings
from kinfed.sites.fitted_models import FittedModels, Newcomer
from kinfed.sites.portfolio import Contender
from kinfed.sites.site_files import load_sites

Array = npt.NDArray[Any]
CLIENT, TARGET, WEIGHT = "client of the row", "target of the row", "weight of the row"  # columns beside the features


class _Personalized(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share. Parameters:

    algorithm      "auto", or a method by name
    model          kind of model (kinfed list models)
    options        of the method, such as {"lam": 0.1}; with "auto" there are none
    rounds, steps  rounds of training, and local steps in each
    lr             learning rate, with a method by name
    trials, folds  with "auto": settings of every method, and parts of a client's rows to validate by
    metric         with "auto": what is chosen by; "auto" is AUROC of two classes, accuracy of several, RMSE of numbers
    client_column  column of a frame X that names the client of every row, in place of the argument `client`; rows with
                   an empty cell there are predicted by the server's model
    random_state   a whole number: the seed of all draws (None is 0)

    Attributes: clients_ (names), chosen_ (by client, what was taken), n_features_in_, and classes_ of a classifier.
    """

    _task: Literal["classification", "regression"]

    def __init__(
        self,
        algorithm: str = "auto",
        *,
        model: str = "mlr",
        options: Mapping[str, Any] | None = None,
        rounds: int = 30,
        steps: int = 20,
        lr: float = 0.05,
        trials: int = 1,
        folds: int = 3,
        metric: str = "auto",
        client_column: str | None = None,
        random_state: int | None = 0,
    ) -> None:
        self.algorithm = algorithm
        self.model = model
        self.options = options
        self.rounds = rounds
        self.steps = steps
        self.lr = lr
        self.trials = trials
        self.folds = folds
        self.metric = metric
        self.client_column = client_column
        self.random_state = random_state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = False
        return tags

    # ---- fitting ----

    def _fit(self, X: Any, labels: list[Any], client: Any, weights: Array | None) -> None:
        if len(labels) < 2:
            raise ValueError("there is 1 sample; training needs two at least")
        names = client_names(client, len(labels))
        if "" in names:
            raise ValueError(f"row {names.index('')} names no client; every row that trains needs one")
        table = {**self._table(X, labels, weights), CLIENT: names}
        options = {**self._table_options(weights), "client_column": CLIENT, "task": self._task,
                   "columns": self._kinds(X)}  # fmt: skip
        try:
            source = load_sites(table, options, None, self._seed)
            fitted = self._choose(source) if self.algorithm == "auto" else self._train(source)
        except KinfedError as error:
            raise ValueError(str(error)) from error
        self.clients_ = np.array(sorted(fitted.sites))
        self.chosen_ = fitted.chosen
        self._pipelines: dict[str | None, ModelPipeline] = dict(fitted.sites.items())
        if fitted.server is not None:
            self._pipelines[None] = fitted.server
        self._modules = {name: copy.deepcopy(one.module).double() for name, one in self._pipelines.items()}
        self._newcomer = fitted.newcomer

    def _table(self, X: Any, labels: list[Any], weights: Array | None) -> dict[str, Any]:
        return {**self._columns(X), TARGET: labels, **({} if weights is None else {WEIGHT: weights})}

    def _table_options(self, weights: Array | None) -> dict[str, Any]:
        return {"label_column": TARGET, "weight_column": None if weights is None else WEIGHT}

    def _adopt(self, X: Any, labels: list[Any], client: str, weights: Array | None) -> None:
        name = str(client)
        if name in self._pipelines:
            raise ValueError(f"client {name!r} has a model already; adopt takes clients that were not there")
        run, server = self._newcomer.run, self._pipelines.get(None)
        try:
            assert run is not None  # of fits in memory
            rows = newcomer_from_table(
                run, self._table(X, labels, weights), **self._table_options(weights), test_fraction=0.0
            )
            model = self._newcomer.model(name, rows, server)
        except KinfedError as error:
            raise ValueError(str(error)) from error
        self._pipelines[name], self._modules[name] = model, copy.deepcopy(model.module).double()
        self.clients_ = np.array(sorted([*self.clients_.tolist(), name]))
        self.chosen_ = {**self.chosen_, name: self._newcomer.contender.name}

    def _rows(self, X: Any, client: Any) -> tuple[Any, Any]:
        """The features, and the client of every row, which may be a column among them."""
        return (X, client) if self.client_column is None else apart(X, self.client_column, client)

    def _features_alone(self, X: Any) -> Any:
        """Rows of one client, whose frame may have the column of clients or not."""
        has_column = self.client_column is not None and self.client_column in getattr(X, "columns", ())
        return self._rows(X, None)[0] if has_column else X

    @property
    def _class_weights(self) -> str:
        """As a rule of kinfed.data.example_weights."""
        return NONE

    @property
    def _seed(self) -> int:
        return 0 if self.random_state is None else int(self.random_state)

    def _choose(self, source: Any) -> FittedModels:
        if self.options:
            raise ValueError('options are those of one method; with algorithm="auto" there is none they could be for')
        settings = FitSettings(
            models=self.model, trials=self.trials, folds=self.folds, rounds=self.rounds, steps=self.steps,
            metric=self.metric, class_weights=self._class_weights, seed=self._seed,
        )  # fmt: skip
        return SiteFit(source, settings, test_fraction=0.0).choose_models()

    def _train(self, source: Any) -> FittedModels:
        data = SiteFit(source, FitSettings(seed=self._seed), test_fraction=0.0).data
        config = make_config(None, {
            "algorithms": {self.algorithm: {"method": self.algorithm, **(self.options or {})}}, "model": self.model,
            "rounds": self.rounds, "steps": self.steps, "lr": self.lr, "participation": 1.0, "seeds": (self._seed,),
            "eval_every": 0, "class_weights": self._class_weights,
        })  # fmt: skip
        result = run(config, federation=data)
        models = {name: result.personal_model(name) for name in data.names}
        newcomer = Newcomer(Contender(self.algorithm, self.algorithm), RunInMemory.of_result(result))
        return FittedModels(models, result.server_model(), dict.fromkeys(data.names, self.algorithm), newcomer)

    def _columns(self, X: Any) -> dict[str, Any]:
        """The features by name; those of an array are called x0, x1, ..."""
        if isinstance(X, np.ndarray):
            return {f"x{place}": X[:, place] for place in range(X.shape[1])}
        table = as_table(X)
        return {str(name): table[name] for name in table.column_names}

    def _kinds(self, X: Any) -> str:
        """All columns of an array are numbers; those of a frame are what the rule makes of them."""
        return ",".join(f"x{place}=number" for place in range(X.shape[1])) if isinstance(X, np.ndarray) else ""

    # ---- prediction ----

    def _outputs(self, X: Any, client: Any) -> Array:
        """[n, C] float64 logits, or [n, 1] numbers in the target's own unit."""
        check_is_fitted(self)
        X, client = self._rows(X, client)
        X = self._validated(X, reset=False)
        columns = self._columns(X)
        rows = len(next(iter(columns.values())))
        first = next(iter(self._pipelines.values()))
        out = np.empty((rows, first.inputs.problem.outputs))
        for model, mine in self._rows_by_model(client, rows).items():
            part = {name: values.take(mine) for name, values in columns.items()}
            try:
                out[mine] = _forward(self._pipelines[model], self._modules[model], part)
            except KinfedError as error:
                raise ValueError(str(error)) from error
        return out

    def _rows_by_model(self, client: Any, rows: int) -> dict[str | None, Array]:
        """Rows of every model that is asked; None is the server's."""
        everything = np.arange(rows)
        if client is None:
            only = next(iter(self._pipelines)) if len(self._pipelines) == 1 else None
            return {self._model_for(only): everything}
        names = np.array([self._model_for(name) or "" for name in client_names(client, rows)])
        known = np.array([name != "" for name in names])
        groups: dict[str | None, Array] = {str(one): everything[names == one] for one in np.unique(names[known])}
        return groups if known.all() else {**groups, None: everything[~known]}

    def _model_for(self, name: str | None) -> str | None:
        if name in self._pipelines and name is not None:
            return name
        if None in self._pipelines:
            return None
        known = ", ".join(map(str, self.clients_[:8]))
        asked = "rows come without a client" if name is None else f"client {name!r} was not there at fit"
        raise ValueError(f"{asked}, and {self.algorithm} has no server model for it; clients are {known}")

    # ---- rows ----

    def _validated(self, X: Any, y: Any = "no_validation", *, reset: bool, **checks: Any) -> Any:
        """As scikit-learn checks its inputs; frames stay what they are, with their columns compared."""
        is_frame = hasattr(X, "columns") or hasattr(X, "column_names")
        if is_frame:
            if reset and not len(X):
                raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
            validate_data(self, X, reset=reset, skip_check_array=True)
            if isinstance(y, str):
                return X
            y = column_or_1d(y, warn=True)
            check_consistent_length(X, y)
            return X, y
        return validate_data(self, X, y, reset=reset, ensure_all_finite="allow-nan", **checks)


def _forward(pipeline: ModelPipeline, module: nn.Module, part: Mapping[str, Any]) -> Array:
    """In float64, so that a row gets the same output whatever rows stand beside it."""
    features, _ = pipeline.encode(as_table(part))
    with torch.inference_mode():
        blocks = [module(features.gather(i).double()) for i in torch.split(torch.arange(len(features)), WIDTH)]
    problem, outputs = pipeline.inputs.problem, torch.cat(blocks).numpy()
    return np.asarray(problem.restored(outputs) if problem.is_regression else outputs)


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    """A classifier for every client, and one for clients that were not there."""

    __doc__ = f"""{__doc__}

    class_weight   how much classes count in training: None, "balanced" (over the rows of all clients), "by_client"
                   (over those of each), or {{class: weight}}, where others have 1

    {_Personalized.__doc__}"""
    _task = "classification"

    def __init__(
        self,
        algorithm: str = "auto",
        *,
        model: str = "mlr",
        options: Mapping[str, Any] | None = None,
        rounds: int = 30,
        steps: int = 20,
        lr: float = 0.05,
        trials: int = 1,
        folds: int = 3,
        metric: str = "auto",
        class_weight: Mapping[Any, float] | str | None = None,
        client_column: str | None = None,
        random_state: int | None = 0,
    ) -> None:
        super().__init__(
            algorithm, model=model, options=options, rounds=rounds, steps=steps, lr=lr, trials=trials, folds=folds,
            metric=metric, client_column=client_column, random_state=random_state,
        )  # fmt: skip
        self.class_weight = class_weight

    @property
    def _class_weights(self) -> str:
        if self.class_weight is None:
            return NONE
        if isinstance(self.class_weight, str):
            if self.class_weight not in (BALANCED, BY_CLIENT):
                raise ValueError(
                    f"class_weight is {BALANCED}, {BY_CLIENT} or {{class: weight}}; got {self.class_weight!r}"
                )
            return self.class_weight
        codes = {label: f"{code:09d}" for code, label in enumerate(self.classes_.tolist())}
        if strange := [label for label in self.class_weight if label not in codes]:
            raise ValueError(f"class_weight names {strange[0]!r}, which is no class of y; these are {list(codes)}")
        return ",".join(f"{codes[label]}={weight!r}" for label, weight in self.class_weight.items()) or NONE

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
        if strange := sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()), key=str):
            known = ", ".join(map(str, self.classes_))
            raise ValueError(f"y holds classes that were not there at fit ({strange[0]!r}); known are {known}")
        X, y, _, weights = rows_that_count(sample_weight, X, y, None)
        self._adopt(X, self._class_names(y), client, weights)
        return self

    def _class_names(self, y: Array) -> list[str]:
        """Texts in the order of the classes."""
        return [f"{code:09d}" for code in np.searchsorted(self.classes_, y)]

    def predict_proba(self, X: Any, client: Any = None) -> Array:
        """[n, C] in the order of `classes_`."""
        logits = self._outputs(X, client)
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(shifted / shifted.sum(1, keepdims=True))

    def predict(self, X: Any, client: Any = None) -> Array:
        """[n] classes."""
        logits = self._outputs(X, client)
        return np.asarray(self.classes_[logits.argmax(1)])

    def score(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> float:
        """Accuracy."""
        return float(np.average(self.predict(X, client) == np.asarray(y), weights=sample_weight))


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    """A regression for every client, and one for clients that were not there."""

    __doc__ = f"{__doc__}\n\n    {_Personalized.__doc__}"
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

    def score(self, X: Any, y: Any, client: Any = None, sample_weight: Any = None) -> float:
        """R²."""
        from sklearn.metrics import r2_score

        return float(r2_score(y, self.predict(X, client), sample_weight=sample_weight))
