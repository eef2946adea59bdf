"""The ledger of gradients taken of every client's training data, from which epsilon is computed.

One entry says: client m drew `batches` Poisson samples, each example joining with chance q, and `gradients` noisy
gradients were computed on each of them. Gradients on one sample are kept apart from gradients on different ones,
because they are not the same to privacy: k gradients on one sample are as good as one with noise σ/√k (Dong, Roth, Su
2022), and only then does sampling hide who took part. Counting them as k independent samples would promise too much.
Nothing changes if other gradients come in between: given who is sampled, the likelihood ratio of all answers is a
product over samples, whatever the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kinfed.errors import CheckpointError


@dataclass(frozen=True, order=True)
class Event:
    """Gradients of one client on Poisson samples of its examples."""

    q: float  # chance of every example to be in a sample
    gradients: int  # on each sample
    batches: int  # samples


Events = tuple[Event, ...]  # of one client, sorted; no two with the same q and gradients


@dataclass
class Ledger:
    """Numbers of samples by (client, q, gradients on each)."""

    batches: dict[tuple[int, float, int], int] = field(default_factory=dict)

    def add(self, client: int, q: float, gradients: int, batches: int = 1) -> None:
        if gradients and batches:
            entry = (client, q, gradients)
            self.batches[entry] = self.batches.get(entry, 0) + batches

    def join(self, other: Ledger) -> Ledger:
        return Ledger(dict(Counter(self.batches) + Counter(other.batches)))

    def events(self, num_clients: int) -> list[Events]:
        by_client: list[list[Event]] = [[] for _ in range(num_clients)]
        for (client, q, gradients), batches in self.batches.items():
            by_client[client].append(Event(q, gradients, batches))
        return [tuple(sorted(events)) for events in by_client]

    def events_of(self, client: int) -> Events:
        """Entries of one client."""
        entries = self.batches.items()
        return tuple(sorted(Event(q, gradients, batches) for (who, q, gradients), batches in entries if who == client))

    def named(self) -> dict[str, Tensor]:
        entries = sorted(self.batches.items())
        return {
            "client": torch.tensor([entry[0] for entry, _ in entries], dtype=torch.int64),
            "q": torch.tensor([entry[1] for entry, _ in entries], dtype=torch.float64),
            "gradients": torch.tensor([entry[2] for entry, _ in entries], dtype=torch.int64),
            "batches": torch.tensor([batches for _, batches in entries], dtype=torch.int64),
        }

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> Ledger:
        names = ("client", "q", "gradients", "batches")
        if any(name not in tensors for name in names):
            raise CheckpointError("the checkpoint has no record of what clients' data were asked; it is of another run")
        ledger = cls()
        for client, q, gradients, batches in zip(*(tensors[name].tolist() for name in names), strict=True):
            ledger.add(client, q, gradients, batches)
        return ledger


def merge(one: Events, other: Events, times: int = 1) -> Events:
    """Join the requests to one client in `one` with `times` times those in `other`."""
    total = Counter[tuple[float, int]]()
    for events, factor in ((one, 1), (other, times)):
        for e in events:
            total[e.q, e.gradients] += factor * e.batches
    return tuple(sorted(Event(q, k, batches) for (q, k), batches in total.items() if batches))


def dominates(bound: Events, events: Events) -> bool:
    """Whether `events` can surely have no larger epsilon than `bound`, whatever the noise: every sample of theirs can
    be paired with one of the bound that has at least its q and at least its gradients."""
    if not events or not bound:
        return not events
    if max(e.q for e in events) > min(e.q for e in bound):
        return False
    return all(_at_least(bound, e.gradients) >= _at_least(events, e.gradients) for e in events)


def _at_least(events: Events, gradients: int) -> int:
    return sum(e.batches for e in events if e.gradients >= gradients)


def maximal(all_events: Iterable[Events]) -> list[Events]:
    """Events that no others dominate: the largest epsilon is among theirs, whatever the noise."""
    maxima: list[Events] = []
    for events in sorted(set(all_events), key=_size, reverse=True):
        if events and not any(dominates(other, events) for other in maxima):
            maxima = [other for other in maxima if not dominates(events, other)] + [events]
    return maxima


def _size(events: Events) -> float:
    return sum(e.q * e.q * e.gradients * e.batches for e in events)
