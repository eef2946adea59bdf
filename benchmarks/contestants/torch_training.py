"""Networks and batches of all contestants that compute with torch, as a user of torch writes them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn
from work import LSTM_UNITS, RESNET_WIDTH, TRANSFORMER_WIDTH, Work


class LastOutput(nn.Module):
    """Of what an LSTM gives, the output at the last position."""

    def forward(self, given: tuple[Tensor, object]) -> Tensor:
        return given[0][:, -1]


class RowTransformer(nn.Module):
    """Rows of an image are positions: torch's own encoder, the mean over them, and a head. It drops nothing, so that
    all contestants compute the same."""

    def __init__(self, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.rows = nn.Linear(width, TRANSFORMER_WIDTH)
        self.positions = nn.Parameter(torch.zeros(length, TRANSFORMER_WIDTH))
        layer = nn.TransformerEncoderLayer(TRANSFORMER_WIDTH, 4, 2 * TRANSFORMER_WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(TRANSFORMER_WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.rows(x) + self.positions).mean(1))
        return out


def network(work: Work) -> nn.Module:
    if work.model == "lstm":
        recurrent = nn.LSTM(work.shape[1], LSTM_UNITS, batch_first=True)
        return nn.Sequential(recurrent, LastOutput(), nn.Linear(LSTM_UNITS, work.classes))
    if work.model == "transformer":
        return RowTransformer(*work.shape, work.classes)
    if work.model == "resnet18":  # no rival has it: those who do have kinfed
        from kinfed.engine.zoo.models import build_model

        return build_model("resnet18", work.shape, work.classes, {"width": RESNET_WIDTH})
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
