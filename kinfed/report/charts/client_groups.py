"""The clients of one seed as figures name, order and group them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kinfed.data import Description
from kinfed.report.drawing.chart import Layout, client_label, escape, group_name, group_ticks

MAX_NAMED_GROUPS = 12  # along an axis
MAX_NAMED_CLIENTS = 25


@dataclass(frozen=True)
class ClientGroups:
    """Names of the clients, the group each trains in, and the group each is judged on."""

    names: Sequence[str]
    groups: Sequence[int] | None
    targets: Sequence[int] | None
    group_names: Sequence[str] | None

    @classmethod
    def of(cls, federation: Description | None, count: int) -> ClientGroups:
        """Clients are numbered where there is no description of as many."""
        if federation is None or len(federation.names) != count:
            return cls([str(m) for m in range(count)], None, None, None)
        groups, moved = federation.groups, federation.description.get("target_of")
        targets = groups
        if groups is not None and isinstance(moved, list) and sorted(moved) == list(range(count)):
            targets = [groups[m] for m in moved]
        return cls(federation.names, groups, targets, federation.group_names)

    def client(self, m: int) -> str:
        """Escaped for plotly, as are the names of groups."""
        return client_label(self.names[m])

    def group(self, number: int) -> str:
        return escape(group_name(self.group_names, number))

    def order(self, by: Sequence[int] | None) -> list[int]:
        """The clients, those of a group side by side."""
        return sorted(range(len(self.names)), key=lambda m: (by[m] if by else 0, m))

    def ticks(self, by: Sequence[int] | None, order: Sequence[int]) -> Layout:
        """Of an axis along which the clients stand in that order: names of groups, or of clients while they are few."""
        if by is not None and 1 < len(set(by)) <= MAX_NAMED_GROUPS:
            return group_ticks([by[m] for m in order], self.group_names, range(len(order)))
        if len(order) <= MAX_NAMED_CLIENTS:
            return {"tickvals": list(range(len(order))), "ticktext": [self.client(m) for m in order]}
        return {"showticklabels": False}

    def kin(self, i: int, n: int) -> bool:
        """Whether client n trains in the group that client i is judged on."""
        return self.groups is not None and self.targets is not None and self.groups[n] == self.targets[i]

    @property
    def foreign(self) -> bool:
        return self.targets != self.groups
