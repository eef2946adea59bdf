"""ResNet-18 and MobileNetV2 for small images.

K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016. As usual for images of 32x32, the first layer is
a 3x3 convolution of stride 1 without pooling; four stages of two blocks halve the image three times.

M. Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018, Table 2. For images of 32x32 the
first layer and the second stage keep their size, so that the image is halved three times instead of five.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kinfed.core import option
from kinfed.engine.zoo.classics import image_shape
from kinfed.errors import ModelError

NormName = Literal["batch", "group"]


def image_norm(norm: NormName, channels: int, groups: int) -> nn.Module:
    """BatchNorm2d, whose running statistics are part of a client's model, or GroupNorm, which has none."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if channels % groups:
        raise ModelError(
            f"a layer of {channels} channels cannot be {groups} groups of equal size; change width or groups"
        )
    return nn.GroupNorm(groups, channels)


def start_convolutions(module: nn.Module) -> None:
    """Weights of convolutions start as He et al. (2015) have it for ReLU networks."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


@dataclass(frozen=True)
class ResNetOptions:
    norm: NormName = option("batch", "group needs no running statistics and is usual in federated learning")
    groups: int = option(2, "groups of every group normalization; 2 in Reddi et al. (2021)", ge=1)
    width: int = option(64, "channels of the first stage; the last has eight times as many", ge=1)


class Shortcut(nn.Module):
    """Every `stride`-th pixel, with other channels: a 1x1 convolution that skips pixels.

    Pixels are skipped before the convolution, which is the same, and the faster way. The other way oneDNN's weight
    gradient writes past its buffer where there are few input channels (see kinfed.engine.backends.cnn.subsamples)."""

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

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormName, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = image_norm(norm, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = image_norm(norm, outputs, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = Shortcut(inputs, outputs, stride, image_norm(norm, outputs, groups))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, norm: NormName, groups: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = image_norm(norm, width, groups)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            for stride in (1 if stage == 0 else 2, 1):
                blocks.append(ResidualBlock(inputs, outputs, stride, norm, groups))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        start_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(torch.relu(self.norm(self.conv(x))))
        out: Tensor = self.head(h.mean((2, 3)))
        return out


def resnet18(
    shape: tuple[int, ...], classes: int, norm: NormName = "batch", groups: int = 2, width: int = 64
) -> nn.Module:
    """ResNet-18 for images of at least 8x8."""
    channels, _, _ = image_shape("resnet18", shape, 8)
    return ResNet(channels, classes, norm, groups, width)


_STAGES = (  # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


@dataclass(frozen=True)
class MobileNetOptions:
    norm: NormName = option("batch", "group needs no running statistics and is usual in federated learning")
    groups: int = option(2, "groups of every group normalization", ge=1)
    width: float = option(1.0, "factor on the channels of all layers but the last", gt=0)


class InvertedResidual(nn.Module):
    """1x1 to many channels, 3x3 on each of them alone, 1x1 back to few; what came in is added where it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: NormName, groups: int) -> None:
        super().__init__()
        inner = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += _convolution(inputs, inner, 1, 1, 1, norm, groups)
        layers += _convolution(inner, inner, 3, stride, inner, norm, groups)
        layers += [nn.Conv2d(inner, outputs, 1, bias=False), image_norm(norm, outputs, groups)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x)
        return x + h if self.adds else h


class MobileNet(nn.Module):
    def __init__(self, channels: int, classes: int, norm: NormName, groups: int, width: float) -> None:
        super().__init__()
        inputs = _scaled(32, width)
        layers: list[nn.Module] = _convolution(channels, inputs, 3, 1, 1, norm, groups)
        for expansion, size, blocks, first_stride in _STAGES:
            outputs = _scaled(size, width)
            for block in range(blocks):
                stride = first_stride if block == 0 else 1
                layers.append(InvertedResidual(inputs, outputs, stride, expansion, norm, groups))
                inputs = outputs
        last = max(1280, _scaled(1280, width))
        layers += _convolution(inputs, last, 1, 1, 1, norm, groups)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(last, classes)
        start_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x).mean((2, 3)))
        return out


def _convolution(
    inputs: int, outputs: int, side: int, stride: int, parts: int, norm: NormName, groups: int
) -> list[nn.Module]:
    """Convolution in `parts` groups of channels, normalization, ReLU up to 6."""
    conv = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, groups=parts, bias=False)
    return [conv, image_norm(norm, outputs, groups), nn.ReLU6()]


def _scaled(channels: int, width: float) -> int:
    """A multiple of 8 near channels * width, at least 8 and not below nine tenths of it, as in the paper's code."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def mobilenet(
    shape: tuple[int, ...], classes: int, norm: NormName = "batch", groups: int = 2, width: float = 1.0
) -> nn.Module:
    """MobileNetV2 for images of at least 8x8."""
    channels, _, _ = image_shape("mobilenet", shape, 8)
    return MobileNet(channels, classes, norm, groups, width)
