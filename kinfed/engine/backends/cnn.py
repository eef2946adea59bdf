"""Convolutional networks of one client: forward and backward by hand, gradients added where they belong.

A network is a chain of Conv2d, MaxPool2d, ReLU and Tanh, one Flatten, then Linear, ReLU and Tanh. Convolutions gain
nothing from stacking clients, but without autograd there is no graph to build and no gradient to store: a dense
layer's product is added straight to its weights (one `addmm`), activations are overwritten, and images keep their
channels last all the way, which is the layout in which the processor's convolutions and pooling run fastest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kinfed.engine.contract import aten_ops
from kinfed.engine.contract.aten_ops import Pair
from kinfed.engine.contract.feature_loss import RowFeatureLoss
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.rows.module_checks import chain_of, owns_its_parameters

_CHANNELS_LAST = torch.channels_last


@dataclass(frozen=True)
class GradientTarget:
    """The place a gradient goes to: row <- row + amount * (center - row) + scale * gradient."""

    row: Tensor  # [P]
    scale: float
    center: Tensor | None = None  # [P]
    amount: float = 0.0
    trained: frozenset[int] | None = None  # starts of the parameters that take it; None: all do

    def takes(self, start: int | None) -> bool:
        """Whether the parameters that begin there take their gradient."""
        return start is not None and (self.trained is None or start in self.trained)

    def slot(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """The place of some parameters, already moved towards the center: to be called once per step."""
        stop = start + torch.Size(shape).numel()
        place = self.row[start:stop]
        if self.center is not None:
            place.lerp_(self.center[start:stop], self.amount)
        return place.view(shape)


class ImageLayer(ABC):
    """One layer of a network for images; several of them know where their parameters start in the flat row."""

    @abstractmethod
    def forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        """(output, what backward needs)."""

    @abstractmethod
    def backward(self, saved: Any, delta: Tensor, target: GradientTarget, last: bool) -> Tensor:
        """Add the layer's gradient and return the delta at its input; of the `last` layer that is not used."""


@dataclass(frozen=True)
class _Weighted(ImageLayer):
    shape: tuple[int, ...]  # of the weight
    weight: int  # start in the flat row
    bias: int | None

    def parameters(self, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of weight and bias."""
        w = row[self.weight : self.weight + torch.Size(self.shape).numel()].view(self.shape)
        return w, None if self.bias is None else row[self.bias : self.bias + self.shape[0]]

    def add_to_bias(self, target: GradientTarget, delta: Tensor, axes: tuple[int, ...]) -> None:
        if self.bias is not None and target.takes(self.bias):
            target.slot(self.bias, self.shape[:1]).add_(delta.sum(axes), alpha=target.scale)


@dataclass(frozen=True)
class Convolution(_Weighted):
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def subsamples(self) -> bool:
        """See `subsamples`: computed with stride 1 on every s-th pixel, which is the same."""
        return _subsamples(self.shape[2:], self.stride, self.padding)

    def forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        w, b = self.parameters(row)
        w, size, stride = w.contiguous(memory_format=_CHANNELS_LAST), x.shape, self.stride
        if self.subsamples:
            x, stride = _subsample(x, stride).contiguous(memory_format=_CHANNELS_LAST), (1, 1)
        return torch.conv2d(x, w, b, stride, self.padding, self.dilation, self.groups), (x, w, size)

    def backward(self, saved: Any, delta: Tensor, target: GradientTarget, last: bool) -> Tensor:
        x, w, size = saved
        stride = (1, 1) if self.subsamples else self.stride
        below, gradient = aten_ops.convolution_backward(
            delta, x, w, stride, self.padding, self.dilation, self.groups,
            below=not last, of_weight=target.takes(self.weight),
        )  # fmt: skip
        if gradient is not None:
            target.slot(self.weight, self.shape).add_(gradient, alpha=target.scale)
        self.add_to_bias(target, delta, (0, 2, 3))
        if below is None:
            return delta
        if not self.subsamples:
            return below
        whole = torch.zeros(size, dtype=below.dtype, device=below.device).contiguous(memory_format=_CHANNELS_LAST)
        _subsample(whole, self.stride).copy_(below)
        return whole


@dataclass(frozen=True)
class Pooling(ImageLayer):
    window: tuple[Any, ...]  # kernel, stride, padding, dilation, ceil_mode

    def forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        out, places = aten_ops.max_pool2d(x, *self.window)
        return out, (x, places)

    def backward(self, saved: Any, delta: Tensor, target: GradientTarget, last: bool) -> Tensor:
        x, places = saved
        return aten_ops.max_pool2d_backward(delta, x, *self.window, places)


@dataclass(frozen=True)
class Activation(ImageLayer):
    name: str  # "relu" or "tanh"
    in_place: bool  # the layer before does not need its output on the way back

    def forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        if not self.in_place:
            x = x.clone()
        out = x.relu_() if self.name == "relu" else x.tanh_()
        return out, out

    def backward(self, saved: Any, delta: Tensor, target: GradientTarget, last: bool) -> Tensor:
        if self.name == "relu":
            return aten_ops.relu_backward(delta, saved)
        return aten_ops.tanh_backward(delta, saved)


@dataclass(frozen=True)
class Flattening(ImageLayer):
    def forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        return x.flatten(1), x.shape

    def backward(self, saved: Any, delta: Tensor, target: GradientTarget, last: bool) -> Tensor:
        return delta.view(saved).contiguous(memory_format=_CHANNELS_LAST)


@dataclass(frozen=True)
class Affine(_Weighted):
    def forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        w, b = self.parameters(row)
        return x @ w.T if b is None else torch.addmm(b, x, w.T), (x, w)

    def backward(self, saved: Any, delta: Tensor, target: GradientTarget, last: bool) -> Tensor:
        x, w = saved
        below = delta if last else delta @ w
        if target.takes(self.weight):
            target.slot(self.weight, self.shape).addmm_(delta.T, x, alpha=target.scale)
        self.add_to_bias(target, delta, (0,))
        return below


@dataclass(frozen=True)
class ConvolutionalNet:
    layers: tuple[ImageLayer, ...]
    objective: Objective = CROSS_ENTROPY

    @classmethod
    def from_module(cls, module: nn.Module, objective: Objective = CROSS_ENTROPY) -> ConvolutionalNet | None:
        """The network as a chain of these layers, or None if it is anything else."""
        chain = chain_of(module, (nn.Conv2d, nn.MaxPool2d, nn.Linear, nn.ReLU, nn.Tanh, nn.Flatten, nn.Identity))
        if chain is None or not owns_its_parameters(module, chain):
            return None
        layers: list[ImageLayer] = []
        position, flat = 0, False
        for child in chain:
            if isinstance(child, nn.Identity):
                continue
            layer = _layer_of(child, position, flat, layers[-1] if layers else None)
            if layer is None:
                return None
            flat = flat or isinstance(layer, Flattening)
            position += sum(p.numel() for p in child.parameters())
            layers.append(layer)
        if not any(isinstance(layer, Convolution) for layer in layers) or not isinstance(layers[-1], Affine):
            return None
        return cls(tuple(layers), objective)

    @torch.no_grad()
    def add_gradient(
        self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, target: GradientTarget,
        feature_loss: RowFeatureLoss | None = None,
    ) -> None:  # fmt: skip
        """Send the gradient of sum_b weight_b * loss_b at `row` [P] to `target`, which may be the row itself."""
        x = x.contiguous(memory_format=_CHANNELS_LAST)
        saved = []
        for layer in self.layers:
            x, values = layer.forward(row, x)
            saved.append(values)
        # The last layer is Affine, which saved (input, weight).
        dz, dphi = (None, None) if feature_loss is None else feature_loss(saved[-1][0], x)
        delta = self.objective.delta(x, y, weight) if dz is None else dz
        lowest = self._lowest(target)
        for number in range(len(self.layers) - 1, lowest - 1, -1):
            delta = self.layers[number].backward(saved.pop(), delta, target, number == lowest)
            if dphi is not None and number == len(self.layers) - 1 and number > lowest:
                delta += dphi

    def _lowest(self, target: GradientTarget) -> int:
        """The first layer that takes a gradient: no delta is needed below it."""
        if target.trained is None:
            return 0
        starts = [(layer.weight, layer.bias) if isinstance(layer, _Weighted) else () for layer in self.layers]
        return next((i for i, places in enumerate(starts) if any(map(target.takes, places))), len(self.layers))


def _layer_of(child: nn.Module, position: int, flat: bool, before: ImageLayer | None) -> ImageLayer | None:
    """The layer for a module whose parameters begin at `position`; `flat`: examples are vectors by now."""
    if isinstance(child, nn.ReLU | nn.Tanh):
        in_place = isinstance(before, Convolution | Pooling | Affine)
        return Activation("relu" if isinstance(child, nn.ReLU) else "tanh", in_place)
    if isinstance(child, nn.Linear):
        return Affine(*_places(child, position)) if flat else None
    if flat:
        return None
    if isinstance(child, nn.Flatten):
        return Flattening() if (child.start_dim, child.end_dim) == (1, -1) else None
    if isinstance(child, nn.MaxPool2d) and not child.return_indices:
        sizes = child.kernel_size, child.stride, child.padding, child.dilation
        return Pooling((*map(_pair, sizes), child.ceil_mode))
    if isinstance(child, nn.Conv2d) and child.padding_mode == "zeros" and not isinstance(child.padding, str):
        how = _pair(child.stride), _pair(child.padding), _pair(child.dilation)
        return Convolution(*_places(child, position), *how, child.groups)
    return None


def subsamples(module: nn.Module) -> bool:
    """Whether this is a 1x1 convolution that skips pixels, which must not meet channels-last images.

    oneDNN's weight gradient of such a layer writes past its buffer if input channels are few: the heap is
    corrupted, or the gradient is silently wrong (torch 2.13, AVX2)."""
    return (
        isinstance(module, nn.Conv2d)
        and not isinstance(module.padding, str)
        and _subsamples(module.kernel_size, module.stride, module.padding)
    )


def _subsamples(kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    return kernel == (1, 1) and stride != (1, 1) and padding == (0, 0)


def _subsample(x: Tensor, stride: Pair) -> Tensor:
    """A view of every s-th row and column of images [B, C, H, W]."""
    return x[:, :, :: stride[0], :: stride[1]]


def _places(child: nn.Linear | nn.Conv2d, position: int) -> tuple[tuple[int, ...], int, int | None]:
    """Shape of the weight, and where weight and bias begin."""
    return tuple(child.weight.shape), position, None if child.bias is None else position + child.weight.numel()


def _pair(size: int | tuple[int, ...]) -> Pair:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
