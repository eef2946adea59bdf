"""From per-client counts to the figures that tables compare.

The inputs are sums over each client's test examples, as `Task.score` returns them: `correct [K]`, `loss [K]`,
`n_test [K]`, and the training sizes `n_train [K]`. Everything is computed in float64.

A client without test examples has no accuracy, so it is left out of every figure, also of the M in "10% of M
clients". Ten percent means ceil(M / 10) clients, so at least one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinfed.core import Registry
from kinfed.engine import MEASURES, Measure, find_measure, headline_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ClientScores:
    """The clients that have test examples, one entry each, in float64."""

    accuracy: Tensor | None  # [M]; None for a task without accuracy
    loss: Tensor  # [M] mean over a client's examples
    n_test: Tensor  # [M]
    n_train: Tensor  # [M]

    @property
    def tenth(self) -> int:
        return (len(self.loss) + 9) // 10


Metric = Callable[[ClientScores], float | None]  # None: the figure does not exist for these scores
METRICS: Registry[Metric] = Registry("metric")


def summarize(
    correct: Tensor | None,
    loss: Tensor,
    n_test: Tensor,
    n_train: Tensor,
    sums: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Every registered metric of one evaluation, and of every measure of which there are `sums` [K, 2]
    (kinfed.engine.scoring.measures): `auroc` of all clients, `auroc_mean`, `auroc_std` and `auroc_worst10` over those
    where it is defined.

    `correct=None` is a task without accuracy. A figure that does not exist is absent, never NaN: nobody has test
    examples -> {}. A NaN or infinite loss is a result (a diverged model) and is passed on."""
    _check(correct, loss, n_test, n_train)
    seen = n_test > 0
    if not seen.any():
        return {}
    examples = n_test[seen].double()
    scores = ClientScores(
        None if correct is None else correct[seen].double() / examples,
        loss[seen].double() / examples,
        examples,
        n_train[seen],
    )
    values = {name: entry.target(scores) for name, entry in METRICS.items()}
    plain = {name: value for name, value in values.items() if value is not None}
    measured = [_spread_of(MEASURES[name], pairs[seen]) for name, pairs in (sums or {}).items()]
    return {name: value for figures in measured for name, value in figures.items()} | plain


def _spread_of(measure: Measure, sums: Tensor) -> dict[str, float]:
    """Of all clients together, and over the clients where the measure is defined; {} where it is nowhere."""
    values = measure.value(sums)
    values = values[~values.isnan()].sort(descending=not measure.higher_is_better).values
    if not len(values):
        return {}
    name, tenth = measure.name, (len(values) + 9) // 10
    return {
        name: measure.value(sums.sum(0)).item(),
        f"{name}_mean": values.mean().item(),
        f"{name}_std": values.std(correction=0).item(),
        f"{name}_worst10": values[:tenth].mean().item(),
    }


@METRICS.register("accuracy", summary="share of all clients' test examples that are right")
def _accuracy(scores: ClientScores) -> float | None:
    return None if scores.accuracy is None else _weighted_mean(scores.accuracy, scores.n_test)


@METRICS.register("accuracy_mean", summary="mean of clients' accuracies, one vote per client")
def _accuracy_mean(scores: ClientScores) -> float | None:
    return None if scores.accuracy is None else scores.accuracy.mean().item()


@METRICS.register("accuracy_std", summary="standard deviation of accuracies over clients (divides by M)")
def _accuracy_std(scores: ClientScores) -> float | None:
    return None if scores.accuracy is None else scores.accuracy.std(correction=0).item()


@METRICS.register("worst10", summary="mean accuracy of the tenth of clients with the lowest")
def _worst_tenth(scores: ClientScores) -> float | None:
    return None if scores.accuracy is None else scores.accuracy.sort().values[: scores.tenth].mean().item()


@METRICS.register("top10", summary="accuracy on the tenth of clients with most training examples (ties: lower id)")
def _largest_tenth(scores: ClientScores) -> float | None:
    if scores.accuracy is None:
        return None
    largest = scores.n_train.argsort(descending=True, stable=True)[: scores.tenth]
    return _weighted_mean(scores.accuracy[largest], scores.n_test[largest])


@METRICS.register("loss", summary="mean loss of all clients' test examples")
def _loss(scores: ClientScores) -> float | None:
    return _weighted_mean(scores.loss, scores.n_test)


def headline_text(metrics: Mapping[str, float], metric: str | None = None) -> str:
    """The `metric` of a run, or what its problem is usually judged by, in a line about its progress; "" without any."""
    chosen = None if metric is None else headline_name(metric)
    name = next((name for name in (chosen, "accuracy", "rmse", "loss") if name in metrics), None)
    if name is None:
        return ""
    measure = find_measure(name)
    if measure is not None and measure.percent:
        title = "accuracy" if name == "accuracy" else measure.title
        return f"{title} {100 * metrics[name]:.1f}%"
    return f"{name if measure is None else measure.title} {metrics[name]:.4g}"


# Cross-entropy in nats: whoever gives the truth a probability of e^-100 on average has not learned badly, but computed
# with numbers that grew out of bounds. Knowing nothing about 100,000 classes costs 11.5.
DIVERGED_LOSS = 100.0
# Targets of a regression are standardized for training, so that a squared error of 1e6 is off by a thousand standard
# deviations of all targets.
DIVERGED_REGRESSION_LOSS = 1e6


def has_diverged(metrics: Mapping[str, float]) -> bool:
    """Whether these are figures of models that ran away. Other tasks' losses have units of their own, so that only one
    that is not finite tells."""
    loss = metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        return True
    if "accuracy" in metrics:
        return loss > DIVERGED_LOSS
    return "rmse" in metrics and loss > DIVERGED_REGRESSION_LOSS


def _weighted_mean(values: Tensor, weight: Tensor) -> float:
    return (values * weight).sum().item() / weight.sum().item()


def _check(correct: Tensor | None, loss: Tensor, n_test: Tensor, n_train: Tensor) -> None:
    given = {"correct": correct, "loss": loss, "n_test": n_test, "n_train": n_train}
    shapes = {name: list(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if n_test.dim() != 1 or any(shape != shapes["n_test"] for shape in shapes.values()):
        raise ValueError(f"metrics need one entry per client, all of shape [K]; got {shapes}")
    if (n_test < 0).any() or (n_train < 0).any():
        raise ValueError("numbers of examples cannot be negative")
    if correct is not None and ((correct < 0) | (correct > n_test)).any():
        client = int(((correct < 0) | (correct > n_test)).nonzero()[0])
        raise ValueError(
            f"client {client} has {correct[client].item():g} correct of {n_test[client].item()} test examples; "
            "`correct` is a number of examples between 0 and n_test"
        )
