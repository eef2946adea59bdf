"""Networks and batches of all contestants that compute with torch, as a user of torch writes them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn
from work import Work


def network(work: Work) -> nn.Sequential:
    channels, size = work.shape[0], prod(work.shape)
    if work.model == "cnn":
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 5 * 5, 512), nn.ReLU(), nn.Linear(512, work.classes),
        )  # fmt: skip
    hidden = {"mlr": (), "mlp": (128,), "dense": (200, 200)}[work.model]
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, work.classes))


def batches(count: int, work: Work) -> Iterator[Tensor]:
    """Indices of the batches of a client with so many examples."""
    for _ in range(work.epochs):
        yield from torch.randperm(count).split(work.batch)
