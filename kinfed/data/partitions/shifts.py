"""Planted shifts: hidden groups of clients that contradict each other, and no method is told which is which; and
feature shift, where labels mean the same and each client sees its examples through a camera of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kinfed.core import option, rng
from kinfed.data.partitions.base import Assignment, Iid, check_has_classes
from kinfed.data.partitions.label_skew import Dirichlet
from kinfed.data.sources.source import Source
from kinfed.errors import ConfigError


@dataclass(frozen=True)
class HiddenGroups(Iid):
    """Rows are dealt as by `iid`. Client k belongs to group k mod `groups`, and each group differs from the first by

        rotation  images, turned by 90 degrees times the number of the group (Ghosh et al., IFCA, 2020)
        labels    names of classes: a permutation without a fixed class
        swap      names of two classes, which change places

    in training and test examples alike. Groups are in the description of the data, not in what methods are told."""

    groups: int = option(4, "number of groups", ge=1)
    by: Literal["rotation", "labels", "swap"] = option("rotation", "what groups differ by")

    def assign(self, source: Source, num_clients: int | None, seed: int) -> Assignment:
        assignment = super().assign(source, num_clients, seed)
        self._check(source)
        clients = len(assignment.train)
        if clients < self.groups:
            raise ConfigError(f"partition {self.name}: {self.groups} groups need as many clients; got {clients}")
        if self.by == "rotation":
            raw = _changed(source.features.raw, assignment, lambda k, x: torch.rot90(x, k % self.groups, (-2, -1)))
            return replace(assignment, features=replace(source.features, raw=raw))
        names = self.class_names_of_groups(source.num_classes, seed)
        return replace(assignment, labels=_changed(source.labels, assignment, lambda k, y: names[k % self.groups][y]))

    def class_names_of_groups(self, classes: int, seed: int) -> Tensor:
        """[G, C] int64: the class that each class is called in a group."""
        names = torch.arange(classes).repeat(self.groups, 1)
        for group in range(1, self.groups):
            order = rng.permutation(rng.fold(self.key(seed, "names"), group), classes)
            if self.by == "swap":
                names[group, order[:2]] = names[group, order[:2].flip(0)]
            else:
                names[group, order] = order.roll(1)  # one cycle: no class keeps its name
        return names

    def _check(self, source: Source) -> None:
        raw = source.features.raw
        if self.by != "rotation":
            check_has_classes(source, self.name)
            if source.num_classes < 2:
                raise ConfigError(f"partition {self.name}: names of classes need two classes; {source.name} has one")
        elif raw.dim() < 3 or raw.shape[-1] != raw.shape[-2]:
            reason = f"{source.name} has examples of shape {list(raw.shape[1:])}"
            raise ConfigError(f"partition {self.name} turns square images; {reason}; use by = labels")
        elif self.groups > 4:
            raise ConfigError(f"partition {self.name}: there are four turns by 90 degrees; got groups = {self.groups}")


@dataclass(frozen=True)
class FeatureShift(Dirichlet):
    """Rows are dealt as by `dirichlet`. Then every client changes each channel c of all its images, test images too, by
    a rule of its own, and what leaves the scale of 0..2h is cut off (h = 127.5; of digits, which are 0..16, h = 8):

        x' = h + g_mc (x − h) + h s_mc
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
        ones = (1,) * (raw.dim() - 2)
        gain, shift = (
            value.to(torch.float32).view(*value.shape, *ones)
            for value in self.cameras(len(assignment.train), raw.shape[1], seed)
        )

        scale = source.features.std
        half = 127.5 if scale is None or scale.numel() > 1 else float(scale) / 2  # one number: what makes images 0..1

        def seen(client: int, x: Tensor) -> Tensor:
            changed = half + gain[client] * (x.to(torch.float32) - half) + half * shift[client]
            return changed.round().clamp(0, 2 * half).to(torch.uint8)

        return replace(assignment, features=replace(source.features, raw=_changed(raw, assignment, seen)))

    def cameras(self, clients: int, channels: int, seed: int) -> tuple[Tensor, Tensor]:
        """Factors and shifts [K, C]; a client's do not depend on how many there are."""
        keys = rng.fold(self.key(seed, "cameras"), torch.arange(clients))
        draws = 2 * rng.uniform(keys, 2 * channels) - 1
        return torch.exp(self.contrast * draws[:, :channels]), self.brightness * draws[:, channels:]


def _changed(values: Tensor, assignment: Assignment, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Values [N, ...] with those of each client k replaced by change(k, them); no two clients hold the same row."""
    out = values.clone()
    for part in (assignment.train, assignment.test):
        for client, rows in enumerate(part.lists()):
            out[rows] = change(client, out[rows])
    return out
