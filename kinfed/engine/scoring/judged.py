"""Test examples of clients and what their models say of them: what metrics are computed from. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kinfed.data import Problem

CALIBRATION_BINS = 10


@dataclass(frozen=True)
class Judged:
    """Test examples of n clients, one after the other, and what their models say of them."""

    output: np.ndarray  # [T, C] float64 logits; [T, 1] standardized predictions of a regression
    target: np.ndarray  # [T] int64 classes, or float64 standardized numbers
    owner: np.ndarray  # [T] in [0, n), ascending
    clients: int
    problem: Problem
    start_output: np.ndarray | None = None  # [T, C] of the model that all methods start from, for metrics that need it
    weight: np.ndarray | None = None  # [T] float64 how much every example counts; None: all alike

    @cached_property
    def probability(self) -> np.ndarray:
        """[T, C]."""
        shifted = np.exp(self.output - self.output.max(1, keepdims=True))
        return np.asarray(shifted / shifted.sum(1, keepdims=True))

    @cached_property
    def truth(self) -> np.ndarray:
        """[T] the probability of the class that is there."""
        return np.asarray(self.probability[np.arange(len(self.target)), self.target])

    @cached_property
    def predicted(self) -> np.ndarray:
        return np.asarray(self.output.argmax(1))

    @cached_property
    def residual(self) -> np.ndarray:
        """[T] prediction − target, in the target's own unit."""
        return np.asarray((self.output[:, 0] - self.target) * self.problem.scale)

    def total(self, values: np.ndarray) -> np.ndarray:
        """[n] sums by client."""
        return np.bincount(self.owner, weights=self.weighted(values), minlength=self.clients)

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
