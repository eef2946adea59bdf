"""Dense, convolutional, recurrent and residual models of the papers.

Convolutional models pool before the ReLU: for max pooling the two commute exactly, and the ReLU then touches a
quarter of the values.

K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016. As usual for images of 32x32, the first layer is
a 3x3 convolution of stride 1 without pooling; four stages of two blocks halve the image three times.

M. Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018, Table 2. For images of 32x32 the
first layer and the second stage keep their size, so that the image is halved three times instead of five.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kinfed.core import option
from kinfed.engine.backends.recurrent import LastOutput
from kinfed.errors import ModelError


def mlr(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 128 (CGPFL's DNN)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 128), nn.ReLU(), nn.Linear(128, classes))


@dataclass(frozen=True)
class LeNetOptions:
    activation: Literal["tanh", "relu"] = option("tanh", "relu is what later papers call LeNet-5")
    pooling: Literal["average", "max"] = option("average", "max is what later papers call LeNet-5")


def lenet5(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """LeNet-5: conv 6 and 16 (5x5; the first padded, so that digits of 28x28 fit), fully connected 120 and 84.

    LeCun et al. (1998) connect the second convolution to some of the first one's maps and give subsampling weights;
    like everyone since, this network has neither."""
    c, h, w = image_shape("lenet5", shape, 12)
    options = LeNetOptions(**values)
    act: type[nn.Module] = nn.Tanh if options.activation == "tanh" else nn.ReLU

    def pooled() -> tuple[nn.Module, nn.Module]:
        return (act(), nn.AvgPool2d(2)) if options.pooling == "average" else (nn.MaxPool2d(2), act())

    return nn.Sequential(
        nn.Conv2d(c, 6, 5, padding=2), *pooled(),
        nn.Conv2d(6, 16, 5), *pooled(),
        nn.Flatten(),
        nn.Linear(16 * ((h // 2 - 4) // 2) * ((w // 2 - 4) // 2), 120), act(),
        nn.Linear(120, 84), act(),
        nn.Linear(84, classes),
    )  # fmt: skip


def _convolutional(
    name: str, shape: tuple[int, ...], classes: int, least: int, convolutions: Sequence[tuple[int, bool]], side: int,
    dense: Sequence[int], padding: int = 0,
) -> nn.Module:  # fmt: skip
    """Convolutions (channels, whether 2x2 pooling follows) and dense layers that fit the image, each with ReLU; images
    have at least `least` pixels each way."""
    channels, *size = image_shape(name, shape, least)
    layers: list[nn.Module] = []
    for outputs, pooled in convolutions:
        layers += [nn.Conv2d(channels, outputs, side, padding=padding), *[nn.MaxPool2d(2)] * pooled, nn.ReLU()]
        channels = outputs
        size = [(length + 2 * padding - side + 1) // (2 if pooled else 1) for length in size]
    inputs = channels * prod(size)
    layers.append(nn.Flatten())
    for outputs in dense:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def cnn_tutorial(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Self-FL's CIFAR-10 network: conv 6 and 16 (5x5), fully connected 120 and 84."""
    return _convolutional("cnn_tutorial", shape, classes, 16, ((6, True), (16, True)), 5, (120, 84))


def cnn_fomo(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedFomo's network: conv 32, 64, 64 (3x3), fully connected 64; the first dense layer fits the image."""
    return _convolutional("cnn_fomo", shape, classes, 18, ((32, True), (64, True), (64, False)), 3, (64,))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """CGPFL's CIFAR-10 network: conv 32 and 64 (5x5), fully connected 512."""
    return _convolutional("cnn", shape, classes, 16, ((32, True), (64, True)), 5, (512,))


def cnn_small(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A light network for images from 8x8: conv 16 and 32 (3x3, padded), fully connected 64."""
    return _convolutional("cnn_small", shape, classes, 8, ((16, True), (32, True)), 3, (64,), padding=1)


@dataclass(frozen=True)
class WakewordCNNOptions:
    width: int = option(
        42, "channels of the first layer: 42 makes the paper's 3 million parameters, 8 suits two cores", ge=1
    )


def wakeword_cnn(shape: tuple[int, ...], classes: int, width: int = 42) -> nn.Module:
    """Self-FL's kind of network for wake words: 11 layers of convolution (seven, 3x3) and max pooling (four).

    The paper tells the number of layers and of parameters only. Weights start as He et al. (2015) have it: with
    torch's own start the signal fades on its way through seven layers that nothing normalizes."""
    c, h, w = image_shape("wakeword_cnn", shape, 16)
    layers: list[nn.Module] = []
    for factor, pooled in ((1, True), (2, True), (4, False), (4, True), (8, False), (8, True), (8, False)):
        conv = nn.Conv2d(c, factor * width, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers += [conv, nn.MaxPool2d(2), nn.ReLU()] if pooled else [conv, nn.ReLU()]
        c = factor * width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(c * (h // 16) * (w // 16), classes))


@dataclass(frozen=True)
class LSTMOptions:
    hidden: int = option(256, "units of every layer: 256 in Self-FL's paper, 100 in FedProx's code", ge=1)
    layers: int = option(2, "LSTM layers", ge=1)


def lstm(shape: tuple[int, ...], classes: int, hidden: int = 256, layers: int = 2) -> nn.Module:
    """Self-FL's network for Sent140: two LSTM layers of 256 and a fully connected one on the last output."""
    width = _vectors("lstm", shape)
    return nn.Sequential(nn.LSTM(width, hidden, layers, batch_first=True), LastOutput(), nn.Linear(hidden, classes))


@dataclass(frozen=True)
class GRUOptions:
    hidden: int = option(64, "units of every layer", ge=1)
    layers: int = option(1, "GRU layers", ge=1)


def gru(shape: tuple[int, ...], classes: int, hidden: int = 64, layers: int = 1) -> nn.Module:
    """GRU layers and a fully connected one on the last output."""
    width = _vectors("gru", shape)
    return nn.Sequential(nn.GRU(width, hidden, layers, batch_first=True), LastOutput(), nn.Linear(hidden, classes))


def _vectors(name: str, shape: tuple[int, ...]) -> int:
    """The numbers of a step, for a model that reads sequences of vectors."""
    if len(shape) != 2:
        raise ModelError(
            f"model {name} reads sequences of vectors, [length, numbers]; got examples of shape {list(shape)}"
        )
    return shape[1]


def image_shape(name: str, shape: tuple[int, ...], side: int) -> tuple[int, int, int]:
    """(channels, height, width), for a model that needs images of at least `side` pixels each way."""
    if len(shape) != 3 or min(shape[1:]) < side:
        raise ModelError(
            f"model {name} needs images [channels, height, width] of at least {side}x{side}; "
            f"got examples of shape {list(shape)}; use mlr or mlp for tables"
        )
    return shape[0], shape[1], shape[2]


@dataclass(frozen=True)
class NormOptions:
    """Normalization of images: BatchNorm2d, whose running statistics are part of a client's model, or GroupNorm, which
    has none."""

    norm: Literal["batch", "group"] = option(
        "batch", "group needs no running statistics and is usual in federated learning"
    )
    groups: int = option(2, "groups of every group normalization", ge=1)

    def layer(self, channels: int) -> nn.Module:
        if self.norm == "batch":
            return nn.BatchNorm2d(channels)
        if channels % self.groups:
            raise ModelError(
                f"a layer of {channels} channels cannot be {self.groups} groups of equal size; change width or groups"
            )
        return nn.GroupNorm(self.groups, channels)


def start_convolutions(module: nn.Module) -> None:
    """Weights of convolutions start as He et al. (2015) have it for ReLU networks."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


@dataclass(frozen=True)
class ResNetOptions(NormOptions):
    groups: int = option(2, "groups of every group normalization; 2 in Reddi et al. (2021)", ge=1)
    width: int = option(64, "channels of the first stage; the last has eight times as many", ge=1)


class Shortcut(nn.Module):
    """Every `stride`-th pixel, with other channels: a 1x1 convolution that skips pixels.

    Pixels are skipped before the convolution, which is the same, and the faster way. The other way oneDNN's weight
    gradient writes past its buffer if input channels are few (see kinfed.engine.backends.cnn.subsamples)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: nn.Module) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x[:, :, :: self.stride, :: self.stride]))
        return out


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, and what came in added to what they give."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormOptions) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm.layer(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm.layer(outputs)
        fits = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if fits else Shortcut(inputs, outputs, stride, norm.layer(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, options: ResNetOptions) -> None:
        super().__init__()
        inputs = options.width
        self.conv = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
        self.norm = options.layer(inputs)
        blocks: list[nn.Module] = []
        for stage in range(4):
            outputs = options.width * 2**stage
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(ResidualBlock(inputs, outputs, stride, options))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        start_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(torch.relu(self.norm(self.conv(x))))
        out: Tensor = self.head(h.mean((2, 3)))
        return out


def resnet18(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """ResNet-18 for images of at least 8x8."""
    return ResNet(image_shape("resnet18", shape, 8)[0], classes, ResNetOptions(**values))


_STAGES = (  # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


@dataclass(frozen=True)
class MobileNetOptions(NormOptions):
    width: float = option(1.0, "factor on the channels of all layers but the last", gt=0)


class InvertedResidual(nn.Module):
    """1x1 to many channels, 3x3 on each of them alone, 1x1 back to few; what came in is added where it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: NormOptions) -> None:
        super().__init__()
        inner = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += _convolution(inputs, inner, 1, 1, 1, norm)
        layers += _convolution(inner, inner, 3, stride, inner, norm)
        layers += [nn.Conv2d(inner, outputs, 1, bias=False), norm.layer(outputs)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x)
        return x + h if self.adds else h


class MobileNet(nn.Module):
    def __init__(self, channels: int, classes: int, options: MobileNetOptions) -> None:
        super().__init__()
        width = options.width
        inputs = _scaled(32, width)
        layers: list[nn.Module] = _convolution(channels, inputs, 3, 1, 1, options)
        for expansion, size, blocks, first_stride in _STAGES:
            outputs = _scaled(size, width)
            for block in range(blocks):
                stride = first_stride if block == 0 else 1
                layers.append(InvertedResidual(inputs, outputs, stride, expansion, options))
                inputs = outputs
        last = max(1280, _scaled(1280, width))
        layers += _convolution(inputs, last, 1, 1, 1, options)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(last, classes)
        start_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x).mean((2, 3)))
        return out


def _convolution(inputs: int, outputs: int, side: int, stride: int, parts: int, norm: NormOptions) -> list[nn.Module]:
    """Convolution in `parts` groups of channels, normalization, ReLU up to 6."""
    conv = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, groups=parts, bias=False)
    return [conv, norm.layer(outputs), nn.ReLU6()]


def _scaled(channels: int, width: float) -> int:
    """A multiple of 8 near channels * width, at least 8 and not below nine tenths of it, as in the paper's code."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def mobilenet(shape: tuple[int, ...], classes: int, **values: Any) -> nn.Module:
    """MobileNetV2 for images of at least 8x8."""
    return MobileNet(image_shape("mobilenet", shape, 8)[0], classes, MobileNetOptions(**values))
