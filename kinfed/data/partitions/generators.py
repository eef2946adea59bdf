"""The generators of the FedProx and pFedMe repositories, for any data set and any number of clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.partitions import dealing
from kinfed.data.partitions.base import HOLDOUT_TEXT, OVERLAP_TEXT, SPLIT_TEXT, CountPartition, TestRows
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class Powerlaw(CountPartition):
    """FedProx's MNIST: client u holds k classes u, u+1, ... (mod C); sizes are nearly a power law.

    Every slot has `base` examples; what a class has left is divided by lognormal(0, sigma) weights, rounded down."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    test_fraction: float = option(0.1, HOLDOUT_TEXT, ge=0, lt=1)
    classes: int = option(2, "classes of a client", ge=1)
    base: int = option(5, "examples of each class that everyone has", ge=1)
    sigma: float = option(2.0, "spread of the lognormal weights", gt=0)

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        slots = dealing.consecutive_classes(clients, self.classes, source)
        reserved = self.base * dealing.holders(slots, source.num_classes)
        dealing.require(
            reserved, available, source.class_names,
            f"partition powerlaw with {clients} clients and base {self.base}", "use fewer clients or a smaller base",
        )  # fmt: skip
        weight = torch.exp(self.sigma * rng.normal(self.key(seed, "weights"), slots.numel())).reshape(slots.shape)
        total = torch.zeros(source.num_classes, dtype=torch.float64).scatter_add_(
            0, slots.reshape(-1), weight.reshape(-1)
        )
        extra = (weight * ((available - reserved) / total)[slots]).to(torch.int64)
        return dealing.table(slots, self.base + extra, source.num_classes), []


@dataclass(frozen=True)
class FirstComeFirstServed(CountPartition):
    """The pFedMe repository's generator for CIFAR-10, used by Self-FL: client u holds classes u, u+1, u+2 (mod C).

    `base` of each class first; then, client by client, factor * (w + U{low..high}) more of each class if that many
    remain, otherwise none, where w is a lognormal(0, 2) share of the class. Later clients can end up with the base
    alone; how often is noted."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    classes: int = option(3, "classes of a client", ge=1)
    base: int = option(10, "examples of each class that everyone has", ge=1)
    low: int = option(300, "smallest uniform part of a block", ge=0)
    high: int = option(600, "largest uniform part of a block", ge=0)
    factor: int = option(2, "multiplies every block", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(f"blocks need low <= high; got {self.low} and {self.high}")

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        slots = dealing.consecutive_classes(clients, self.classes, source)
        used = self.base * dealing.holders(slots, source.num_classes)
        dealing.require(
            used, available, source.class_names,
            f"partition pfedme_split with {clients} clients and base {self.base}",
            "use fewer clients or a smaller base",
        )  # fmt: skip
        # Each class has one weight for every (client, slot) pair, of which only its own holders' are used.
        keys = rng.fold(self.key(seed, "weights"), torch.arange(source.num_classes))
        weight = torch.exp(2.0 * rng.normal(keys, slots.numel()))
        share = weight * ((available - clients).clamp_min(0)[:, None] / weight.sum(1, keepdim=True))
        mine = share[slots, torch.arange(slots.numel()).reshape(slots.shape)].to(torch.int64)
        spread = rng.uniform(self.key(seed, "uniform"), slots.numel()).reshape(slots.shape)
        block = self.factor * (mine + self.low + (spread * (self.high - self.low + 1)).to(torch.int64))
        left = (available - used).tolist()
        taken = torch.zeros_like(slots)
        for client, (labels, sizes) in enumerate(zip(slots.tolist(), block.tolist(), strict=True)):
            for slot, (label, size) in enumerate(zip(labels, sizes, strict=True)):
                if size < left[label]:
                    left[label] -= size
                    taken[client, slot] = size
        skipped = int((taken == 0).sum())
        note = f"{skipped} of {slots.numel()} blocks found too few examples and were left out, as in the original"
        return dealing.table(slots, self.base + taken, source.num_classes), [note] if skipped else []


@dataclass(frozen=True)
class Lognormal(CountPartition):
    """FedProx's FEMNIST: client u holds k classes (mod C) in equal shares; sizes are 5 + lognormal(mean, sigma).

    At least two examples per class. A class that has too few for its holders gives each the same fraction (at
    least one). The original's code re-uses the same images for all clients; `overlap` comes close to that."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    test_fraction: float = option(0.1, HOLDOUT_TEXT, ge=0, lt=1)
    classes: int = option(5, "classes of a client", ge=1)
    mean: float = option(4.0, "mean of the logarithm of the size", ge=-20, le=20)
    sigma: float = option(1.0, "deviation of the logarithm of the size", gt=0)
    overlap: bool = option(False, OVERLAP_TEXT)

    @property
    def shares_rows(self) -> bool:
        return self.overlap

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        slots = dealing.consecutive_classes(clients, self.classes, source)
        draw = rng.normal(self.key(seed, "sizes"), clients)
        sizes = torch.exp(self.mean + self.sigma * draw).clamp_max(1e12).to(torch.int64) + 5
        wanted = (sizes // self.classes).clamp_min(2)[:, None].expand(slots.shape)
        if self.overlap:
            counts = dealing.table(slots, wanted, source.num_classes).minimum(available)
            return counts, [f"clients share examples; sizes {dealing.size_range(counts)}"]
        dealing.require(
            dealing.holders(slots, source.num_classes), available, source.class_names,
            f"partition lognormal with {clients} clients", "use fewer clients or overlap = true",
        )  # fmt: skip
        counts = dealing.table(slots, wanted, source.num_classes)
        scarce = (counts.sum(0) > available).nonzero().squeeze(1).tolist()
        for label in scarce:
            counts[:, label] = _reduced(counts[:, label], int(available[label]))
        names = ", ".join(source.class_names[c] if source.class_names else str(c) for c in scarce)
        sizes_now = dealing.size_range(counts)
        note = f"too few examples of {names}: the clients that hold them got a fraction; sizes {sizes_now}"
        return counts, [note] if scarce else []


def _reduced(column: Tensor, most: int) -> Tensor:
    """Counts times the largest common factor for which their sum is at most `most`; whoever had some keeps one."""
    held = (column > 0).to(torch.int64)

    def times(factor: float) -> Tensor:
        return (column.to(torch.float64) * factor).to(torch.int64).maximum(held)

    return times(dealing.largest_factor(lambda factor: int(times(factor).sum()) <= most))
