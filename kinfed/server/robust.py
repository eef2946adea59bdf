"""Averages that a few hostile or broken clients cannot move far, in place of the mean of all updates.

    rule           result                                                hostile clients it withstands, of n
    clip           mean of updates shortened to norm c                   any k, each moving the result by at most 2c/n
    median         of every coordinate                                   (n − 1) / 2
    trimmed_mean   of every coordinate, without its k smallest and       k = ⌈share n⌉, at most (n − 1) / 2
                   k largest values
    krum           mean of the updates nearest to their neighbours       `hostile`, with n ≥ 2 hostile + 3

Below those numbers, median and trimmed mean lie in every coordinate within the range of the honest values, whatever the
others send; Krum averages updates that have most others near them. All clients weigh the same: how many examples a
client has is its own claim. What an honest client with unusual data sends looks hostile to every one of these rules:
they cost accuracy where clients differ, and most for those who differ most.

Clipping: Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019. Median, trimmed mean: Yin,
Chen, Ramchandran, Bartlett, ICML 2018. Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from kinfed.core.kernels import pairwise_squared_distances
from kinfed.errors import ConfigError, unknown_name

BLOCK = 1 << 20  # values sorted at once


@dataclass(frozen=True)
class Rule(ABC):
    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """[P] from finite updates [n, P], n >= least."""

    @property
    def least(self) -> int:
        """The fewest updates that the rule can be applied to."""
        return 1

    @abstractmethod
    def withstands(self, n: int) -> int:
        """How many of n updates may be hostile without the rule's promise being void."""


@dataclass(frozen=True)
class Clip(Rule):
    norm: float | None = None
    """c: the largest norm of an update that counts in full; where none is given, the median norm of the round."""

    def __post_init__(self) -> None:
        if self.norm is not None and not 0 < self.norm < math.inf:
            raise ConfigError(f"clip.norm is a positive number; got {self.norm}")

    def __call__(self, rows: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        limit = float(norm.median()) if self.norm is None else self.norm
        factor = torch.where(norm > limit, limit / norm.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
        return _by_columns(lambda block: factor @ block.to(torch.float64) / len(rows), rows)

    def withstands(self, n: int) -> int:
        return n if self.norm is not None else (n - 1) // 2


@dataclass(frozen=True)
class Median(Rule):
    def __call__(self, rows: Tensor) -> Tensor:
        low, high = (len(rows) - 1) // 2, len(rows) // 2
        return _by_columns(lambda block: _mean(block.sort(0).values[[low, high]]), rows)

    def withstands(self, n: int) -> int:
        return (n - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(Rule):
    share: float = 0.2
    """Share of the clients whose smallest, and as many whose largest, values are left out of every coordinate."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ConfigError(f"trimmed_mean.share lies in [0, 0.5); got {self.share}")

    def __call__(self, rows: Tensor) -> Tensor:
        cut = self.withstands(len(rows))
        return _by_columns(lambda block: _mean(block.sort(0).values[cut : len(rows) - cut]), rows)

    @property
    def least(self) -> int:
        return 3 if self.share else 1

    def withstands(self, n: int) -> int:
        share = math.ceil(self.share * n - 1e-9)  # 0.07 * 100 is 7.000000000000001
        return min(share, (n - 1) // 2)  # something must be left


@dataclass(frozen=True)
class Krum(Rule):
    hostile: int = 1
    """f: how many clients of a round may be hostile."""
    keep: int | None = None
    """m: how many updates are averaged, at most n − f − 2 (the default); 1 is the original Krum."""

    def __post_init__(self) -> None:
        if self.hostile < 0:
            raise ConfigError(f"krum.hostile is 0 or more; got {self.hostile}")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"krum.keep is 1 or more; got {self.keep}")

    def __call__(self, rows: Tensor) -> Tensor:
        near = len(rows) - self.hostile - 2
        square = pairwise_squared_distances(rows).fill_diagonal_(torch.inf)
        score = square.sort(1).values[:, :near].sum(1)  # Σ over the n − f − 2 nearest of ‖u_i − u_j‖²
        chosen = score.argsort(stable=True)[: min(self.keep or near, near)]
        return _by_columns(_mean, rows[chosen.sort().values])

    @property
    def least(self) -> int:
        return max(2 * self.hostile + 3, self.hostile + 2 + (self.keep or 1))

    def withstands(self, n: int) -> int:
        return self.hostile if n >= self.least else 0


RULES: dict[str, type[Rule]] = {"clip": Clip, "median": Median, "trimmed_mean": TrimmedMean, "krum": Krum}


def make_rule(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    if name not in RULES:
        raise unknown_name("robust rule", name, RULES)
    kind, given = RULES[name], dict(options or {})
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    for option, value in given.items():
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
        try:
            given[option] = TypeAdapter(hints[option]).validate_python(value)
        except ValidationError:
            raise ConfigError(f"{name}.{option} must be {hints[option]}; got {value!r}") from None
    return kind(**given)


def _by_columns(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """function(rows), [n, P] -> float64 [P] -> [P], a block of columns at a time: no copy of all rows is made."""
    width = max(1, BLOCK // max(len(rows), 1))
    return torch.cat([function(block) for block in torch.split(rows, width, 1)]).to(rows.dtype)


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(0, dtype=torch.float64)
