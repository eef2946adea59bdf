"""Networks as compiled loops know them: a table, which layers train, and the work memory a network needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kinfed.engine.backends.dense import FeedForwardNet
from kinfed.engine.backends.lstm import RecurrentNet
from kinfed.engine.compiled.kernel_arguments import Unrolled
from kinfed.engine.contract.linear import Dense

_ACTIVATIONS = {"": 0, "relu": 1, "tanh": 2}  # as kinfed.engine.compiled.fused_steps numbers them
_ABSENT = -1


class Shape(NamedTuple):
    """Shape of one example: `length` time steps of `width` features."""

    length: int
    width: int


class FusedNet(ABC):
    """The network of one model."""

    network: str  # for which kernels are compiled
    outputs: int  # of the last layer
    layers: list[list[Dense]]  # by row of the table: the dense maps that it names

    @abstractmethod
    def shape_of(self, example: tuple[int, ...]) -> Shape | None:
        """The shape as which such examples are read; None where the network does not take them."""

    @abstractmethod
    def argument(self, shape: Shape) -> Any:
        """The layers of a kernel's Network."""

    @abstractmethod
    def memory(self, shape: Shape, width: int) -> tuple[int, int, int]:
        """Numbers that a batch of `width` examples needs: of all layers, of a delta, and to spare."""

    def trained(self, mask: Tensor | None) -> tuple[np.ndarray, bool]:
        """[rows of the table, 2 or 4] whether weights and biases are trained, and whether the mask says all or nothing
        of each."""
        trains, whole = np.ones((len(self.layers), 2 * len(self.layers[0])), dtype=np.int64), True
        if mask is None:
            return trains, whole
        trains[:] = 0
        for number, maps in enumerate(self.layers):
            for which, dense in enumerate(maps):
                weight = mask[dense.weight : dense.weight + dense.inputs * dense.outputs]
                bias = mask[:0] if dense.bias is None else mask[dense.bias : dense.bias + dense.outputs]
                for column, part in enumerate((weight, bias)):
                    trains[number, 2 * which + column] = bool(part.any())
                    whole &= bool(part.all()) or not bool(part.any())
        return trains, whole


class DenseTable(FusedNet):
    network = "dense"

    def __init__(self, net: FeedForwardNet) -> None:
        self._flattens = net.flattens
        self.layers = [[dense] for dense, _ in net.steps]
        sizes = [dense.outputs for dense, _ in net.steps]
        self.outputs, self._in_all, self._widest = sizes[-1], sum(sizes), max(sizes)
        self._table = np.array(
            [
                (d.inputs, d.outputs, d.weight, _bias(d), _ACTIVATIONS[activation], sum(sizes[:i]))
                for i, (d, activation) in enumerate(net.steps)
            ],
            dtype=np.int64,
        )

    def shape_of(self, example: tuple[int, ...]) -> Shape | None:
        inputs = self.layers[0][0].inputs
        fits = prod(example) == inputs and (self._flattens or len(example) == 1)
        return Shape(1, inputs) if fits else None

    def argument(self, shape: Shape) -> Any:
        return self._table

    def memory(self, shape: Shape, width: int) -> tuple[int, int, int]:
        return width * self._in_all, width * self._widest, width * self._widest


class RecurrentTable(FusedNet):
    network = "recurrent"

    def __init__(self, net: RecurrentNet) -> None:
        self.layers = [[layer.x, layer.h] for layer in net.layers] + [[net.head]]
        self.outputs = net.head.outputs
        self._units = [layer.hidden for layer in net.layers]

    def shape_of(self, example: tuple[int, ...]) -> Shape | None:
        inputs = self.layers[0][0].inputs
        return Shape(*example) if len(example) == 2 and example[0] > 0 and example[1] == inputs else None

    def argument(self, shape: Shape) -> Any:
        rows, place = [], 0
        for (x, h), units in zip(self.layers[:-1], self._units, strict=True):
            rows.append((x.inputs, units, x.weight, _bias(x), h.weight, place, _bias(h)))
            place += _layer_memory(shape.length, units)
        head = self.layers[-1][0]
        rows.append((head.inputs, head.outputs, head.weight, _bias(head), 0, place, 0))
        return Unrolled(np.array(rows, dtype=np.int64), shape.length)

    def memory(self, shape: Shape, width: int) -> tuple[int, int, int]:
        widest, rows = max(self._units), shape.length * width
        layers = sum(_layer_memory(shape.length, units) for units in self._units) * width + width * self.outputs
        inputs = max(widest, shape.width)
        panels = max(_panels(4 * widest) * inputs, _panels(inputs) * max(rows, 4 * widest))
        return layers, width * self.outputs, (width + 5 * rows) * widest + panels


def fused_net(net: FeedForwardNet | RecurrentNet) -> FusedNet:
    """The network for compiled loops."""
    return DenseTable(net) if isinstance(net, FeedForwardNet) else RecurrentTable(net)


def _layer_memory(length: int, units: int) -> int:
    """Numbers per example of an LSTM layer (kinfed.engine.compiled.fused_recurrent): h and c at T + 1 times, four gates
    and tanh c at T."""
    return (7 * length + 2) * units


def _panels(columns: int) -> int:
    """Columns of whole panels (kinfed.engine.compiled.products)."""
    return -(-columns // 16) * 16


def _bias(dense: Dense) -> int:
    return _ABSENT if dense.bias is None else dense.bias
