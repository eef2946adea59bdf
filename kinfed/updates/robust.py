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
they cost accuracy where clients differ, and most for the clients that differ most.

Norms and distances are those of trainable parameters. Running statistics (of BatchNorm, say) have no part in them, and
would be a way around them: with clip and krum every statistic is the median of the clients', which withstands
(n − 1) / 2 of them.

Clipping: Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019. Median, trimmed mean: Yin,
Chen, Ramchandran, Bartlett, ICML 2018. Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer, NeurIPS 2017.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, RoundInfo, averaged_rows, mean_from_row, required_averaging
from kinfed.core import Registry, check_options, kernels, option
from kinfed.errors import ConfigError
from kinfed.updates.stages import Stage, Updates, by_columns


@dataclass(frozen=True)
class Rule(ABC):
    """A robust average. Its fields are its options."""

    by_coordinate: ClassVar[bool] = False  # every column of the result depends on that column alone

    def __post_init__(self) -> None:
        check_options(self)

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
    norm: float | None = option(
        None, "c: the largest norm of an update that counts in full; if none is given, the median of the round", gt=0
    )

    def __call__(self, rows: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        limit = float(norm.median()) if self.norm is None else self.norm
        factor = torch.where(norm > limit, limit / norm.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
        return by_columns(lambda block: factor @ block.to(torch.float64) / len(rows), rows).to(rows.dtype)

    def withstands(self, n: int) -> int:
        return n if self.norm is not None else (n - 1) // 2


@dataclass(frozen=True)
class Median(Rule):
    by_coordinate = True

    def __call__(self, rows: Tensor) -> Tensor:
        low, high = (len(rows) - 1) // 2, len(rows) // 2
        return by_columns(lambda block: _mean(block.sort(0).values[[low, high]]), rows).to(rows.dtype)

    def withstands(self, n: int) -> int:
        return (n - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(Rule):
    by_coordinate = True

    share: float = option(
        0.2, "share of the clients whose smallest, and as many whose largest, values are left out of every coordinate",
        ge=0, lt=0.5,
    )  # fmt: skip

    def __call__(self, rows: Tensor) -> Tensor:
        cut = self.withstands(len(rows))
        return by_columns(lambda block: _mean(block.sort(0).values[cut : len(rows) - cut]), rows).to(rows.dtype)

    @property
    def least(self) -> int:
        return 3 if self.share else 1

    def withstands(self, n: int) -> int:
        share = math.ceil(self.share * n - 1e-9)  # 0.07 * 100 is 7.000000000000001
        return min(share, (n - 1) // 2)  # something must be left


@dataclass(frozen=True)
class Krum(Rule):
    hostile: int = option(1, "f: how many clients of a round may be hostile", ge=0)
    keep: int | None = option(
        None, "m: how many updates are averaged, at most n − f − 2 (the default); 1 is the original Krum", ge=1
    )

    def __call__(self, rows: Tensor) -> Tensor:
        near = len(rows) - self.hostile - 2
        square = kernels.pairwise_squared_distances(rows).fill_diagonal_(torch.inf)
        score = square.sort(1).values[:, :near].sum(1)  # Σ over the n − f − 2 nearest of ‖u_i − u_j‖²
        nearest = score.argsort(stable=True)[: min(self.keep or near, near)]
        return by_columns(_mean, rows[nearest.sort().values]).to(rows.dtype)

    @property
    def least(self) -> int:
        return max(2 * self.hostile + 3, self.hostile + 2 + (self.keep or 1))

    def withstands(self, n: int) -> int:
        return self.hostile if n >= self.least else 0


RULES: Registry[type[Rule]] = Registry("robust rule")
RULES.register("clip", Clip, summary="the mean of updates shortened to a norm")
RULES.register("median", Median, summary="the median of every coordinate")
RULES.register("trimmed_mean", TrimmedMean, summary="the mean of every coordinate without its ends")
RULES.register("krum", Krum, summary="the mean of the updates nearest to their neighbours")


class RobustAverage(Stage):
    """Puts a rule's result in the place of updates' mean. Several fields are judged as one row, by their trainable
    columns (kinfed.updates.screening.trained_columns). Numbers of examples, which are clients' claims, do not count."""

    name = "robust"
    refuses = True

    def __init__(self, rule: Rule, algorithm: AnyAlgorithm, trained: Tensor | None = None) -> None:
        self.rule, self.trained = rule, trained
        method = required_averaging(
            algorithm, type(algorithm).__name__, "a robust average could not keep its promise", "robust"
        )
        if method.adds_up:
            raise ConfigError(
                f"{type(algorithm).__name__} adds up sums over clients' rows, and a robust rule's result is no such "
                "sum; leave out the method or robust"
            )
        self.fields = method.fields

    def check(self, algorithm: AnyAlgorithm, called: int) -> None:
        if called < self.rule.least:
            raise ConfigError(
                f"{type(self.rule).__name__} with these options needs {self.rule.least} updates in a round, and "
                f"{called} clients are called; raise participation, or set the rule to withstand fewer hostile clients"
            )

    def at_server(self, updates: Updates, round: RoundInfo) -> Updates:
        if (count := len(updates.ids)) < self.rule.least:
            name, needed = type(self.rule).__name__, self.rule.least
            return updates.unused(f"{count} updates are too few for {name}, which needs {needed}; not used")
        if not self.fields:
            return updates
        fields = {name: getattr(updates.rows, name) for name in self.fields}
        row = _combined(self.rule, averaged_rows(updates.rows, self.fields), _trained_mask(fields, self.trained))
        return replace(updates, mean=mean_from_row(updates.rows, self.fields, row), weight=float(count))


def _trained_mask(fields: Mapping[str, Tensor], trained: Tensor | None) -> Tensor | None:
    """bool: which columns of the fields' flat rows, side by side, are trainable; None: all."""
    if trained is None:
        return None
    parts = []
    for rows in fields.values():
        columns = trained if rows.shape[-1] == len(trained) else trained.new_ones(())
        parts.append(columns.expand(rows.shape[1:]).flatten())
    return torch.cat(parts)


def _combined(rule: Rule, rows: Tensor, trained: Tensor | None) -> Tensor:
    if trained is None or rule.by_coordinate:
        return rule(rows)
    row, trained = rows.new_empty(rows.shape[1]), trained.to(rows.device)
    row[trained], row[~trained] = rule(rows[:, trained]), Median()(rows[:, ~trained])
    return row


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(0, dtype=torch.float64)
