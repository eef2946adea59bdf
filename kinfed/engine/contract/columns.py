"""Columns of a model's row: named parameters, patterns that choose some of them, and rows cut into a shared and an own
part and joined again.

    split = ColumnSplit.owning(task.slots, ("head.*", "*.bias"))      the head and all biases stay with the clients
    theta = split.join(client.own, down.shared)                       [n, P]
    own, shared = split.take_own(theta), split.take_shared(theta)     [n, O] and [n, P − O]

A pattern is the name of a layer ("head", and all that lies below it), of a parameter ("head.weight"), or a glob over
such names, in which * also stands for dots ("*.bias", "blocks.?.norm*").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
from torch import Tensor

from kinfed.core import runs
from kinfed.errors import ModelError


@dataclass(frozen=True)
class ParameterSlot:
    """The place of one named parameter or running statistic in the flat row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool = True  # False: a running statistic, which forward passes move and gradients do not
    kind: str = ""  # type of the module that owns it ("Linear", "BatchNorm2d"), where it is known

    @property
    def layer(self) -> str:
        """The module that owns it; its own name where that is the model itself."""
        return self.name.rpartition(".")[0] or self.name


def layer_names(slots: Sequence[ParameterSlot]) -> tuple[str, ...]:
    """Modules that own parameters, in the order of the forward pass as declared."""
    return tuple(dict.fromkeys(slot.layer for slot in slots if slot.trainable))


def whole_parameters(slots: Sequence[ParameterSlot], mask: Tensor) -> tuple[bool, ...] | None:
    """Whether mask [P] holds each trainable parameter; None if the mask holds one in part."""
    parts = [mask[slot.start : slot.stop] for slot in slots if slot.trainable]
    held = tuple(bool(part.any()) for part in parts)
    return held if all(bool(part.all()) for part, holds in zip(parts, held, strict=True) if holds) else None


def last_layers(slots: Sequence[ParameterSlot], count: int) -> tuple[str, ...]:
    """Names of the last `count` modules that own parameters; all of them if there are no more."""
    names = layer_names(slots)
    return names[max(len(names) - count, 0) :]


def parse_patterns(text: str) -> tuple[str, ...]:
    """Patterns separated by commas."""
    return tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())


def layer_mask(slots: Sequence[ParameterSlot], patterns: Sequence[str]) -> Tensor:
    """bool [P]: parameters that at least one of the patterns chooses. Every pattern must choose some."""
    mask = torch.zeros(slots[-1].stop, dtype=torch.bool)
    for pattern in patterns:
        named = [slot for slot in slots if matches(slot.name, pattern)]
        if not named:
            is_glob = any(sign in pattern for sign in "*?[")
            problem = f"no layer that matches {pattern!r}" if is_glob else f"no layer {pattern!r}"
            raise ModelError(f"the model has {problem}; its layers are {', '.join(layer_names(slots))}")
        for slot in named:
            mask[slot.start : slot.stop] = True
    return mask


def matches(name: str, pattern: str) -> bool:
    """Whether the pattern means the parameter or a module above it."""
    above = accumulate(name.split("."), lambda outer, inner: f"{outer}.{inner}")
    return any(part == pattern or fnmatchcase(part, pattern) for part in above)


@dataclass(frozen=True)
class ColumnSplit:
    """The columns of a row [P] in two parts, each a few blocks that are copied whole: much faster than by a mask."""

    own: tuple[slice, ...]  # from left to right
    shared: tuple[slice, ...]

    @classmethod
    def owning(cls, slots: Sequence[ParameterSlot], patterns: Sequence[str]) -> ColumnSplit:
        """Parameters that the patterns choose are own, the others shared."""
        return cls.from_mask(layer_mask(slots, patterns))

    @classmethod
    def from_mask(cls, own: Tensor) -> ColumnSplit:
        """`own` is bool [P]."""
        return cls(tuple(runs(own)), tuple(runs(~own)))

    def swapped(self) -> ColumnSplit:
        """Shared columns become own ones, and own ones shared."""
        return ColumnSplit(self.shared, self.own)

    @property
    def width(self) -> int:
        """P."""
        return max((block.stop for block in (*self.own, *self.shared)), default=0)

    @property
    def own_mask(self) -> Tensor:
        """bool [P]."""
        mask = torch.zeros(self.width, dtype=torch.bool)
        for block in self.own:
            mask[block] = True
        return mask

    @property
    def shared_mask(self) -> Tensor:
        """bool [P]."""
        return ~self.own_mask

    def take_own(self, theta: Tensor) -> Tensor:
        """[..., O] of rows [..., P]; a view where the columns follow one another."""
        return _take(theta, self.own)

    def take_shared(self, theta: Tensor) -> Tensor:
        """[..., P − O] of rows [..., P]; a view where the columns follow one another."""
        return _take(theta, self.shared)

    def join(self, own: Tensor, shared: Tensor) -> Tensor:
        """[..., P] from own [..., O] and shared [..., P − O] parameters, a new tensor."""
        theta = shared.new_empty(*shared.shape[:-1], self.width)
        for part, blocks in ((own, self.own), (shared, self.shared)):
            sizes = [block.stop - block.start for block in blocks]
            for block, columns in zip(blocks, torch.split(part, sizes, -1), strict=True):
                theta[..., block] = columns
        return theta


def _take(theta: Tensor, blocks: tuple[slice, ...]) -> Tensor:
    parts = [theta[..., block] for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat([theta[..., :0], *parts], -1)
