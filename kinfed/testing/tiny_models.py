"""Models for the tiny federation: four features, three classes, about a hundred parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from kinfed.engine import lora

HIDDEN = 6


def tiny_model() -> nn.Module:
    """115 parameters in three dense layers: enough for methods that split a model by layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
    )  # fmt: skip


def normalized_model(inputs: int = 4, classes: int = 3) -> nn.Module:
    """A small network with BatchNorm."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    )


def adapted_model(*, freeze_a: bool = False, pair: bool = False) -> nn.Module:
    """The tiny model, its first two layers frozen with adapters of rank 2: 24 + 28 parameters, and 21 of the head."""
    return lora(tiny_model(), targets="1,3", rank=2, alpha=4.0, train="5", freeze_a=freeze_a, pair=pair)


# What a method is tried on: the first that it accepts.
MODELS: tuple[Callable[[], nn.Module], ...] = (
    tiny_model,
    normalized_model,
    adapted_model,
    functools.partial(adapted_model, freeze_a=True),
    functools.partial(adapted_model, pair=True),
)
