"""Many steps of gradient descent in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kinfed.data.batches import Batch
from kinfed.stacked import Layers, StackedNet

Pull = tuple[float | Tensor, Tensor]  # (lam, center): adds lam * (theta - center) to the gradient
Descend = Callable[[Tensor, Batch, float | Tensor, Pull | None], None]


class Descent(ABC):
    """A loop of steps from theta [n, P], which is left as it was."""

    @abstractmethod
    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        """The clients `rows` take a step on their batch [len(rows), ...]."""

    @abstractmethod
    def result(self) -> Tensor:
        """[n, P] after all steps so far."""


class OneByOne(Descent):
    """By a task's `descend_` on the rows of a copy."""

    def __init__(self, descend: Descend, theta: Tensor, pull: Pull | None) -> None:
        self._descend = descend
        self._x = theta.clone(memory_format=torch.contiguous_format)
        self._pull = pull

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        pull = None if self._pull is None else (rows_of(self._pull[0], rows), self._pull[1][rows])
        self._descend(self._x[rows], batch, lr, pull)

    def result(self) -> Tensor:
        return self._x


class OnLayers(Descent):
    """On a copy that holds each layer of a dense network by itself, cut and joined once."""

    def __init__(self, net: StackedNet, theta: Tensor, steps: int, pull: Pull | None) -> None:
        self._net = net
        self._layers = net.unpack(theta, steps)
        self._pull = None if pull is None else (pull[0], net.arranged(pull[1], steps))
        self._rows = slice(None)
        self._active = self._layers, self._pull

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        if rows != self._rows:
            pull = None if self._pull is None else (rows_of(self._pull[0], rows), _layers_of_rows(self._pull[1], rows))
            self._rows, self._active = rows, (_layers_of_rows(self._layers, rows), pull)
        layers, pull = self._active
        self._net.step_(layers, batch.x, batch.y, batch.weight, lr, pull)

    def result(self) -> Tensor:
        return self._net.pack(self._layers)


def rows_of(value: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    """The rows of what is a number for all clients, or one for each."""
    return value[rows] if isinstance(value, Tensor) else value


def _layers_of_rows(layers: Layers, rows: slice) -> Layers:
    return [(weight[rows], None if bias is None else bias[rows]) for weight, bias in layers]
