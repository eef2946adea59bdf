"""Clients that hold few classes, uniform sizes (CGPFL) or single-class shards (FedAvg, FedFomo), and label skew by
Dirichlet proportions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.examples.ragged import Ragged
from kinfed.data.partitions import dealing
from kinfed.data.partitions.base import OVERLAP_TEXT, SPLIT_TEXT, CountPartition, TestRows
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class Classes(CountPartition):
    """CGPFL's clients: client u holds classes u, u+1, ..., u+k-1 (mod C), its size is drawn uniformly.

    Sizes U[min_size, max_size] of many clients can exceed the data (P-25); they are then multiplied by the largest
    common factor for which every class suffices, but not below min_size. Without min_size and max_size the spread
    is the paper's, 400 to 5,000, in proportion to the data there is."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    classes: int = option(3, "classes of a client", ge=1)
    min_size: int | None = option(None, "smallest client; none: in proportion to the data")
    max_size: int | None = option(None, "largest client before scaling; none: in proportion to the data")
    overlap: bool = option(False, OVERLAP_TEXT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.min_size is None) != (self.max_size is None):
            raise ConfigError("give both min_size and max_size, or neither")
        low, high = self._bounds
        if not self.classes <= low <= high:
            raise ConfigError(f"sizes need classes <= min_size <= max_size; got {self.classes}, {low} and {high}")

    @property
    def _bounds(self) -> tuple[int, int]:
        return (400, 5000) if self.min_size is None or self.max_size is None else (self.min_size, self.max_size)

    @property
    def shares_rows(self) -> bool:
        return self.overlap

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        low, high = self._bounds
        slots = dealing.consecutive_classes(clients, self.classes, source)
        raw_sizes = low + (rng.uniform(self.key(seed, "sizes"), clients) * (high - low + 1)).to(torch.int64)
        if self.overlap:
            counts = dealing.table(slots, dealing.evenly(raw_sizes, self.classes), source.num_classes).minimum(
                available
            )
            return counts, [f"clients share examples; sizes {dealing.size_range(counts)}"]
        floor = self.classes if self.min_size is None else self.min_size

        def needed(factor: float) -> Tensor:
            sizes = (raw_sizes.to(torch.float64) * factor).to(torch.int64).clamp_min(floor)
            return dealing.table(slots, dealing.evenly(sizes, self.classes), source.num_classes)

        dealing.require(
            needed(0.0).sum(0), available, source.class_names,
            f"partition classes with {clients} clients of at least {floor} examples",
            "use fewer clients, a smaller min_size, or overlap = true",
        )  # fmt: skip
        factor = dealing.largest_factor(lambda f: bool((needed(f).sum(0) <= available).all()))
        counts = needed(factor)
        if factor == 1:
            return counts, []
        note = (
            f"client sizes drawn from {low}-{high} were multiplied by {factor:.3f} so that every class suffices: "
            f"{dealing.size_range(counts)}, {int(counts.sum()):,} of {int(available.sum()):,} examples used"
        )
        return counts, [note]


@dataclass(frozen=True)
class Pathological(CountPartition):
    """Sorted shards: every class is cut into equal shards and every client gets `shards` of them at random.

    As in FedAvg's paper and LG-FedAvg's code (FedFomo): with K clients each class makes shards * K / C shards; a
    client can get two of one class. Where that is no whole number, classes drawn at random make one shard more."""

    shards: int = option(2, "shards of a client", ge=1)

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        present = available.nonzero().squeeze(1)
        places = self.shards * clients
        extra = rng.choose(self.key(seed, "extra"), len(present), places % len(present))
        deck = torch.cat([present.repeat(places // len(present)), present[extra]])
        slots = deck[rng.permutation(self.key(seed, "deck"), places)].reshape(clients, self.shards)
        per_class = dealing.holders(slots, source.num_classes)
        dealing.require(
            per_class, available, source.class_names, f"partition pathological with {places} shards",
            "use fewer clients or shards",
        )  # fmt: skip
        # The i-th shard of a class has one example more than the last while the remainder lasts.
        flat = slots.reshape(-1)
        shard = Ragged.grouped(torch.arange(places), flat, source.num_classes)
        number = torch.empty(places, dtype=torch.int64)
        number[shard.rows] = shard.position
        size = available[flat] // per_class[flat] + (number < available[flat] % per_class[flat])
        counts = dealing.table(slots, size.reshape(clients, self.shards), source.num_classes)
        left = int(available.sum() - counts.sum())
        notes = [f"{left:,} examples of classes without a shard are unused"] if left else []
        return counts, notes


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
