"""The common base of the scikit-learn estimators (kinfed.sklearn): rows, training, prediction, adoption."""

import copy
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, _safe_indexing, check_consistent_length, column_or_1d
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import nn

from kinfed.config import make_config
from kinfed.data import as_table, example_weights
from kinfed.errors import KinfedError
from kinfed.newcomers import RunInMemory, newcomer_from_table
from kinfed.runs import run
from kinfed.serving import WIDTH, ModelPipeline
from kinfed.tabular.fit_result import FittedModels, Newcomer
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.fitting import SiteFit, load_sites
from kinfed.tabular.portfolio import Contender

Array = npt.NDArray[Any]
ONLY = "all rows"  # the client of rows without one
CLIENT, TARGET, WEIGHT = "client of the row", "target of the row", "weight of the row"  # columns beside the features


class PersonalizedEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """The base of both estimators. Parameters:

    algorithm      "auto", or a method by name
    model          kind of model (kinfed list models)
    options        of the method, such as {"lam": 0.1}; with "auto" there are none
    rounds, steps  rounds of training, and local steps in each
    lr             learning rate, with a method by name
    trials, folds  with "auto": settings of every method, and parts of a client's rows to validate by
    metric         with "auto": what is chosen by; "auto" is AUROC of two classes, accuracy of several, RMSE of numbers
    client_column  column of a frame X that names the client of every row, in place of the argument `client`; rows with
                   an empty cell there are predicted by the server's model
    person_column, order_column   columns of a frame X that say whose a row is (all rows of a person are in one part of
                   a validation) and when it is of (what validates is later than what trains); no features either
    random_state   a whole number: the seed of all draws (None is 0)

    Attributes: clients_ (names), chosen_ (by client, what was taken), n_features_in_, and classes_ of a classifier.
    """

    _task: Literal["classification", "regression", "survival"]

    def __init__(
        self, algorithm: str = "auto", *, model: str = "mlr", options: Mapping[str, Any] | None = None,
        rounds: int = 30, steps: int = 20, lr: float = 0.05, trials: int = 1, folds: int = 3, metric: str = "auto",
        client_column: str | None = None, person_column: str | None = None, order_column: str | None = None,
        random_state: int | None = 0,
    ) -> None:  # fmt: skip
        self.algorithm, self.model, self.options = algorithm, model, options
        self.rounds, self.steps, self.lr = rounds, steps, lr
        self.trials, self.folds, self.metric = trials, folds, metric
        self.client_column, self.random_state = client_column, random_state
        self.person_column, self.order_column = person_column, order_column

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan, tags.input_tags.sparse = True, False
        return tags

    # ---- fitting ----

    def _fit(self, X: Any, labels: list[Any], client: Any, weights: Array | None) -> None:
        if len(labels) < 2:
            raise ValueError("there is 1 sample; training needs two at least")
        names = client_names(client, len(labels))
        if "" in names:
            raise ValueError(f"row {names.index('')} names no client; every row that trains needs one")
        table = {**self._table(X, labels, weights), CLIENT: names}
        # All columns of an array are numbers; those of a frame are what the rule makes of them.
        kinds = ",".join(f"x{place}=number" for place in range(X.shape[1])) if isinstance(X, np.ndarray) else ""
        options = {"client_column": CLIENT, "task": self._task, "columns": kinds, **self._roles}
        try:
            source = load_sites(table, {**self._table_options(weights), **options}, None, self._seed)
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
            table, options = self._table(X, labels, weights), self._table_options(weights)
            rows = newcomer_from_table(run, table, **options, test_fraction=0.0)
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
    def _roles(self) -> dict[str, str]:
        """Columns of frames that say how rows belong together, by the names of their options."""
        roles = {"person_column": self.person_column, "order_column": self.order_column}
        return {role: name for role, name in roles.items() if name is not None}

    def _features_of(self, X: Any, *, fits: bool) -> Any:
        """A frame without the columns of `_roles`, which it must have when a model `fits`."""
        if not self._roles:
            return X
        import narwhals

        try:
            frame = narwhals.from_native(X, eager_only=True)
        except TypeError:
            raise ValueError(f"{next(iter(self._roles))} is a column of a frame; X is {type(X).__name__}") from None
        for role, name in self._roles.items():
            if fits and name not in frame.columns:
                raise ValueError(f"X has no column {name!r} ({role}); it has {', '.join(frame.columns[:8])}")
        return frame.drop([name for name in self._roles.values() if name in frame.columns]).to_native()

    @property
    def _class_weights(self) -> str:
        """A rule of kinfed.data.federations.example_weights."""
        return example_weights.NONE

    @property
    def _seed(self) -> int:
        return 0 if self.random_state is None else int(self.random_state)

    def _choose(self, source: Any) -> FittedModels:
        if self.options:
            raise ValueError('options are those of one method; name it instead of algorithm="auto", or leave them out')
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

    # ---- prediction ----

    def _outputs(self, X: Any, client: Any) -> Array:
        """[n, C] float64 logits, or [n, 1] numbers in the target's own unit."""
        return self._answers(X, client)[0]

    def _answers(self, X: Any, client: Any, level: float | None = None) -> tuple[Array, Array]:
        """Outputs, and with a `level` thresholds [n] of prediction sets, each row by its client's model."""
        check_is_fitted(self)
        X, client = self._rows(X, client)
        X = self._validated(X, reset=False)
        columns, first = self._columns(X), next(iter(self._pipelines.values()))
        rows = len(next(iter(columns.values())))
        out, thresholds = np.empty((rows, first.inputs.problem.outputs)), np.full(rows, np.inf)
        for model, places in self._rows_by_model(client, rows).items():
            part = {name: values.take(places) for name, values in columns.items()}
            try:
                out[places] = _forward(self._pipelines[model], self._modules[model], part)
                if level is not None:
                    thresholds[places] = self._pipelines[model].set_threshold(level)
            except KinfedError as error:
                raise ValueError(str(error)) from error
        return out, thresholds

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
        """Inputs checked as scikit-learn does; frames stay what they are, with their columns compared, and lose those
        that are no features unless a model is fitted."""
        features = self._features_of(X, fits=reset)
        if not (hasattr(X, "columns") or hasattr(X, "column_names")):
            return validate_data(self, X, y, reset=reset, ensure_all_finite="allow-nan", **checks)
        if reset and not len(X):
            raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
        validate_data(self, features, reset=reset, skip_check_array=True)
        X = X if reset else features
        if isinstance(y, str):
            return X
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        return X, y


def _forward(pipeline: ModelPipeline, module: nn.Module, part: Mapping[str, Any]) -> Array:
    """Outputs in float64, so that a row gets the same output whatever rows stand beside it."""
    features, _ = pipeline.encode(as_table(part))
    with torch.inference_mode():
        blocks = [module(features.gather(i).double()) for i in torch.split(torch.arange(len(features)), WIDTH)]
    problem, outputs = pipeline.inputs.problem, torch.cat(blocks).numpy()
    return np.asarray(problem.restored(outputs) if problem.is_regression else outputs)


def client_names(client: Any, rows: int) -> list[str]:
    """[rows] the client of every row as text; one and the same if none are given."""
    if client is None:
        return [ONLY] * rows
    names = [str(name) for name in np.asarray(client).ravel().tolist()]
    if len(names) != rows:
        raise ValueError(f"client names the owner of every row: {rows} rows, {len(names)} names")
    return names


def apart(X: Any, column: str, client: Any) -> tuple[Any, list[str]]:
    """A frame without its column of clients, and that column. Empty cells are no client: "" stands for them."""
    import narwhals

    if client is not None:
        raise ValueError(f"clients are named by the column {column!r} of X; leave the argument client out")
    try:
        frame = narwhals.from_native(X, eager_only=True)
    except TypeError:
        raise ValueError(f"client_column={column!r} is a column of a frame; X is of type {type(X).__name__}") from None
    if column not in frame.columns:
        raise ValueError(f"X has no column {column!r}, which names clients; it has {', '.join(frame.columns[:8])}")
    values = frame.get_column(column)
    missing = values.is_null().to_list()
    names = ["" if gap else str(value) for value, gap in zip(values.to_list(), missing, strict=True)]
    return frame.drop(column).to_native(), names


def rows_that_count(sample_weight: Any, X: Any, y: Array, client: Any) -> tuple[Any, Array, Any, Array | None]:
    """X, y, client and weights of rows with a weight above 0; no weights where all are equal."""
    if sample_weight is None:
        return X, y, client, None
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    some = np.flatnonzero(weights > 0)
    weights = None if len(np.unique(weights[some])) == 1 else weights[some]
    if len(some) == len(y):
        return X, y, client, weights
    client = None if client is None else np.asarray(client).ravel()[some]
    return _safe_indexing(X, some), y[some], client, weights
