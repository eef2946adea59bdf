"""Networks and update programs (kinfed.engine.contract.update_program) as compiled loops know them: as tables, with
which layers train, and the work memory a network needs.

A program has one row per instruction, of whole numbers (`what`) and of numbers (`amount`), which
kinfed.engine.compiled.fused_kernels reads. Models and clients' numbers are places in the tables of their addresses and
values.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kinfed.engine.backends.dense import FeedForwardNet
from kinfed.engine.backends.recurrent import RecurrentNet
from kinfed.engine.compiled.kernel_arguments import Unrolled
from kinfed.engine.contract.linear import Dense
from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Instruction, Mix, Norm, changes

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
        """The shape as which such examples are read; None if the network does not take them."""

    @abstractmethod
    def argument(self, shape: Shape) -> Any:
        """The layers of a kernel's Network."""

    @abstractmethod
    def memory(self, shape: Shape, width: int) -> tuple[int, int, int]:
        """Numbers that a batch of `width` examples needs: of all layers, of a delta, and to spare."""

    def trained(self, mask: Tensor | None) -> tuple[np.ndarray, bool]:
        """[rows, 2 or 4] whether weights and biases are trained, and whether the mask takes each whole or not."""
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
        rows = [
            (d.inputs, d.outputs, d.weight, _bias(d), _ACTIVATIONS[activation], sum(sizes[:i]))
            for i, (d, activation) in enumerate(net.steps)
        ]
        self._table = np.array(rows, dtype=np.int64)

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
    """Numbers per example of an LSTM layer: h and c at T + 1 times, four gates and tanh c at T."""
    return (7 * length + 2) * units


def _panels(columns: int) -> int:
    """Columns of whole panels (kinfed.engine.compiled.products)."""
    return -(-columns // 16) * 16


def _bias(dense: Dense) -> int:
    return _ABSENT if dense.bias is None else dense.bias


MIX, STEP, GRADIENT, ADD, NORM, COLLECT = range(6)
# Of `what`. RESULT: the model that changes. AT: the base of a mixture or sum, where the gradient is taken, or what is
# measured or collected. OTHER: toward which one mixes, what is added, or the center of a proximal term. NUMBER: what a
# rate is multiplied with, or where windows begin. LEARNT: the number that changes, or the width of windows.
KIND, RESULT, AT, OTHER, NUMBER, TIMES, STREAM, LEARNT, BASE, TOWARD, FIRST_ONLY = range(11)
# Of `amount`. RATE: the share of a mixture, or the scale of a sum or norm, too.
RATE, LAM, DECAY, LEARN_RATE, POWER, LEAST = range(6)
NONE = -1  # instead of a place


@dataclass(frozen=True)
class Program:
    what: np.ndarray  # [instructions, 11] int64
    amount: np.ndarray  # [instructions, 6] float64
    models: tuple[str, ...]  # those that are kept, and then those that last for one batch
    numbers: tuple[str, ...]  # the same

    @property
    def gradients(self) -> int:
        """Gradients that are computed with every batch."""
        kind = self.what[:, KIND]
        return int(self.what[(kind == STEP) | (kind == GRADIENT), TIMES].sum())

    @property
    def learns(self) -> bool:
        return bool(((self.what[:, KIND] == STEP) & (self.what[:, LEARNT] != NONE)).any())


def make_program(
    program: Sequence[Instruction], models: Mapping[str, Tensor], numbers: Mapping[str, Tensor]
) -> Program:
    all_numbers = tuple(dict.fromkeys([*numbers, *(step.number for step in program if isinstance(step, Norm))]))
    changed = [name for step in program for name in changes(step) if name not in all_numbers]
    names = tuple(dict.fromkeys([*models, *changed]))
    place = {name: number for number, name in enumerate(names)}
    value = {None: NONE} | {name: number for number, name in enumerate(all_numbers)}
    what, amount = np.zeros((len(program), 11), np.int64), np.zeros((len(program), 6))
    what[:, [OTHER, NUMBER, LEARNT]], what[:, TIMES] = NONE, 1
    for step, whole, real in zip(program, what, amount, strict=True):
        _describe(step, place, value, whole, real)
    return Program(what, amount, names, all_numbers)


def _describe(
    step: Instruction, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    match step:
        case Mix():
            share_by, share = (step.share, 1.0) if isinstance(step.share, str) else (None, step.share)
            whole[:TIMES] = MIX, place[step.result], place[step.base], place[step.toward], value[share_by]
            real[RATE] = share
        case Add():
            direction, factor = place[step.direction], value[step.number]
            whole[:TIMES] = ADD, place[step.result], place[step.base], direction, factor
            real[RATE] = step.scale
        case Gradient():
            whole[:OTHER], whole[STREAM] = (GRADIENT, place[step.result], place[step.at]), step.stream
            real[[RATE, DECAY]] = -1.0, step.decay  # a step of length -1 from zero
        case Norm():
            whole[[KIND, AT, LEARNT]] = NORM, place[step.model], value[step.number]
            real[[RATE, POWER, LEAST]] = step.scale, step.power, step.least
        case Collect():
            whole[:OTHER] = COLLECT, place[step.result], place[step.model]
            whole[[NUMBER, LEARNT]] = value[step.begin], value[step.width]
        case GradientStep():
            _describe_step(step, place, value, whole, real)


def _describe_step(
    step: GradientStep, place: Mapping[str, int], value: Mapping[str | None, int], whole: np.ndarray, real: np.ndarray
) -> None:
    lam, center = (0.0, NONE) if step.proximal is None else (step.proximal[0], place[step.proximal[1]])
    whole[:NUMBER] = STEP, place[step.model], place[step.at or step.model], center
    whole[[NUMBER, TIMES, STREAM]] = value[step.number], step.times, step.stream
    real[:LEARN_RATE] = step.rate, lam, step.decay
    if (learn := step.learn) is not None:
        whole[LEARNT:] = value[learn.number], place[learn.base], place[learn.toward], learn.first_only
        real[LEARN_RATE] = learn.rate
