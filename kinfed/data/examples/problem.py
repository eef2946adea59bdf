"""The problem of a federation: what is predicted, and what a model's outputs mean.

    kind                   target of an example            outputs of a model          start (outputs 0) predicts
    binary, multiclass     class, int64                    a logit per class           all classes alike
    ordinal                class in an order, int64        η - c_k, k = 1..C-1         (thresholds c_k are learned)
    regression             number, or several              one per number              mean of the training rows
    counts                 0, 1, 2, ...                    log(μ / mean)               mean of the training rows
    survival               time and event, [2]             log hazard ratio of each    all training rows' hazard in
                                                           period, or one for all      every period
    multilabel             0 or 1 for each label, [K]      a logit per label           a half
    dense                  class of each position, [...]   logits of each position     all classes alike

Models of numbers learn the standardized target, (y - mean) / scale, and those of counts and survival a ratio to what
all training rows have: learning rates, proximal terms and clipping norms then mean the same in every unit. Whatever a
person reads (metrics, predictions, exported models) is in the target's own unit again (`predicted`). A target of
several numbers or labels may have gaps (NaN), a dense one positions without a class (IGNORED): they count nowhere.

Plain values, no torch: a problem stands in run folders and exported models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, get_args

from kinfed.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["binary", "multiclass", "ordinal", "regression", "counts", "survival", "multilabel", "dense"]
TaskName = Literal[  # what a user asks for
    "auto", "classification", "regression", "ordinal", "counts", "survival", "multilabel", "dense"
]
CLASSES: tuple[Kind, ...] = ("binary", "multiclass", "ordinal", "dense")  # kinds with a number of classes
IGNORED = -100  # class of a position that counts nowhere, as torch's cross-entropy has it
PERIODS = 10  # of follow-up, into which survival times fall
LAST_EVENT = 0.95  # share of the events of training rows that periods cover: beyond, few are at risk


@dataclass(frozen=True)
class Problem:
    kind: Kind
    num_classes: int = 0  # 0 without classes
    class_names: tuple[str, ...] | None = None  # None: classes are called by their numbers
    mean: float | tuple[float, ...] = 0.0  # of the target over the training rows of all clients, in its own unit
    scale: float | tuple[float, ...] = 1.0  # its standard deviation there; 1 where it does not vary
    shape: tuple[int, ...] = ()  # of one example's target
    target_names: tuple[str, ...] | None = None  # of several numbers or labels
    dispersion: float = 0.0  # α of counts: their variance is μ + α μ², by the moments of training rows
    periods: tuple[float, ...] = ()  # ends of the periods of survival, ascending, in the unit of time
    hazards: tuple[float, ...] = ()  # cumulative hazard of all training rows within each period
    proportional: bool = False  # one hazard ratio for all periods

    def __post_init__(self) -> None:
        for name in ("class_names", "shape", "target_names", "periods", "hazards", "mean", "scale"):
            value = getattr(self, name)  # JSON knows lists alone
            object.__setattr__(self, name, tuple(value) if isinstance(value, list | tuple) else value)
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise DataError(f"{self.num_classes} classes but {len(self.class_names)} class names")
        if (self.kind == "binary") != (self.num_classes == 2 and self.kind in ("binary", "multiclass")) or (
            self.kind in CLASSES
        ) != (self.num_classes > 0):
            raise DataError(f"a {self.kind} problem does not have {self.num_classes} classes")
        means, scales = (value if isinstance(value, tuple) else (value,) for value in (self.mean, self.scale))
        if not (all(map(isfinite, (*means, *scales))) and all(scale > 0 for scale in scales)):
            pair = " and ".join(", ".join(f"{x:g}" for x in value) for value in (means, scales))
            raise DataError(f"the target's mean must be finite and its scale positive; got {pair}")
        if self.kind == "survival":
            ends = (0.0, *self.periods)
            rising = all(a < b < float("inf") for a, b in pairwise(ends))
            if len(self.hazards) != len(self.periods) or not rising or not all(h > 0 for h in self.hazards):
                raise DataError("periods of survival end at rising times above 0, each with a positive hazard")

    # ---- making one ----

    @classmethod
    def of_classes(cls, count: int, names: Sequence[str] | None = None) -> Problem:
        return cls("binary" if count == 2 else "multiclass", count, None if names is None else tuple(names))

    @classmethod
    def of_numbers(cls, training_targets: Any = (), names: Sequence[str] | None = None) -> Problem:
        """A regression, standardized by these targets [N] or [N, ...]; unscaled while there are none."""
        import numpy as np  # here: options name tasks, and are listed without it

        values = np.asarray(training_targets, dtype=np.float64)
        shape, several = values.shape[1:], None if names is None else tuple(names)
        if not len(values):
            return cls("regression", shape=shape, target_names=several)
        each = 0 if values.ndim <= 2 else None  # every number by itself, or all elements of a picture alike
        mean, deviation = np.nanmean(values, each), np.nanstd(values, each)
        # A constant target has a deviation of rounding errors alone.
        scale = np.where(deviation > 1e-12 * np.maximum(abs(mean), 1e-300), deviation, 1.0)
        return cls("regression", mean=mean.tolist(), scale=scale.tolist(), shape=shape, target_names=several)

    def of_sums(self, count: int, mean: float, square: float) -> Problem:
        """The problem with what sums over training targets say of it: their number, mean and squared distances from it;
        equal to `fitted` of these targets."""
        if self.kind == "counts":
            mean, variance = max(mean, 0.5 / count), square / count
            return Problem("counts", mean=mean, dispersion=max((variance - mean) / mean**2, 0.0))
        if self.kind != "regression":
            return self
        deviation = (square / count) ** 0.5
        scale = deviation if deviation > 1e-12 * max(abs(mean), 1e-300) else 1.0
        return Problem("regression", mean=mean, scale=scale)

    @classmethod
    def of_counts(cls, training_targets: Any = ()) -> Problem:
        """Counts, relative to the mean of these targets [N]."""
        import numpy as np

        values = np.asarray(training_targets, dtype=np.float64)
        if not len(values):
            return cls("counts")
        mean = float(max(values.mean(), 0.5 / len(values)))  # nothing but zeros: less than one in all rows
        return cls("counts", mean=mean, dispersion=max(float((values.var() - mean) / mean**2), 0.0))

    @classmethod
    def of_survival(cls, training_targets: Any = (), periods: int = PERIODS) -> Problem:
        """Survival with periods that hold equal numbers of the events of these times and events [N, 2].

        The hazard of a period is -log(1 - d / n): d events in it, of n rows that had theirs in it or outlived it."""
        import numpy as np

        values = np.asarray(training_targets, dtype=np.float64).reshape(-1, 2)
        if not len(values):
            return cls("survival", shape=(2,))
        time, event = values[:, 0], values[:, 1] > 0
        if not event.any():
            raise DataError("no training row has an event: nothing can be learned of when they happen")
        share = LAST_EVENT * np.arange(1, periods + 1) / periods
        ends = np.unique(np.quantile(time[event], share, method="inverted_cdf"))
        ends = ends[ends > 0]
        # An event at the end of a period lies in it; one who is still there then has outlived it.
        place = np.where(event, np.searchsorted(ends, time), np.searchsorted(ends, time, side="right"))
        size = len(ends) + 1
        events = np.bincount(place[event], minlength=size)[:-1]
        outlived = len(time) - np.cumsum(np.bincount(place, minlength=size))[:-1]
        chance = np.clip(events / np.maximum(events + outlived, 1), 1e-6, 0.999)
        return cls("survival", shape=(2,), periods=tuple(ends.tolist()), hazards=tuple((-np.log1p(-chance)).tolist()))

    def fitted(self, training_targets: Any) -> Problem:
        """The problem with what training rows say of its target; their sums are all that clients send, and of survival
        the times that periods end at."""
        if self.kind == "survival":
            count = len(self.periods) or PERIODS
            return replace(Problem.of_survival(training_targets, count), proportional=self.proportional)
        if self.kind == "counts":
            return Problem.of_counts(training_targets)
        return Problem.of_numbers(training_targets, self.target_names) if self.is_regression else self

    # ---- facts ----

    @property
    def is_regression(self) -> bool:
        return self.kind == "regression"

    @property
    def is_single_number(self) -> bool:
        return self.is_regression and not self.shape

    @property
    def has_classes(self) -> bool:
        """Whether every example has one class."""
        return self.num_classes > 0 and not self.shape

    @property
    def classifies(self) -> bool:
        """Whether outputs are logits of an example's classes, of which the largest is predicted."""
        return self.kind in ("binary", "multiclass")

    @property
    def has_probabilities(self) -> bool:
        """Whether predictions are chances, of classes, labels or outliving periods, and not numbers in a unit."""
        return self.kind not in ("regression", "counts")

    @property
    def outputs(self) -> int:
        """Outputs of a model for an example, or for a position of a dense target."""
        if self.kind == "survival":
            return 1 if self.proportional else max(len(self.periods), 1)
        if self.kind == "ordinal":
            return self.num_classes - 1
        size = 1
        for length in () if self.kind == "dense" else self.shape:
            size *= length
        return self.num_classes or size

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes that the output of a model for one example may have."""
        if self.kind == "dense":
            return (*self.shape, self.num_classes), (self.num_classes, *self.shape)
        return ((self.outputs,), self.shape) if self.is_regression and len(self.shape) > 1 else ((self.outputs,),)

    @property
    def class_labels(self) -> list[str]:
        """[C] names of the classes; their numbers where they have no names."""
        return list(self.class_names or map(str, range(self.num_classes)))

    @property
    def target_labels(self) -> list[str]:
        """Names of the numbers that are predicted, or of the labels."""
        return list(self.target_names or map(str, range(self.outputs)))

    @property
    def prediction_names(self) -> list[str]:
        """Names of what `predicted` gives for an example without classes."""
        if self.kind == "survival":
            return [f"outlives {end:g}" for end in self.periods]
        if self.kind == "multilabel":
            return [f"p_{name}" for name in self.target_labels]
        return self.target_labels if self.shape else ["prediction"]

    @property
    def horizon(self) -> float:
        """The time at which survival is compared with what was observed: the end of the middle period."""
        return self.periods[(len(self.periods) - 1) // 2]

    # ---- targets and predictions ----

    def standardized(self, values: Any) -> Any:
        """Target that models of a regression learn, of a number, an array or a tensor."""
        mean, scale = (_like(values, value) for value in (self.mean, self.scale))
        return (values - mean) / scale

    def restored(self, outputs: Any) -> Any:
        """Outputs of a regression's model in the target's own unit."""
        mean, scale = (_like(outputs, value) for value in (self.mean, self.scale))
        return outputs * scale + mean

    def targets(self, labels: Tensor) -> Tensor:
        """[N, *shape] what models learn: classes and positions int64, all else float32."""
        if self.is_regression:
            labels = self.standardized(labels)
        return labels if self.kind in CLASSES else labels.float()

    def predicted(self, outputs: Any) -> Any:
        """Meaning of outputs [n, ...], an array or a tensor: probabilities of classes [n, C] or of labels [n, K],
        numbers in the target's own unit ([n] of a single one), the chance to outlive every period [n, periods]."""
        if self.kind in ("binary", "multiclass", "dense"):
            return _softmax(outputs)
        if self.kind == "ordinal":
            above = _sigmoid(outputs)  # [n, C - 1] of lying above each threshold
            whole, none = above[..., :1] * 0 + 1, above[..., :1] * 0
            return _joined(whole, above) - _joined(above, none)
        if self.kind == "multilabel":
            return _sigmoid(outputs)
        if self.kind == "counts":
            return self.mean * _exp(outputs[..., 0])
        if self.kind == "survival":
            return _exp(-(_like(outputs, self.hazards) * _exp(outputs)).cumsum(-1))
        return self.restored(outputs if self.shape else outputs[..., 0])

    def check(self, labels: Tensor, what: str = "labels") -> None:
        """Refuse labels [N, *shape] that do not fit."""
        if tuple(labels.shape[1:]) != self.shape:
            wanted = ", ".join(map(str, ("N", *self.shape)))
            raise DataError(f"{what} of a {self.kind} problem are of shape [{wanted}]; got {list(labels.shape)}")
        if self.kind in CLASSES:
            if labels.is_floating_point():
                raise DataError(f"{what} of a {self.kind} problem are whole numbers of classes; got {labels.dtype}")
            real = labels[labels != IGNORED] if self.kind == "dense" else labels
            if real.numel() and (real.min() < 0 or real.max() >= self.num_classes):
                extremes = f"{int(real.min())}..{int(real.max())}"
                raise DataError(f"{what} must lie in 0..{self.num_classes - 1}; found {extremes}")
            return
        known = labels[~labels.isnan()] if self.shape and self.kind != "survival" else labels
        if not labels.is_floating_point() or not bool(known.isfinite().all()):
            raise DataError(f"{what} of a {self.kind} are finite numbers of a float type; got {labels.dtype}")
        if self.kind == "counts" and bool(((labels < 0) | (labels != labels.round())).any()):
            raise DataError(f"{what} are counts: 0, 1, 2, ...; found a negative number or a fraction")
        if self.kind == "multilabel" and bool(((known != 0) & (known != 1)).any()):
            raise DataError(f"{what} are 0 or 1 for every label; found something else")
        if self.kind == "survival" and bool(((labels[:, 0] < 0) | ~((labels[:, 1] == 0) | (labels[:, 1] == 1))).any()):
            raise DataError(f"{what} are a time of 0 or more and an event, 1 where it happened and 0 where not")

    def strata(self, labels: Tensor) -> tuple[Tensor, int]:
        """[N] by which rows are divided evenly: classes and their number; or numbers, whose ranks count, and 0."""
        if self.has_classes or not self.shape:
            return labels, self.num_classes
        if self.kind == "survival":
            return labels[:, 1].long(), 2
        if self.kind == "dense":
            return labels.flatten(1)[:, 0] * 0, 1
        return labels.flatten(1).nansum(1), 0

    # ---- words and records ----

    def in_words(self) -> str:
        if self.kind == "binary":
            return "binary classification"
        if self.kind == "multiclass":
            return f"classification, {self.num_classes} classes"
        if self.kind == "ordinal":
            return f"{self.num_classes} classes in an order"
        if self.kind == "counts":
            over = f", dispersion {self.dispersion:.3g}" if self.dispersion else ""
            return f"counts (mean {self.mean:.4g} in training rows{over})"
        if self.kind == "survival":
            reach = f" in {len(self.periods)} periods up to {self.periods[-1]:.4g}" if self.periods else ""
            return f"survival{reach}"
        if self.kind == "multilabel":
            return f"{self.outputs} labels, any of which an example may have"
        if self.kind == "dense":
            return f"{self.num_classes} classes at each of {' x '.join(map(str, self.shape))} positions"
        if self.shape:
            return f"regression of {self.outputs} numbers"
        return f"regression (target {self.mean:.4g} ± {self.scale:.4g} in training rows)"

    def to_json(self) -> dict[str, Any]:
        """The record; what only some kinds have is left out of the others."""
        old = ("kind", "num_classes", "class_names", "mean", "scale")
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {
            name: value for name, (value, default) in values.items() if name in old or value != default is not MISSING
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Problem:
        unknown = sorted(record.keys() - {*cls.__dataclass_fields__})
        if unknown or "kind" not in record:
            raise DataError(f"this is no record of a problem: {f'unknown {unknown[0]!r}' if unknown else 'no kind'}")
        if record["kind"] not in get_args(Kind):
            raise DataError(f"a problem is {', '.join(get_args(Kind))}; got {str(record['kind'])[:60]!r}")
        return cls(**record)


class HasProblem:
    """Facts of the problem of what holds one: a source, a federation, a description."""

    problem: Problem

    @property
    def num_classes(self) -> int:
        """0 without classes."""
        return self.problem.num_classes

    @property
    def class_names(self) -> list[str] | None:
        return None if self.problem.class_names is None else list(self.problem.class_names)


# ---- arithmetic of arrays and tensors alike ----


def _like(values: Any, constant: float | tuple[float, ...]) -> Any:
    """A constant for arithmetic with `values`: one number, or one for each entry of the last axis."""
    if not isinstance(constant, tuple):
        return constant
    if hasattr(values, "new_tensor"):
        return values.new_tensor(constant)
    import numpy as np

    return np.array(constant)


def _exp(values: Any) -> Any:
    if hasattr(values, "new_tensor"):
        return values.exp()
    import numpy as np

    return np.exp(values)


def _sigmoid(values: Any) -> Any:
    if hasattr(values, "new_tensor"):
        return values.sigmoid()
    import numpy as np

    return np.where(values >= 0, 1.0, np.exp(-abs(values))) / (1 + np.exp(-abs(values)))


def _softmax(values: Any) -> Any:
    if hasattr(values, "new_tensor"):
        return values.softmax(-1)
    shifted = _exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _joined(first: Any, second: Any) -> Any:
    if hasattr(first, "new_tensor"):
        import torch

        return torch.cat([first, second], -1)
    import numpy as np

    return np.concatenate([first, second], -1)
