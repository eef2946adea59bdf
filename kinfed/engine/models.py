"""The models of the papers, each a function of (input shape, number of classes) and of its options.

Convolutional models pool before the ReLU: for max pooling the two commute exactly, and the ReLU then touches a
quarter of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import nn

from kinfed.core.options import make_options, option
from kinfed.core.registry import Registry
from kinfed.engine.lstm import LastOutput
from kinfed.errors import ModelError

Builder = Callable[..., nn.Module]  # (input shape, number of classes, **options)

MODELS: Registry[Builder] = Registry("model")


@MODELS.register("mlr", summary="multinomial logistic regression")
def mlr(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


@MODELS.register("mlp", summary="one hidden layer of 128 ReLU units")
def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """One hidden layer of 128 (CGPFL's DNN)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 128), nn.ReLU(), nn.Linear(128, classes))


def _needs_image(name: str, shape: tuple[int, ...], side: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < side:
        raise ModelError(
            f"model {name} needs images [channels, height, width] of at least {side}x{side}; "
            f"got examples of shape {list(shape)}; use mlr or mlp for tables"
        )
    return shape[0], shape[1], shape[2]


@MODELS.register("cnn_tutorial", summary="conv 6/16 5x5, fc 120/84 (Self-FL on CIFAR-10)")
def cnn_tutorial(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Self-FL's CIFAR-10 network: conv 6 and 16 (5x5), fully connected 120 and 84."""
    c, h, w = _needs_image("cnn_tutorial", shape, 16)
    return nn.Sequential(
        nn.Conv2d(c, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * _after(h, 5, 5) * _after(w, 5, 5), 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


@MODELS.register("cnn_fomo", summary="conv 32/64/64 3x3, fc 64 (FedFomo)")
def cnn_fomo(shape: tuple[int, ...], classes: int) -> nn.Module:
    """FedFomo's network: conv 32, 64, 64 (3x3), fully connected 64; the first dense layer fits the image."""
    c, h, w = _needs_image("cnn_fomo", shape, 18)
    side = (_after(h, 3, 3) - 2, _after(w, 3, 3) - 2)
    return nn.Sequential(
        nn.Conv2d(c, 32, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * side[0] * side[1], 64), nn.ReLU(),
        nn.Linear(64, classes),
    )  # fmt: skip


@MODELS.register("cnn", summary="conv 32/64 5x5, fc 512 (CGPFL on CIFAR-10)")
def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """CGPFL's CIFAR-10 network: conv 32 and 64 (5x5), fully connected 512."""
    c, h, w = _needs_image("cnn", shape, 16)
    return nn.Sequential(
        nn.Conv2d(c, 32, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * _after(h, 5, 5) * _after(w, 5, 5), 512), nn.ReLU(),
        nn.Linear(512, classes),
    )  # fmt: skip


@MODELS.register("cnn_small", summary="conv 16/32 3x3, fc 64, for images from 8x8")
def cnn_small(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A light network for images from 8x8: conv 16 and 32 (3x3, padded), fully connected 64."""
    c, h, w = _needs_image("cnn_small", shape, 8)
    return nn.Sequential(
        nn.Conv2d(c, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (h // 2 // 2) * (w // 2 // 2), 64), nn.ReLU(),
        nn.Linear(64, classes),
    )  # fmt: skip


@dataclass(frozen=True)
class WakewordCNNOptions:
    width: int = option(
        42, "channels of the first layer: 42 makes the paper's 3 million parameters, 8 suits two cores", ge=1
    )


@MODELS.register(
    "wakeword_cnn",
    summary="seven conv 3x3 and four pools, 3 million parameters (Self-FL on wake words)",
    options=WakewordCNNOptions,
)
def wakeword_cnn(shape: tuple[int, ...], classes: int, width: int = 42) -> nn.Module:
    """Self-FL's kind of network for wake words: 11 layers of convolution (seven, 3x3) and max pooling (four).

    The paper tells the number of layers and of parameters only. Weights start as He et al. (2015) have it: with
    torch's own start the signal fades on its way through seven layers that nothing normalizes."""
    c, h, w = _needs_image("wakeword_cnn", shape, 16)
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


@MODELS.register(
    "lstm", summary="two LSTM layers of 256 for sequences of vectors (Self-FL on Sent140)", options=LSTMOptions
)
def lstm(shape: tuple[int, ...], classes: int, hidden: int = 256, layers: int = 2) -> nn.Module:
    """Self-FL's network for Sent140: two LSTM layers of 256 and a fully connected one on the last output."""
    if len(shape) != 2:
        raise ModelError(
            f"model lstm reads sequences of vectors, [length, numbers]; got examples of shape {list(shape)}"
        )
    return nn.Sequential(nn.LSTM(shape[1], hidden, layers, batch_first=True), LastOutput(), nn.Linear(hidden, classes))


def _after(side: int, first: int, second: int) -> int:
    """Side length after two unpadded convolutions, each followed by 2x2 pooling."""
    return ((side - first + 1) // 2 - second + 1) // 2


def build_model(name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The registered model for examples of this shape."""
    entry = MODELS[name]
    values = {**entry.preset, **(options or {})}
    return entry.target(shape, classes, **asdict(make_options(entry.options, values, f"model {name}")))
