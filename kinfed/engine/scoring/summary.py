"""From per-client sums to the figures that tables compare, in float64.

A client without test examples has no accuracy, so it is left out of every figure, also of the M in "10% of M
clients". Ten percent means ceil(M / 10) clients, so at least one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kinfed.engine.scoring.metric_catalogue import METRICS
from kinfed.engine.scoring.metrics import Metric


@dataclass(frozen=True)
class ClientScores:
    """The clients that have test examples, one entry each, in float64. What a metric of clients is computed from."""

    accuracy: Tensor | None  # [M]; None for a task without accuracy
    loss: Tensor  # [M] mean over a client's examples
    n_test: Tensor  # [M]
    n_train: Tensor  # [M]

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        if self.accuracy is not None:
            tenth = _tenth(self.accuracy)
            largest = self.n_train.argsort(descending=True, stable=True)[:tenth]
            figures = {
                "accuracy": _weighted_mean(self.accuracy, self.n_test),
                "accuracy_mean": self.accuracy.mean().item(),
                "accuracy_std": self.accuracy.std(correction=0).item(),
                "worst10": self.accuracy.sort().values[:tenth].mean().item(),
                "top10": _weighted_mean(self.accuracy[largest], self.n_test[largest]),
            }
        figures["loss"] = _weighted_mean(self.loss, self.n_test)
        metrics = map(METRICS.named, METRICS)
        registered = {metric.name: metric.function(self) for metric in metrics if metric.of == "clients"}
        return figures | {name: value for name, value in registered.items() if value is not None}


def summarize(
    correct: Tensor | None,
    loss: Tensor,
    n_test: Tensor,
    n_train: Tensor,
    sums: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """The figures of one evaluation, from sums over each client's test examples: accuracy and loss, every registered
    metric of clients, and of every metric with `sums` [K, 2] `auroc` of all clients, `auroc_mean`, `auroc_std` and
    `auroc_worst10` over those where it is defined.

    `correct=None` is a task without accuracy. A figure that does not exist is absent, never NaN: nobody has test
    examples -> {}. A NaN or infinite loss is a result (a diverged model) and is passed on."""
    _check(correct, loss, n_test, n_train)
    seen = n_test > 0
    if not seen.any():
        return {}
    examples = n_test[seen].double()
    accuracy = None if correct is None else correct[seen].double() / examples
    figures: dict[str, float] = {}
    for name, pairs in (sums or {}).items():
        figures |= _spread_of(METRICS.named(name), pairs[seen])
    return figures | ClientScores(accuracy, loss[seen].double() / examples, examples, n_train[seen]).figures()


def _spread_of(metric: Metric, sums: Tensor) -> dict[str, float]:
    """Of all clients together, and over the clients where the metric is defined; {} where it is nowhere."""
    values = metric.value(sums)
    values = values[~values.isnan()].sort(descending=not metric.higher_is_better).values
    if not len(values):
        return {}
    return {
        metric.name: metric.value(sums.sum(0)).item(),
        f"{metric.name}_mean": values.mean().item(),
        f"{metric.name}_std": values.std(correction=0).item(),
        f"{metric.name}_worst10": values[: _tenth(values)].mean().item(),
    }


def _tenth(values: Tensor) -> int:
    return (len(values) + 9) // 10


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
