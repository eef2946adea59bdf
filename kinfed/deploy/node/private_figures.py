"""Figures of a site's tries in a search under differential privacy: two answers, of all tries and of the chosen ones.

A loss counts up to LARGEST_LOSS, in units of which a row's losses under all models are numbers of at most one, and so
are differences of at most one nat: the noise of such sums is that of the owner's rows (`Gate.at_price`). Advantages
come with the variance that rows and noise make; contenders count as independent of each other there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kinfed.deploy.node.gate import LARGEST_LOSS, Noise
from kinfed.privacy import Event, Events

FIGURES: Events = (Event(1.0, 1, 2),)  # both answers
ONE_ANSWER: Events = (Event(1.0, 1, 1),)
SEARCHED = (
    "Searched under differential privacy: updates and the figures that sites were compared by have noise, and gains on "
    "test rows have not left the sites."
)
ALONE = "alone"  # as a search calls learning alone


@dataclass(frozen=True)
class PrivateFigures:
    losses: Mapping[Any, Tensor]  # [V] in [0, 1] on validated rows, by contender or by contender and try

    def figures(self, noise: Noise) -> list[list[Any]]:
        """Contender, try, sum of losses and number of rows, as a search without privacy says them."""
        losses = torch.stack(list(self.losses.values()))
        sums = losses.sum(1)
        sums = LARGEST_LOSS * (sums + noise(sums))
        return [[*tried, one, losses.shape[1]] for tried, one in zip(self.losses, sums.tolist(), strict=True)]

    def advantages(self, noise: Noise, deviation: float) -> dict[str, Tensor]:
        """Advantages [M] over learning alone and their covariance [M, M]; noise in sums of n numbers has the
        `deviation` √n."""
        others = [self.losses[ALONE] - one for name, one in self.losses.items() if name != ALONE]
        lead = (LARGEST_LOSS * torch.stack(others)).clamp(-1, 1)
        sums, rows = torch.cat([lead.sum(1), lead.square().sum(1)]), lead.shape[1]
        seen, square = ((sums + noise(sums)) / rows).reshape(2, -1)
        of_rows = (square - seen.square()).clamp(1 / rows, 1) / rows
        return {"seen": seen, "covariance": torch.diag(of_rows + len(sums) * (deviation / rows) ** 2)}
