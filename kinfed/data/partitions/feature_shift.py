"""Feature shift: clients whose labels mean the same, while each sees its examples through a camera of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.examples.ragged import Ragged
from kinfed.data.partitions.base import Assignment
from kinfed.data.partitions.dirichlet import Dirichlet
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError

_MIDDLE, _UNIT = 127.5, 127.5  # of the scale 0..255


@dataclass(frozen=True)
class FeatureShift(Dirichlet):
    """Rows are dealt as by `dirichlet`. Then every client changes each channel c of all its images, test images too, by
    a rule of its own, and what leaves the scale of 0..255 is cut off:

        x' = 127.5 + g_mc (x − 127.5) + 127.5 s_mc
        ln g_mc ~ U(−contrast, contrast),  s_mc ~ U(−brightness, brightness)

    Channels differ, so that colours do. With both at 0 it is `dirichlet` with draws of its own."""

    contrast: float = option(0.7, "largest logarithm of a channel's factor: 0.7 is between half and twice", ge=0)
    brightness: float = option(0.5, "largest shift of a channel, in halves of the scale", ge=0)

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        raw = source.features.raw
        if raw.dtype != torch.uint8 or raw.dim() < 2:
            raise ConfigError(
                f"partition {self.name} changes images, uint8 [channels, ...]; {source.name} has examples of "
                f"{raw.dtype} {list(raw.shape[1:])}; use partition dirichlet"
            )
        assignment = super().assign(source, num_clients, seed)
        gain, shift = self.cameras(len(assignment.train), raw.shape[1], seed)
        seen = raw.clone()
        for part in (assignment.train, assignment.test):
            _change(seen, part, gain, shift)
        return replace(assignment, features=replace(source.features, raw=seen))

    def cameras(self, clients: int, channels: int, seed: int) -> tuple[Tensor, Tensor]:
        """Factors and shifts [K, C]; a client's do not depend on how many there are."""
        keys = rng.fold(self.key(seed, "cameras"), torch.arange(clients))
        draws = 2 * rng.uniform(keys, 2 * channels) - 1
        return torch.exp(self.contrast * draws[:, :channels]), self.brightness * draws[:, channels:]


def _change(raw: Tensor, rows: Ragged, gain: Tensor, shift: Tensor) -> None:
    """Change the images [N, C, ...] of every client in place; no two clients hold the same row."""
    ones = (1,) * (raw.dim() - 2)
    for client in range(len(rows)):
        own = rows[client]
        g, s = (value[client].to(torch.float32).view(-1, *ones) for value in (gain, shift))
        x = _MIDDLE + g * (raw[own].to(torch.float32) - _MIDDLE) + _UNIT * s
        raw[own] = x.round().clamp(0, 255).to(torch.uint8)
