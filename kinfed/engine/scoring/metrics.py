"""Metrics by which models are judged, client by client. Every metric of examples is two sums over a client's examples:

    value of a client    = numerator / denominator       (its root, or 1 minus it, where the metric says so)
    value of all clients = Σ numerators / Σ denominators

so that a site tells two numbers per metric and no prediction, and sums over sites are what pooling all test examples
would give, with one exception that is on purpose: rankings (AUROC, average precision) and calibration compare examples
*within* a client only. Scores of two personal models are not on one scale. AUROC of all clients is the share of pairs
(one positive, one negative example of the same client) in the right order.

A denominator of 0 means that a metric is undefined there (AUROC at a site with one class): it is left out of means,
and said to be undefined, never 0. Examples may count by a `weight` each, as if a row of weight 2 were there twice.

    @kinfed.register("metric", "specificity", of="examples", title="Specificity", unit="%", kinds=("binary",))
    def specificity(judged):
        negative = judged.target == 0
        return judged.total(negative & (judged.predicted == 0)), judged.total(negative)

is scored in every run, and can be the headline of runs, searches and fits. A metric of="clients" (the default) is one
figure from the accuracies and losses of all clients (`ClientScores`); it stands in summaries and tables. No torch is
needed: pages name and describe metrics, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kinfed.core import Registry
from kinfed.data import Kind, Problem
from kinfed.errors import ConfigError, unknown_name

CALIBRATION_BINS = 10
HEADLINES: Mapping[Kind, str] = {  # by which methods are compared unless another metric is named
    "binary": "accuracy", "multiclass": "accuracy", "regression": "rmse", "ordinal": "rank_error", "counts": "deviance",
    "survival": "concordance", "multilabel": "label_accuracy", "dense": "position_accuracy",
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """Test examples of n clients, one after the other, and what their models say of them."""

    output: np.ndarray  # [T, C] float64 outputs of models (kinfed.data.examples.problem)
    target: np.ndarray  # [T, ...] what models learn: int64 classes, or float64 numbers
    owner: np.ndarray  # [T] in [0, n), ascending
    clients: int
    problem: Problem
    start_output: np.ndarray | None = None  # [T, C] of the model that all methods start from, for metrics that need it
    weight: np.ndarray | None = None  # [T] float64 how much every example counts; None: all alike

    @cached_property
    def probability(self) -> np.ndarray:
        """[T, C] of classes; what `Problem.predicted` makes of outputs for other kinds: numbers in the target's own
        unit, chances to outlive each period."""
        return np.asarray(self.problem.predicted(self.output))

    @cached_property
    def truth(self) -> np.ndarray:
        """[T] the probability of the class that is there."""
        return np.asarray(self.probability[np.arange(len(self.target)), self.target])

    @cached_property
    def predicted(self) -> np.ndarray:
        """[T] classes."""
        return np.asarray((self.output if self.problem.classifies else self.probability).argmax(1))

    @cached_property
    def residual(self) -> np.ndarray:
        """[T] prediction − target, in the target's own unit; [T, K] of several numbers, in standard deviations of each
        where units may differ, and NaN where one is unknown."""
        if self.problem.kind == "counts":
            return np.asarray(self.probability - self.target)
        scale = self.problem.scale
        if not self.problem.shape:
            return np.asarray((self.output[:, 0] - self.target) * scale)
        standard = self.output.reshape(self.target.shape) - self.target
        return np.asarray(standard if isinstance(scale, tuple) else standard * scale).reshape(len(standard), -1)

    def total(self, values: np.ndarray) -> np.ndarray:
        """[n] sums by client."""
        return np.bincount(self.owner, weights=self.weighted(values), minlength=self.clients)

    def known_total(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[n] sums by client of values [T] or [T, K], and how many there are: NaN is none."""
        if values.ndim == 1:
            return self.total(values), self.count
        known = ~np.isnan(values)
        return self.total(np.where(known, values, 0.0).sum(1)), self.total(known.sum(1).astype(np.float64))

    def weighted(self, values: np.ndarray) -> np.ndarray:
        """[T] every value as often as its example counts."""
        return values if self.weight is None else values * self.weight

    @property
    def count(self) -> np.ndarray:
        """[n] examples, each as often as it counts."""
        return np.bincount(self.owner, weights=self.weight, minlength=self.clients).astype(np.float64)

    @property
    def examples(self) -> np.ndarray:
        """[n] int64, whatever they count."""
        return np.bincount(self.owner, minlength=self.clients)

    def binned(self, probability: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[n, CALIBRATION_BINS] sums of values by client and bin of probability."""
        place = np.minimum((probability * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
        size = self.clients * CALIBRATION_BINS
        sums = np.bincount(self.owner * CALIBRATION_BINS + place, weights=values, minlength=size)
        return sums.reshape(-1, CALIBRATION_BINS)

    def rows(self, index: np.ndarray) -> Judged:
        """The examples at `index`, of the same clients."""
        return Drawn(self, index, self.owner[index], self.clients)


def _looked_up(name: str) -> Any:
    """What the whole calls so, at the drawn examples."""

    def values(self: Drawn) -> np.ndarray | None:
        whole = getattr(self._whole, name)
        return None if whole is None else np.asarray(whole[self._index])

    return cached_property(values)


class Drawn(Judged):
    """The examples of `whole` at `index`, any number of times each, of other owners. What a metric asks of them is
    looked up there: a bootstrap computes it once for every example, not for every draw."""

    _whole: Judged
    _index: np.ndarray

    def __init__(self, whole: Judged, index: np.ndarray, owner: np.ndarray, clients: int) -> None:
        weight = None if whole.weight is None else whole.weight[index]
        vars(self).update(
            _whole=whole, _index=index, target=whole.target[index], owner=owner, clients=clients,
            problem=whole.problem, weight=weight,
        )  # fmt: skip

    output, start_output, probability = _looked_up("output"), _looked_up("start_output"), _looked_up("probability")
    truth, predicted, residual = _looked_up("truth"), _looked_up("predicted"), _looked_up("residual")


if TYPE_CHECKING:
    from torch import Tensor

FIGURES = ("loss", "accuracy_mean", "accuracy_std", "worst10", "top10")  # of every summary, beside metrics
Sums = tuple[np.ndarray, np.ndarray]  # numerators [n] and denominators [n]


@dataclass(frozen=True)
class Metric:
    name: str
    title: str
    definition: str
    function: Callable[[Any], Any]  # of examples: Judged -> Sums; of clients: ClientScores -> float or None
    of: Literal["examples", "clients"] = "clients"
    unit: str = ""  # "%": a share, shown as 97.5 %; any other is written behind the number
    higher_is_better: bool = True
    kinds: tuple[Kind, ...] = ("binary", "multiclass", "regression")
    finish: Literal["", "root", "complement", "exp"] = ""
    scorer: tuple[str, ...] = ()  # what scikit-learn calls it
    slow: bool = False  # computed client by client: errors are estimated for few clients only
    needs_start: bool = False  # predictions of the model that all methods start from; computed for the headline only
    by_class: bool = False  # of two classes the rarer decides how sure it is, however many rows the other has

    @property
    def percent(self) -> bool:
        return self.unit == "%"

    def sums(self, judged: Judged) -> Sums:
        """Numerators and denominators [n] of all clients."""
        numerator, denominator = map(np.asarray, self.function(judged))
        if numerator.shape != (judged.clients,) or denominator.shape != (judged.clients,):
            raise ConfigError(
                f"metric {self.name} must give numerators and denominators of {judged.clients} clients, as "
                f"judged.total does; got shapes {numerator.shape} and {denominator.shape}"
            )
        return numerator, denominator

    def value(self, sums: Tensor) -> Tensor:
        """[...] from sums [..., 2]; NaN where it is undefined."""
        ratio = (sums[..., 0] / sums[..., 1].clamp_min(1e-300)).where(sums[..., 1] > 0, math.nan)
        if self.finish in ("root", "exp"):
            return ratio.sqrt() if self.finish == "root" else ratio.exp()
        return 1 - ratio if self.finish == "complement" else ratio

    def support(self, judged: Judged) -> np.ndarray:
        """[n] how many examples a client's value rests on: all, or those of the rarer of two classes (`by_class`)."""
        if not self.by_class or judged.problem.kind != "binary":
            return judged.examples
        positive = np.bincount(judged.owner[judged.target == 1], minlength=judged.clients)
        return np.minimum(positive, judged.examples - positive)

    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g} {self.unit}".rstrip()


class MetricRegistry(Registry[Callable[[Any], Any]]):
    """Functions with what makes them metrics. scikit-learn's scorers are found by their names as well."""

    def __init__(self) -> None:
        super().__init__("metric")

    def check(self, name: str, about: Mapping[str, Any]) -> None:
        if name in FIGURES:
            raise ConfigError(f"{name} is a figure of every summary; choose another name for the metric")
        known = {"title", "summary", "reference", *Metric.__dataclass_fields__} - {"name", "definition", "function"}
        for word in about:
            if word not in known:
                raise unknown_name("property of a metric", word, known)
        if about.get("of", "clients") not in ("examples", "clients"):
            raise ConfigError(f'metric {name} is of="examples" or of="clients"; got {about["of"]!r}')

    def find(self, name: str) -> Metric | None:
        """The metric of that name, ours, a plugin's or scikit-learn's, if there is one."""
        if name not in self:
            name = next((own for own, entry in self.items() if name in entry.facts.get("scorer", ())), name)
        if name in self:
            entry = self[name]
            return Metric(name, entry.title, entry.summary, entry.target, **entry.facts)
        from kinfed.engine.scoring.scorers import scorer_metric  # it is made of metrics

        return scorer_metric(name)

    def named(self, name: str) -> Metric:
        """The metric of a name that a run was judged by."""
        metric = self.find(name)
        if metric is None:
            from kinfed.engine.scoring.scorers import scorer_names

            raise unknown_name("metric", name, [*self, *scorer_names()])
        return metric

    def of_problem(self, problem: Problem, headline: Metric | None = None) -> list[Metric]:
        """All metrics of the problem that need predictions alone, and the run's headline where that is another."""
        metrics = [metric for name in self if (metric := self.named(name)).of == "examples" and not metric.needs_start]
        fitting = {metric.name: metric for metric in metrics if problem.kind in metric.kinds}
        return list((fitting | ({} if headline is None else {headline.name: headline})).values())

    def headline_among(self, figures: Collection[str], name: str | None) -> str | None:
        """The figure that a line or a page is about: the metric of that name, else what a kind of problem is judged by
        that has it; None if there is neither."""
        chosen = None if name is None else self.find(name)
        usual = reversed(dict.fromkeys(HEADLINES.values()))  # ordered classes have an accuracy, too
        names = (*([] if chosen is None else [chosen.name]), *usual)
        return next((one for one in names if one in figures), None)

    def headline(self, problem: Problem, name: str | None) -> Metric:
        """The metric of that name, else the problem's own, by which a run's methods are compared; it must fit."""
        from kinfed.engine.scoring.scorers import check_scorer, scorer_names

        name = name or HEADLINES[problem.kind]
        metric = self.find(name)
        if metric is None or metric.name not in self:
            if name in scorer_names():
                check_scorer(name, problem)
            return self.named(name)
        if metric.of == "clients":
            raise ConfigError(
                f"metric {name} is a figure over all clients, and methods are compared by a metric of each client's "
                'examples; register such a one with of="examples"'
            )
        if problem.kind not in metric.kinds:
            fitting = ", ".join(one.name for one in self.of_problem(problem))
            raise ConfigError(f"metric {metric.name} is not for {problem.in_words()}; choose one of {fitting}")
        return metric


METRICS = MetricRegistry()
_Function = Callable[[Judged], Sums]


def add_metric(name: str, title: str, summary: str, *scorer: str, **about: Any) -> Callable[[_Function], _Function]:
    """Register a metric of examples; `scorer`: what scikit-learn calls it."""
    decorate: Callable[[_Function], _Function] = METRICS.register(
        name, title=title, summary=summary, of="examples", scorer=scorer, **about
    )
    return decorate
