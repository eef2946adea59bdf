"""Dense, convolutional and recurrent models of the papers.

Convolutional models pool before the ReLU: for max pooling the two commute exactly, and the ReLU then touches a
quarter of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from torch import nn

from kinfed.core import option
from kinfed.engine.backends.lstm import LastOutput
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
    shape: Sequence[int], classes: int, convolutions: Sequence[tuple[int, bool]], side: int, dense: Sequence[int],
    padding: int = 0,
) -> nn.Module:  # fmt: skip
    """Convolutions (channels, whether 2x2 pooling follows) and dense layers that fit the image, each with ReLU."""
    channels, *size = shape
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
    image = image_shape("cnn_tutorial", shape, 16)
    return _convolutional(image, classes, ((6, True), (16, True)), 5, (120, 84))


def cnn_fomo(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedFomo's network: conv 32, 64, 64 (3x3), fully connected 64; the first dense layer fits the image."""
    image = image_shape("cnn_fomo", shape, 18)
    return _convolutional(image, classes, ((32, True), (64, True), (64, False)), 3, (64,))


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """CGPFL's CIFAR-10 network: conv 32 and 64 (5x5), fully connected 512."""
    return _convolutional(image_shape("cnn", shape, 16), classes, ((32, True), (64, True)), 5, (512,))


def cnn_small(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A light network for images from 8x8: conv 16 and 32 (3x3, padded), fully connected 64."""
    image = image_shape("cnn_small", shape, 8)
    return _convolutional(image, classes, ((16, True), (32, True)), 3, (64,), padding=1)


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
    if len(shape) != 2:
        raise ModelError(
            f"model lstm reads sequences of vectors, [length, numbers]; got examples of shape {list(shape)}"
        )
    return nn.Sequential(nn.LSTM(shape[1], hidden, layers, batch_first=True), LastOutput(), nn.Linear(hidden, classes))


def image_shape(name: str, shape: tuple[int, ...], side: int) -> tuple[int, int, int]:
    """(channels, height, width), for a model that needs images of at least `side` pixels each way."""
    if len(shape) != 3 or min(shape[1:]) < side:
        raise ModelError(
            f"model {name} needs images [channels, height, width] of at least {side}x{side}; "
            f"got examples of shape {list(shape)}; use mlr or mlp for tables"
        )
    return shape[0], shape[1], shape[2]
