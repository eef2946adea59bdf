"""Tables of how many examples of which class each client gets, and the rows that fulfil them.

A table of counts [K, C] says how many examples of every class every client receives. Rows of a class are put in
random order and handed out piece by piece, so no row goes to two clients.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kinfed.core import rng
from kinfed.data.examples.ragged import Ragged
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


def by_class(rows: Tensor, labels: Tensor, num_classes: int, key: Tensor) -> Ragged:
    """The rows of every class in random order: a Ragged whose lists are classes."""
    grouped = Ragged.grouped(rows, labels[rows], num_classes)
    return grouped.shuffled(rng.fold(key, torch.arange(num_classes)))


def deal(counts: Tensor, classes: Ragged) -> Ragged:
    """Client k gets the next counts[k, c] rows of class c, for k = 0, 1, ...: disjoint lists, rows ascending."""
    clients, num_classes = counts.shape
    pieces = counts.T.reshape(-1)  # class by class, clients in order
    owner = torch.repeat_interleave(torch.arange(clients).repeat(num_classes), pieces)
    per_class = counts.sum(0)
    label = torch.repeat_interleave(torch.arange(num_classes), per_class)
    place = torch.arange(len(label)) - (torch.cumsum(per_class, 0) - per_class)[label]
    return Ragged.grouped(classes.rows[classes.offsets[label] + place], owner, clients).ascending()


def deal_overlapping(counts: Tensor, classes: Ragged, key: Tensor) -> Ragged:
    """Client k gets counts[k, c] distinct rows of class c, drawn without regard to the other clients."""
    clients = len(counts)
    rows, owners = [classes.rows[:0]], [classes.rows[:0]]
    available = classes.count.tolist()
    for client, label in counts.nonzero().tolist():
        count = int(counts[client, label])
        choice = rng.choose(rng.fold(key, client, label), available[label], count)
        rows.append(classes[label][choice])
        owners.append(torch.full((count,), client))
    return Ragged.grouped(torch.cat(rows), torch.cat(owners), clients).ascending()


def matching(counts: Tensor, available: Tensor, other: Tensor) -> Tensor:
    """Counts from another pool in the same proportions: client k gets counts[k, c] / available[c] of class c there.

    Cut points are rounded, not shares: pieces never exceed the pool, and are less than 1 off the exact share."""
    share = torch.cumsum(counts, 0).to(torch.float64) / available.clamp_min(1)
    cuts = torch.floor(share * other + 1e-9).to(torch.int64)
    return torch.diff(cuts, dim=0, prepend=torch.zeros(1, counts.shape[1], dtype=torch.int64))


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


def evenly(sizes: Tensor, parts: int) -> Tensor:
    """[K, parts]: every size divided into whole numbers that differ by at most one."""
    return (sizes[:, None] + torch.arange(parts - 1, -1, -1)) // parts


def require(needed: Tensor, available: Tensor, class_names: Sequence[str] | None, what: str, remedy: str) -> None:
    """ConfigError where a class cannot supply what is needed of it; needed and available are [C]."""
    short = (needed > available).nonzero().squeeze(1)
    if len(short):
        worst = int(short[torch.argmax((needed - available)[short])])
        name, least = class_names[worst] if class_names else str(worst), int(needed[worst])
        there = f"there are {int(available[worst]):,}"
        raise ConfigError(f"{what} needs {least:,} examples of class {name}, but {there}; {remedy}")


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
