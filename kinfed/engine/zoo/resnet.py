"""ResNet-18 for small images.

K. He et al., Deep Residual Learning for Image Recognition, CVPR 2016. As usual for images of 32x32, the first layer is
a 3x3 convolution of stride 1 without pooling; four stages of two blocks halve the image three times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfed.core import option
from kinfed.engine.zoo.image_shape import image_shape
from kinfed.engine.zoo.norms import NormName, image_norm, start_convolutions


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
