"""Clients that hold few classes: neighbouring ones, with uniform sizes (CGPFL) or those of the generators of the
FedProx and pFedMe repositories, or single-class shards (FedAvg, FedFomo); and label skew by Dirichlet proportions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.examples.ragged import Ragged
from kinfed.data.partitions.base import HOLDOUT_TEXT, OVERLAP_TEXT, SPLIT_TEXT, CountPartition, TestRows, evenly
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class NeighbouringClasses(CountPartition):
    """Client u holds classes u, u+1, ..., u+k-1 (mod C)."""

    split: TestRows = option("pooled", SPLIT_TEXT)
    classes: int = option(3, "classes of a client", ge=1)

    def with_base(self, base: int, available: Tensor, clients: int, source: Source) -> tuple[Tensor, Tensor]:
        """The class [K, k] of every slot, and what is left of each class [C] once every slot has `base` examples."""
        slots = consecutive_classes(clients, self.classes, source)
        reserved = base * holders(slots, source.num_classes)
        what = f"partition {self.name} with {clients} clients and base {base}"
        require(reserved, available, source.class_names, what, "use fewer clients or a smaller base")
        return slots, available - reserved

    def sharing(self, slots: Tensor, sizes: Tensor, available: Tensor) -> tuple[Tensor, list[str]]:
        """Counts where clients may hold the same examples, and a note."""
        counts = table(slots, sizes, len(available)).minimum(available)
        return counts, [f"clients share examples; sizes {size_range(counts)}"]


@dataclass(frozen=True)
class Classes(NeighbouringClasses):
    """CGPFL's clients: their sizes are drawn uniformly.

    Sizes U[min_size, max_size] of many clients can exceed the data (P-25); they are then multiplied by the largest
    common factor for which every class suffices, but not below min_size. Without min_size and max_size the spread
    is the paper's, 400 to 5,000, in proportion to the data there is."""

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

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        low, high = self._bounds
        slots = consecutive_classes(clients, self.classes, source)
        raw_sizes = low + (rng.uniform(self.key(seed, "sizes"), clients) * (high - low + 1)).to(torch.int64)
        if self.overlap:
            return self.sharing(slots, evenly(raw_sizes, self.classes), available)
        floor = self.classes if self.min_size is None else self.min_size

        def needed(factor: float) -> Tensor:
            sizes = (raw_sizes.to(torch.float64) * factor).to(torch.int64).clamp_min(floor)
            return table(slots, evenly(sizes, self.classes), source.num_classes)

        require(
            needed(0.0).sum(0), available, source.class_names,
            f"partition classes with {clients} clients of at least {floor} examples",
            "use fewer clients, a smaller min_size, or overlap = true",
        )  # fmt: skip
        factor = largest_factor(lambda f: bool((needed(f).sum(0) <= available).all()))
        counts = needed(factor)
        if factor == 1:
            return counts, []
        note = (
            f"client sizes drawn from {low}-{high} were multiplied by {factor:.3f} so that every class suffices: "
            f"{size_range(counts)}, {int(counts.sum()):,} of {int(available.sum()):,} examples used"
        )
        return counts, [note]


@dataclass(frozen=True)
class Powerlaw(NeighbouringClasses):
    """FedProx's MNIST: sizes are nearly a power law.

    Every slot has `base` examples; what a class has left is divided by lognormal(0, sigma) weights, rounded down."""

    test_fraction: float = option(0.1, HOLDOUT_TEXT, ge=0, lt=1)
    classes: int = option(2, "classes of a client", ge=1)
    base: int = option(5, "examples of each class that everyone has", ge=1)
    sigma: float = option(2.0, "spread of the lognormal weights", gt=0)

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        slots, left = self.with_base(self.base, available, clients, source)
        weight = torch.exp(self.sigma * rng.normal(self.key(seed, "weights"), slots.numel())).reshape(slots.shape)
        total = torch.zeros(len(left), dtype=torch.float64).scatter_add_(0, slots.reshape(-1), weight.reshape(-1))
        extra = (weight * (left / total)[slots]).to(torch.int64)
        return table(slots, self.base + extra, source.num_classes), []


@dataclass(frozen=True)
class FirstComeFirstServed(NeighbouringClasses):
    """The pFedMe repository's generator for CIFAR-10, used by Self-FL.

    `base` of each class first; then, client by client, factor * (w + U{low..high}) more of each class if that many
    remain, otherwise none, where w is a lognormal(0, 2) share of the class. Later clients can end up with the base
    alone; how often is noted."""

    base: int = option(10, "examples of each class that everyone has", ge=1)
    low: int = option(300, "smallest uniform part of a block", ge=0)
    high: int = option(600, "largest uniform part of a block", ge=0)
    factor: int = option(2, "multiplies every block", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(f"blocks need low <= high; got {self.low} and {self.high}")

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        slots, rest = self.with_base(self.base, available, clients, source)
        # Each class has one weight for every (client, slot) pair, of which only its own holders' are used.
        keys = rng.fold(self.key(seed, "weights"), torch.arange(source.num_classes))
        weight = torch.exp(2.0 * rng.normal(keys, slots.numel()))
        share = weight * ((available - clients).clamp_min(0)[:, None] / weight.sum(1, keepdim=True))
        amount = share[slots, torch.arange(slots.numel()).reshape(slots.shape)].to(torch.int64)
        spread = rng.uniform(self.key(seed, "uniform"), slots.numel()).reshape(slots.shape)
        block = self.factor * (amount + self.low + (spread * (self.high - self.low + 1)).to(torch.int64))
        left, taken = rest.tolist(), torch.zeros_like(slots)
        for client, (labels, sizes) in enumerate(zip(slots.tolist(), block.tolist(), strict=True)):
            for slot, (label, size) in enumerate(zip(labels, sizes, strict=True)):
                if size < left[label]:
                    left[label] -= size
                    taken[client, slot] = size
        skipped = int((taken == 0).sum())
        note = f"{skipped} of {slots.numel()} blocks found too few examples and were left out, as in the original"
        return table(slots, self.base + taken, source.num_classes), [note] if skipped else []


@dataclass(frozen=True)
class Lognormal(NeighbouringClasses):
    """FedProx's FEMNIST: classes in equal shares; sizes are 5 + lognormal(mean, sigma).

    At least two examples per class. A class that has too few for its holders gives each the same fraction (at
    least one). The original's code re-uses the same images for all clients; `overlap` comes close to that."""

    test_fraction: float = option(0.1, HOLDOUT_TEXT, ge=0, lt=1)
    classes: int = option(5, "classes of a client", ge=1)
    mean: float = option(4.0, "mean of the logarithm of the size", ge=-20, le=20)
    sigma: float = option(1.0, "deviation of the logarithm of the size", gt=0)
    overlap: bool = option(False, OVERLAP_TEXT)

    def counts(self, available: Tensor, clients: int, seed: int, source: Source) -> tuple[Tensor, list[str]]:
        slots = consecutive_classes(clients, self.classes, source)
        draw = rng.normal(self.key(seed, "sizes"), clients)
        sizes = torch.exp(self.mean + self.sigma * draw).clamp_max(1e12).to(torch.int64) + 5
        wanted = (sizes // self.classes).clamp_min(2)[:, None].expand(slots.shape)
        if self.overlap:
            return self.sharing(slots, wanted, available)
        require(
            holders(slots, source.num_classes), available, source.class_names,
            f"partition lognormal with {clients} clients", "use fewer clients or overlap = true",
        )  # fmt: skip
        counts = table(slots, wanted, source.num_classes)
        scarce = (counts.sum(0) > available).nonzero().squeeze(1).tolist()
        for label in scarce:
            counts[:, label] = _reduced(counts[:, label], int(available[label]))
        names = ", ".join(source.class_names[c] if source.class_names else str(c) for c in scarce)
        note = f"too few examples of {names}: the clients that hold them got a fraction; sizes "
        return counts, [note + size_range(counts)] if scarce else []


def _reduced(column: Tensor, most: int) -> Tensor:
    """Counts times the largest common factor for which their sum is at most `most`; a client that had some keeps
    one."""
    held = (column > 0).to(torch.int64)

    def times(factor: float) -> Tensor:
        return (column.to(torch.float64) * factor).to(torch.int64).maximum(held)

    return times(largest_factor(lambda factor: int(times(factor).sum()) <= most))


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
        per_class = holders(slots, source.num_classes)
        require(
            per_class, available, source.class_names, f"partition pathological with {places} shards",
            "use fewer clients or shards",
        )  # fmt: skip
        # The i-th shard of a class has one example more than the last while the remainder lasts.
        flat = slots.reshape(-1)
        shard = Ragged.grouped(torch.arange(places), flat, source.num_classes)
        number = torch.empty(places, dtype=torch.int64)
        number[shard.rows] = shard.position
        size = available[flat] // per_class[flat] + (number < available[flat] % per_class[flat])
        counts = table(slots, size.reshape(clients, self.shards), source.num_classes)
        left = int(available.sum() - counts.sum())
        return counts, [f"{left:,} examples of classes without a shard are unused"] if left else []


@dataclass(frozen=True)
class Dirichlet(CountPartition):
    """Every class is divided among all clients by proportions from a symmetric Dirichlet(alpha).

    Small alpha: few clients own most of a class; large alpha: nearly iid. The whole draw is repeated (up to 50
    times) until every client has `min_size` examples. With `fill` there is one draw, and clients below min_size are
    topped up from the most plentiful class of the client that is largest at the moment."""

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
        shares = torch.softmax(dirichlet_logits(self.alpha, key, len(available), clients), 1)
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
        note = (
            f"{len(small)} clients below {self.min_size} examples were topped up with {moved:,} of the largest clients'"
        )
        return torch.from_numpy(table), [note] if moved else []


def dirichlet_logits(alpha: float, key: Tensor, draws: int, parts: int) -> Tensor:
    """[draws, parts] float64, whose softmax are proportions from a symmetric Dirichlet(alpha), of all parts or of
    some. Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha), in logarithms: no underflow."""
    from scipy.special import gammaincinv  # comes with scikit-learn

    keys = rng.fold(key, torch.arange(draws))
    u = rng.uniform(keys, 2 * parts)
    gamma = torch.from_numpy(gammaincinv(alpha + 1.0, u[:, :parts].clamp_min(2.0**-53).numpy()))
    return torch.log(gamma) + torch.log1p(-u[:, parts:]) / alpha


def consecutive_classes(clients: int, per_client: int, source: Source) -> Tensor:
    """[K, k]: client u holds classes u, u+1, ..., u+k-1 modulo C, of the C classes of the source."""
    num_classes = source.num_classes
    if per_client > num_classes:
        raise ConfigError(f"classes = {per_client}, but {source.name} has {num_classes} classes")
    return (torch.arange(clients)[:, None] + torch.arange(per_client)) % num_classes


def table(slots: Tensor, slot_counts: Tensor, num_classes: int) -> Tensor:
    """[K, C] from the class [K, k] and the count [K, k] of every slot; a class held twice adds up."""
    counts = torch.zeros(len(slots), num_classes, dtype=torch.int64)
    return counts.scatter_add_(1, slots, slot_counts)


def holders(slots: Tensor, num_classes: int) -> Tensor:
    """[C] how many slots every class fills."""
    return torch.bincount(slots.reshape(-1), minlength=num_classes)


def require(needed: Tensor, available: Tensor, class_names: Sequence[str] | None, what: str, remedy: str) -> None:
    """ConfigError if a class cannot supply what is needed of it; needed and available are [C]."""
    short = (needed > available).nonzero().squeeze(1)
    if len(short):
        worst = int(short[torch.argmax((needed - available)[short])])
        name, least = class_names[worst] if class_names else str(worst), int(needed[worst])
        supply = f"there are {int(available[worst]):,}"
        raise ConfigError(f"{what} needs {least:,} examples of class {name}, but {supply}; {remedy}")


def largest_factor(fits: Callable[[float], bool]) -> float:
    """The largest factor in [0, 1] for which a monotone condition holds; it must hold for 0."""
    if fits(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def size_range(counts: Tensor) -> str:
    sizes = counts.sum(1)
    return f"{int(sizes.min()):,}-{int(sizes.max()):,}"
