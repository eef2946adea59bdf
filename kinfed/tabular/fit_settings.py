"""Settings of a fit. The command line shows them: what needs torch is imported where it is used."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kinfed.config import RunConfig
from kinfed.core import convert_fields, option, option_of, registry_of
from kinfed.errors import ConfigError

if TYPE_CHECKING:
    from kinfed.data import Problem
    from kinfed.engine import Metric

DEFAULT_METRICS: dict[str, str] = {"binary": "auroc"}  # of other kinds the headline of runs
PROPER_SCORES = {  # to choose by; of other kinds the headline of runs
    "binary": "log_loss", "multiclass": "log_loss", "regression": "rmse", "ordinal": "ranked_probability",
    "survival": "integrated_brier", "counts": "deviance",
}  # fmt: skip
FEW_ROWS, FOLDS, FOLDS_OF_FEW = 100, 5, 10
WEIGHTED_METRICS = DEFAULT_METRICS | {"multiclass": "balanced_accuracy"}  # where classes have weights


@dataclass(frozen=True)
class FitSettings:
    """All that decides the result, but the table."""

    algorithms: str = option("auto", "Methods to try beside local and fedavg.")
    models: str = option("mlr,mlp", "Kinds of model to try.")
    trials: int = option(4, "Settings to try, the same number for every method.", ge=1)
    folds: int = option(
        0, "Cross-validation folds of a site's training rows; 0: five, or ten where sites have fewer than 100.", ge=0
    )
    rounds: int = option_of(RunConfig, "rounds", 30, "Rounds of training.")
    steps: int = option_of(RunConfig, "steps", 20, "Local steps per round.")
    metric: str = option("auto", "Metric to report: auroc, accuracy, rmse, ...; choices are made by proper scores.")
    deploy: Literal["safe", "chosen", "certified"] = option(
        "safe",
        "What a site gets: a safe mixture with its own model, what the folds chose, or that only if its gain is shown.",
    )
    alone_prior: float = option(0.5, "Prior weight of a site's own model in safe mixtures.", gt=0, lt=1)
    class_weights: str = option_of(
        RunConfig, "class_weights", text="Classes in training: balanced, by_client, or sick=5,well=1."
    )
    references: bool = option(
        True,
        "Fit the usual alternatives, too: ridge or logistic regression and trees alone, trees on pooled rows.",
    )
    test_fraction: float = option(0.25, "Share of each site's rows for testing.", gt=0, lt=1)
    seed: int = option(0, "Seed of all draws.", ge=0)

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.folds == 1:
            raise ConfigError("folds must be a whole number of at least 2, or 0 for a number by the rows; got 1")
        for model in self.model_names:
            registry_of("model")[model]  # an unknown name is an error that names its like
        if not self.model_names:
            raise ConfigError("models: name at least one kind of model, such as mlr (kinfed list models)")

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.models.split(",") if name.strip())

    def metric_for(self, problem: Problem) -> Metric:
        """The metric that is chosen by and reported; one that does not fit the problem is refused."""
        from kinfed.engine import METRICS

        defaults = DEFAULT_METRICS if self.class_weights == RunConfig.class_weights else WEIGHTED_METRICS
        return METRICS.headline(problem, defaults.get(problem.kind) if self.metric == "auto" else self.metric)

    def choice_metric_for(self, problem: Problem) -> Metric:
        """The proper score that is chosen by. The reported metric where the kind of problem has none, and where classes
        have weights: models are then meant to give other probabilities than those of the rows."""
        from kinfed.engine import METRICS

        weighted = self.class_weights != RunConfig.class_weights
        name = None if weighted else PROPER_SCORES.get(problem.kind)
        return self.metric_for(problem) if name is None else METRICS.headline(problem, name)

    def with_folds(self, median: int, largest: int) -> FitSettings:
        """Settings with a number of folds, by the training rows of the median and of the largest site."""
        folds = min(FOLDS_OF_FEW if median < FEW_ROWS else FOLDS, max(largest, 2))
        return self if self.folds else replace(self, folds=folds)

    def dump(self) -> dict[str, Any]:
        return asdict(self)
