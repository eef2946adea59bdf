"""Gradients as local loops take them: with the terms of a method, in pieces, and many steps of descent in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kinfed.core import copied_rows
from kinfed.data import Batch
from kinfed.engine.contract.feature_loss import FeatureLoss, on_rows
from kinfed.engine.contract.linear import Params

if TYPE_CHECKING:
    from kinfed.engine.backends.dense import FeedForwardNet

ProximalTerm = tuple[float | Tensor, Tensor]  # (lam, center): adds lam * (theta - center) to the gradient


@dataclass(frozen=True)
class Terms:
    """Terms that a method adds to the gradients of its rows."""

    proximal: ProximalTerm | None = None
    drift: Tensor | None = None  # [n, P]
    feature_loss: FeatureLoss | None = None

    def rows(self, rows: slice | Tensor, n: int) -> Terms:
        """The terms of some of n rows."""
        proximal = None if self.proximal is None else (take_if_tensor(self.proximal[0], rows), self.proximal[1][rows])
        drift = None if self.drift is None else self.drift[rows]
        return Terms(proximal, drift, on_rows(self.feature_loss, torch.arange(n)[rows]))


PLAIN = Terms()

# The first layer is transposed in memory if it has at least this many outputs: from 32 on never slower, for 64 to
# 3,072 inputs and batches of 10 to 50.
TRANSPOSE_FROM_OUTPUTS = 32
# It must also serve this many steps: ten earn what transposing the layer and back costs.
TRANSPOSE_FROM_STEPS = 10


@dataclass(frozen=True)
class GradientPieces:
    """The gradient of some trainable columns, in a task's own blocks: joining them would cost a pass over memory."""

    columns: list[slice]  # from left to right
    # (theta [n, P], batch, feature loss) -> [n, width] for every block; running statistics of theta move in place.
    # Pieces may be views of theta and are not to be changed.
    gradient: Callable[[Tensor, Batch, FeatureLoss | None], list[Tensor]]


class Descent(ABC):
    """A loop of steps theta <- theta - lr * (gradient + lam * (theta - center) + drift) from theta [n, P], which is
    left as it was. The gradient may have the deltas of a feature loss in it."""

    @abstractmethod
    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        """The clients `rows` take a step on their batch [len(rows), ...]."""

    @abstractmethod
    def result(self) -> Tensor:
        """[n, P] after all steps so far."""


class StepwiseDescent(Descent):
    """A loop of a task's `take_step_` on the rows of a copy."""

    def __init__(
        self, take_step: Callable[[Tensor, Batch, float | Tensor, Terms], None], theta: Tensor, terms: Terms
    ) -> None:
        self._take_step, self._x, self._terms = take_step, copied_rows(theta), terms
        self._rows = slice(None)
        self._active = self._x, terms

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        if rows != self._rows:
            self._rows = rows
            self._active = self._x[rows], self._terms.rows(rows, len(self._x))
        x, terms = self._active
        self._take_step(x, batch, lr, terms)
        if terms.drift is not None:  # the same at every theta: it may as well be added afterwards
            _subtract(x, terms.drift, lr)

    def result(self) -> Tensor:
        return self._x


class LayerwiseDescent(Descent):
    """A loop on a copy that holds each layer of a dense network in a tensor of its own, cut and joined once: torch
    hands a batch of products to the processor's library at once only where their result is contiguous.

    The first layer is transposed (see `_transposed_layout`) where that pays."""

    def __init__(
        self, net: FeedForwardNet, theta: Tensor, steps: int, terms: Terms, trained: tuple[bool, ...] | None = None
    ) -> None:
        """`trained` says of every layer whether it is; None: all are."""
        self._net, self._trained = net, trained
        self._transposes = steps >= TRANSPOSE_FROM_STEPS and net.steps[0][0].outputs >= TRANSPOSE_FROM_OUTPUTS
        layers = self._arranged(theta)
        self._layers = [Params(_dense_copy(x.weight), None if x.bias is None else _dense_copy(x.bias)) for x in layers]
        proximal, drift = terms.proximal, terms.drift
        self._proximal = None if proximal is None else (proximal[0], self._arranged(proximal[1]))
        self._drift = None if drift is None else self._arranged(drift)
        self._feature_loss = terms.feature_loss
        self._rows = slice(None)
        self._active = self._layers, self._proximal, self._drift, terms.feature_loss

    def _arranged(self, theta: Tensor) -> list[Params]:
        """Views of theta's layers in their memory layout; a copy is made only where the first one is transposed."""
        layers = self._net.layers_of(theta)
        if self._transposes:
            layers[0] = Params(_transposed_layout(layers[0].weight), layers[0].bias)
        return layers

    def _rows_of(self, layers: list[Params]) -> list[Params]:
        return [layer.rows(self._rows) for layer in layers]

    def step(self, rows: slice, batch: Batch, lr: float | Tensor) -> None:
        if rows != self._rows:
            self._rows = rows
            proximal = self._proximal
            if proximal is not None:
                proximal = take_if_tensor(proximal[0], rows), self._rows_of(proximal[1])
            drift = None if self._drift is None else self._rows_of(self._drift)
            feature_loss = on_rows(self._feature_loss, torch.arange(len(self._layers[0].weight))[rows])
            self._active = self._rows_of(self._layers), proximal, drift, feature_loss
        layers, proximal, drift, feature_loss = self._active
        self._net.step_(layers, batch, lr, proximal, feature_loss, self._trained)
        if drift is not None:
            for layer, term in zip(layers, drift, strict=True):
                _subtract(layer.weight, term.weight, lr)
                if layer.bias is not None and term.bias is not None:
                    _subtract(layer.bias, term.bias, lr)

    def result(self) -> Tensor:
        parts = [part for x in self._layers for part in (x.weight, x.bias) if part is not None]
        theta = parts[0].new_empty(len(parts[0]), sum(part[0].numel() for part in parts))
        for ours, place in zip(self._layers, self._net.layers_of(theta), strict=True):
            _copy(ours.weight, place.weight)
            if ours.bias is not None and place.bias is not None:
                place.bias.copy_(ours.bias)
        return theta


def take_if_tensor(value: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    """The rows of what is a number for all clients, or one for each."""
    return value[rows] if isinstance(value, Tensor) else value


def _subtract(x: Tensor, drift: Tensor, lr: float | Tensor) -> None:
    """x <- x - lr * drift in place, [n, ...] each; lr a number or one per client."""
    if isinstance(lr, Tensor):
        x.addcmul_(drift, lr.to(x.dtype).view(-1, *(1 for _ in x.shape[1:])), value=-1)
    else:
        x.add_(drift, alpha=-lr)


def _transposed_layout(weight: Tensor) -> Tensor:
    """The same numbers [n, outputs, inputs] with the outputs side by side in memory.

    x W' for a small batch x then needs no rearranging of W inside the product, which took as long as the product
    itself. (On the way back delta W would need it instead, but the delta below the first layer is not needed.)"""
    n, outputs, inputs = weight.shape
    if weight.stride(0) == 0:
        return weight[0].T.clone(memory_format=torch.contiguous_format).T.expand(n, outputs, inputs)
    out = weight.new_empty(n, inputs, outputs).transpose(1, 2)
    _copy(weight, out)
    return out


def _dense_copy(tensor: Tensor) -> Tensor:
    """A dense copy that keeps the order of the axes in memory; of a fresh transposed one none is needed."""
    if tensor.dim() == 3 and tensor.stride(1) < tensor.stride(2):
        transposed = tensor.transpose(1, 2)
        if transposed.is_contiguous():
            return tensor
        return transposed.clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return tensor.clone(memory_format=torch.contiguous_format)


def _copy(source: Tensor, target: Tensor) -> None:
    """target.copy_(source); client by client where the axes are exchanged, which torch does faster for matrices."""
    if source.stride(1) == target.stride(1):
        target.copy_(source)
        return
    for ours, theirs in zip(target.unbind(0), source.unbind(0), strict=True):
        ours.copy_(theirs)
