"""Label skew by Dirichlet proportions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.partitions.base import CountPartition
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class Dirichlet(CountPartition):
    """Every class is divided among all clients by proportions from a symmetric Dirichlet(alpha).

    Small alpha: few clients own most of a class; large alpha: nearly iid. The whole draw is repeated (up to 50
    times) until every client has `min_size` examples. With `fill` there is one draw, and clients below min_size are
    topped up from the most plentiful class of whoever is largest at the moment."""

    # 0.3: uneven enough that one model does not fit all, even enough that clients can learn from each other.
    alpha: float = option(0.3, "concentration: 0.1 very uneven, 100 nearly iid", gt=0)
    min_size: int = option(10, "smallest client (before its test examples are taken)", ge=1)
    fill: bool = option(False, "top up small clients instead of drawing again")

    _ATTEMPTS: ClassVar[int] = 50

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        total = int(available.sum())
        if clients * self.min_size > total:
            raise ConfigError(
                f"partition dirichlet: {clients} clients of min_size {self.min_size} need {clients * self.min_size:,} "
                f"examples, but there are {total:,}; use fewer clients or a smaller min_size"
            )
        key = self.key(seed, "proportions")
        if self.fill:
            return self._filled(self._draw(rng.fold(key, 0), available, clients))
        most = 0
        for attempt in range(self._ATTEMPTS):
            counts = self._draw(rng.fold(key, attempt), available, clients)
            smallest = int(counts.sum(1).min())
            if smallest >= self.min_size:
                return counts, []
            most = max(most, smallest)
        raise ConfigError(
            f"partition dirichlet: in {self._ATTEMPTS} draws with alpha = {self.alpha} and {clients} clients the "
            f"smallest client never had {self.min_size} examples (at best {most}); "
            "use fewer clients, a larger alpha, a smaller min_size, or fill = true"
        )

    def _draw(self, key: Tensor, available: Tensor, clients: int) -> Tensor:
        shares = _dirichlet(self.alpha, key, len(available), clients)
        cuts = torch.floor(torch.cumsum(shares, 1) * available[:, None] + 1e-9).to(torch.int64)
        cuts[:, -1] = available
        return torch.diff(cuts, dim=1, prepend=torch.zeros(len(cuts), 1, dtype=torch.int64)).T.contiguous()

    def _filled(self, counts: Tensor) -> tuple[Tensor, list[str]]:
        table = counts.numpy().copy()
        sizes = table.sum(1)
        small = np.flatnonzero(sizes < self.min_size)
        moved = 0
        for client in small:
            while sizes[client] < self.min_size:
                donor = int(sizes.argmax())
                label = int(table[donor].argmax())
                give = min(self.min_size - sizes[client], sizes[donor] - self.min_size, table[donor, label])
                table[donor, label] -= give
                table[client, label] += give
                sizes[donor] -= give
                sizes[client] += give
                moved += int(give)
        notes = [
            f"{len(small)} clients below {self.min_size} examples were topped up with {moved:,} of the largest clients'"
        ]
        return torch.from_numpy(table), notes if moved else []


def _dirichlet(alpha: float, key: Tensor, draws: int, parts: int) -> Tensor:
    """[draws, parts] float64 proportions. Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha), in logarithms: no underflow."""
    from scipy.special import gammaincinv  # comes with scikit-learn

    keys = rng.fold(key, torch.arange(draws))
    u = rng.uniform(keys, 2 * parts)
    gamma = torch.from_numpy(gammaincinv(alpha + 1.0, u[:, :parts].clamp_min(2.0**-53).numpy()))
    return torch.softmax(torch.log(gamma) + torch.log1p(-u[:, parts:]) / alpha, 1)
