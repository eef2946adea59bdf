"""Normalization of images, by name."""

from __future__ import annotations

from typing import Literal

from torch import nn

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
