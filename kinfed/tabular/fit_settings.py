"""What a fit is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kinfed.data import Problem, example_weights
from kinfed.engine import METRICS, MODELS, Metric
from kinfed.errors import ConfigError, unknown_name

DEFAULT_METRICS = {"binary": "auroc", "multiclass": "accuracy", "regression": "rmse"}
WEIGHTED_METRICS = DEFAULT_METRICS | {"multiclass": "balanced_accuracy"}  # where classes have weights


@dataclass(frozen=True)
class FitSettings:
    """All that decides the result, but the table."""

    algorithms: str = "auto"  # methods to try, separated by commas, beside local and fedavg
    models: str = "mlr,mlp"  # kinds of model to try
    trials: int = 4  # settings of every method
    folds: int = 3  # of the training rows of a site
    rounds: int = 30
    steps: int = 20  # local steps in a round
    metric: str = "auto"  # by which is chosen and reported
    class_weights: str = example_weights.NONE  # in training: none, balanced, by_client, or sick=5,well=1
    test_fraction: float = 0.25  # of each site's rows, where no column says which rows are for testing
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("folds", 2), ("rounds", 1), ("steps", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number, {least} or more; got {value!r}")
        if not 0 < self.test_fraction < 1:
            raise ConfigError(
                f"test_fraction must lie in (0, 1): gains are measured on rows that nothing was chosen by; "
                f"got {self.test_fraction}"
            )
        for model in self.model_names:
            MODELS[model]  # an unknown name is an error that names its like
        if not self.model_names:
            raise ConfigError("models: name at least one kind of model, such as mlr (kinfed list models)")

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.models.split(",") if name.strip())

    def metric_for(self, problem: Problem) -> Metric:
        """What is chosen by and reported; one that does not fit the problem is refused."""
        defaults = DEFAULT_METRICS if self.class_weights == example_weights.NONE else WEIGHTED_METRICS
        return METRICS.headline(problem, defaults[problem.kind] if self.metric == "auto" else self.metric)

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FitSettings:
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown_name("setting of fit", name, known)
        return cls(**values)
