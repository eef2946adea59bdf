"""Many steps of gradient descent in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kinfed.data.batches import Batch
from kinfed.engine.dense import Params, StackedNet

Pull = tuple[float | Tensor, Tensor]  # (lam, center): adds lam * (theta - center) to the gradient

# A first layer of so many outputs is turned in memory for so many steps: from 32 outputs on it was never slower, for
# 64 to 3,072 inputs and batches of 10 to 50, and ten steps earn what turning it and turning it back costs.
TURNS_FROM_OUTPUTS, TURNS_FROM_STEPS = 32, 10

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
    """On a copy that holds each layer of a dense network in a tensor of its own, cut and joined once: torch hands a
    batch of products to the processor's library at once only where their result is contiguous.

    The first layer is turned (see `_turned`) where that pays."""

    def __init__(self, net: StackedNet, theta: Tensor, steps: int, pull: Pull | None) -> None:
        self._net = net
        self._turns = steps >= TURNS_FROM_STEPS and net.steps[0][0].outputs >= TURNS_FROM_OUTPUTS
        self._layers = [Params(_own(x.weight), None if x.bias is None else _own(x.bias)) for x in self._arranged(theta)]
        self._pull = None if pull is None else (pull[0], self._arranged(pull[1]))
        self._rows = slice(None)
        self._active = self._layers, self._pull

    def _arranged(self, theta: Tensor) -> list[Params]:
        """Layers of theta as they are to lie in memory; not yet a copy where they are views or an expand()."""
        layers = self._net.layers_of(theta)
        if self._turns:
            layers[0] = Params(_turned(layers[0].weight), layers[0].bias)
        return layers

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        if rows != self._rows:
            pull = None if self._pull is None else (rows_of(self._pull[0], rows), [x.rows(rows) for x in self._pull[1]])
            self._rows, self._active = rows, ([x.rows(rows) for x in self._layers], pull)
        layers, pull = self._active
        self._net.step_(layers, batch.x, batch.y, batch.weight, lr, pull)

    def result(self) -> Tensor:
        parts = [part for x in self._layers for part in (x.weight, x.bias) if part is not None]
        theta = parts[0].new_empty(len(parts[0]), sum(part[0].numel() for part in parts))
        for ours, place in zip(self._layers, self._net.layers_of(theta), strict=True):
            _copy(ours.weight, place.weight)
            if ours.bias is not None and place.bias is not None:
                place.bias.copy_(ours.bias)
        return theta


def rows_of(value: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    """The rows of what is a number for all clients, or one for each."""
    return value[rows] if isinstance(value, Tensor) else value


def _turned(weight: Tensor) -> Tensor:
    """The same numbers [n, outputs, inputs] with the outputs side by side in memory.

    x W' for a small batch x then needs no rearranging of W inside the product, which took as long as the product
    itself. (On the way back delta W would need it instead, but nobody asks for the delta below the first layer.)"""
    n, outputs, inputs = weight.shape
    if weight.stride(0) == 0:
        return weight[0].T.clone(memory_format=torch.contiguous_format).T.expand(n, outputs, inputs)
    out = weight.new_empty(n, inputs, outputs).transpose(1, 2)
    _copy(weight, out)
    return out


def _own(tensor: Tensor) -> Tensor:
    """A dense copy that keeps the order of the axes in memory; of a fresh turned one none is needed."""
    if tensor.dim() == 3 and tensor.stride(1) < tensor.stride(2):
        across = tensor.transpose(1, 2)
        return tensor if across.is_contiguous() else across.clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return tensor.clone(memory_format=torch.contiguous_format)


def _copy(source: Tensor, target: Tensor) -> None:
    """target.copy_(source); client by client where the axes turn, which torch does faster for matrices."""
    if source.stride(1) == target.stride(1):
        target.copy_(source)
        return
    for ours, theirs in zip(target.unbind(0), source.unbind(0), strict=True):
        ours.copy_(theirs)
