"""The problem of a federation, what is predicted: one of some classes, or a number.

    Problem.of_classes(3, ["no", "maybe", "yes"])        two classes are binary, the second is positive
    Problem.of_numbers(target[train_rows])               regression, with mean and scale of the training rows

Models of a regression have one output and learn the standardized target, (y - mean) / scale: learning rates, pulls and
clipping norms then mean the same in every unit. Whatever a person reads (metrics, predictions, exported models) is in
the target's own unit again (`restored`). Plain values, no torch: it stands in run folders and exported models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from kinfed.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["binary", "multiclass", "regression"]
TaskName = Literal["auto", "classification", "regression"]  # what a user asks for


@dataclass(frozen=True)
class Problem:
    kind: Kind
    num_classes: int = 0  # 0 for a regression
    class_names: tuple[str, ...] | None = None  # None: classes are called by their numbers
    mean: float = 0.0  # of the target over the training rows of all clients, in its own unit
    scale: float = 1.0  # its standard deviation there; 1 where it does not vary

    def __post_init__(self) -> None:
        if self.class_names is not None:
            object.__setattr__(self, "class_names", tuple(self.class_names))
            if len(self.class_names) != self.num_classes:
                raise DataError(f"{self.num_classes} classes but {len(self.class_names)} class names")
        if (self.kind == "binary") != (self.num_classes == 2) or self.is_regression != (self.num_classes == 0):
            raise DataError(f"a {self.kind} problem does not have {self.num_classes} classes")
        if not (isfinite(self.mean) and isfinite(self.scale) and self.scale > 0):
            pair = f"{self.mean:g} and {self.scale:g}"
            raise DataError(f"the target's mean must be finite and its scale positive; got {pair}")

    @classmethod
    def of_classes(cls, count: int, names: Sequence[str] | None = None) -> Problem:
        return cls("binary" if count == 2 else "multiclass", count, None if names is None else tuple(names))

    @classmethod
    def of_numbers(cls, training_targets: Any = ()) -> Problem:
        """A regression, standardized by these targets; as it is, where there are none yet."""
        import numpy as np  # here: options name tasks, and are listed without it

        values = np.asarray(training_targets, dtype=np.float64)
        if not len(values):
            return cls("regression")
        mean, deviation = float(values.mean()), float(values.std())
        # A constant target has a deviation of rounding errors alone.
        varies = deviation > 1e-12 * max(abs(mean), 1e-300)
        return cls("regression", mean=mean, scale=deviation if varies else 1.0)

    def fitted(self, training_targets: Any) -> Problem:
        """The problem with what training rows say of a regression's target; their sums are all that clients send."""
        return Problem.of_numbers(training_targets) if self.is_regression else self

    @property
    def is_regression(self) -> bool:
        return self.kind == "regression"

    @property
    def outputs(self) -> int:
        """Outputs of a model: a logit per class, or one number."""
        return 1 if self.is_regression else self.num_classes

    @property
    def class_labels(self) -> list[str]:
        """[C] names of the classes; their numbers where they have no names."""
        return list(self.class_names or map(str, range(self.num_classes)))

    def standardized(self, values: Any) -> Any:
        """Target that models of a regression learn, of a number, an array or a tensor."""
        return (values - self.mean) / self.scale

    def restored(self, outputs: Any) -> Any:
        """Outputs of a regression's model in the target's own unit."""
        return outputs * self.scale + self.mean

    def check(self, labels: Tensor, what: str = "labels") -> None:
        """Refuse labels [N] that do not fit."""
        if self.is_regression:
            if not labels.is_floating_point() or not bool(labels.isfinite().all()):
                raise DataError(f"{what} of a regression are finite numbers of a float type; got {labels.dtype}")
        elif labels.is_floating_point():
            raise DataError(f"{what} of a {self.kind} problem are whole numbers of classes; got {labels.dtype}")
        elif len(labels) and (labels.min() < 0 or labels.max() >= self.num_classes):
            span = f"{int(labels.min())}..{int(labels.max())}"
            raise DataError(f"{what} must lie in 0..{self.num_classes - 1}; found {span}")

    def in_words(self) -> str:
        if self.is_regression:
            return f"regression (target {self.mean:.4g} ± {self.scale:.4g} in training rows)"
        return "binary classification" if self.kind == "binary" else f"classification, {self.num_classes} classes"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Problem:
        unknown = sorted(record.keys() - {*cls.__dataclass_fields__})
        if unknown or "kind" not in record:
            raise DataError(f"this is no record of a problem: {f'unknown {unknown[0]!r}' if unknown else 'no kind'}")
        return cls(**record)


class HasProblem:
    """Facts of the problem of what holds one: a source, a federation, a description."""

    problem: Problem

    @property
    def num_classes(self) -> int:
        """0 for a regression."""
        return self.problem.num_classes

    @property
    def class_names(self) -> list[str] | None:
        return None if self.problem.class_names is None else list(self.problem.class_names)
