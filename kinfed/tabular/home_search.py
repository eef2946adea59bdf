"""What a site does of a search at home: its own rows in folds, models judged there, and the few numbers that leave.

A search over sites that share no rows (kinfed.deploy) asks of every site what `decide` computes where all rows lie
together, in two messages:

    figures     for every contender and try the numerator and denominator of the score on the site's validated rows:
                added up over sites they are the score by which a contender's settings are chosen
    advantages  with these settings, a_k [M] and S_k [M, M]: the advantages of all contenders over learning alone at
                this site, and their covariance

What a site takes then follows by partial pooling of all contenders together, as in kinfed.tabular.decision. Folds are
drawn by the site's name, so that they are those of a table with the rows of all sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.data import Federation, Ragged
from kinfed.engine import Judged, Metric
from kinfed.errors import DataError
from kinfed.tabular.decision import (
    Advantage,
    Floats,
    best_together,
    choose,
    draws_for,
    judged_training,
    pooled_advantages,
    replicates_for,
    seen_advantages,
    within_reach,
)  # fmt: skip
from kinfed.tabular.portfolio import ALONE, ONE_MODEL, Contender
from kinfed.tabular.search import NEVER, assign_folds, fold_rows, trains_in

Tried = tuple[str, int]  # a contender and the number of its try


@dataclass(frozen=True)
class HomeSearch:
    """The rows of one site: `data` has its training and test rows, and the problem as fitted to the training rows of
    all sites, by which numbers that a model can be meant to predict are told from others."""

    data: Federation
    folds: int
    fold_of: Tensor  # [T] the fold of each training row

    @classmethod
    def of(cls, data: Federation, folds: int, seed: int) -> HomeSearch:
        if int(data.train.count[0]) < 2:  # its only row trains in all folds
            return cls(data, folds, torch.full_like(data.train.rows, NEVER))
        return cls(data, folds, assign_folds(data, folds, seed))

    def part(self, number: int) -> tuple[Ragged, Ragged]:
        """Training rows of a fold, and the rows that validate it; of part `folds`, all of them and the test rows."""
        if number == self.folds:
            return self.data.train, self.data.test
        inside = self.fold_of == number
        return self.data.train.filter(trains_in(self.data, self.fold_of, number)), self.data.train.filter(inside)

    def joined(self, by_fold: Sequence[Tensor]) -> Tensor | None:
        """[T, C] outputs on all training rows, from those on the rows of each fold; None if some are not finite."""
        whole = torch.zeros(len(self.fold_of), by_fold[0].shape[1], dtype=torch.float64)
        for fold, outputs in enumerate(by_fold):
            whole[fold_rows(self.data, self.fold_of, fold)] = outputs
        return whole if bool(torch.isfinite(whole).all()) else None

    @property
    def places(self) -> Tensor:
        """[V] training rows that were validated."""
        return (self.fold_of != NEVER).nonzero().squeeze(1)

    def _judged(self, outputs: Tensor) -> Judged:
        return judged_training(within_reach(outputs, self.data.problem), self.data, self.places)

    def figures(self, metric: Metric, outputs: Mapping[Tried, Tensor]) -> dict[Tried, tuple[float, float]]:
        """Numerator and denominator of the score of every try on the validated rows."""
        sums = {}
        for tried, one in outputs.items():
            numerator, denominator = metric.sums(self._judged(one))
            sums[tried] = float(numerator[0]), float(denominator[0])
        return sums

    def bounded_losses(self, outputs: Tensor, largest: float) -> Tensor:
        """[V] log losses on the validated rows in units of the largest that counts."""
        truth = torch.from_numpy(judged_training(outputs, self.data, self.places).truth)
        return (-truth.clamp_min(1e-300).log() / largest).clamp(0, 1)

    def advantages(
        self, metric: Metric, outputs: Mapping[str, Tensor], number: int, replicates: int
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """a_k [M] and S_k [M, M] of all contenders but learning alone, in the order of `outputs`; NaN where they are
        not known. `number` is the site's among all, by which the bootstrap draws."""
        judged = {name: self._judged(one) for name, one in outputs.items()}
        seen, covariance = seen_advantages(metric, judged, replicates, torch.tensor([number]))
        return seen[0], covariance[0]


@dataclass(frozen=True)
class ChosenTries:
    """The settings that were chosen, by contender, and its score over the validated rows of all sites."""

    tries: dict[str, int]
    validation: dict[str, float]

    @classmethod
    def of(
        cls, metric: Metric, contenders: Sequence[Contender], trials: int,
        figures: Sequence[Mapping[Tried, tuple[float, float]]],
    ) -> ChosenTries:  # fmt: skip
        """The best try of every contender by the figures of all sites; those that a site has none of are left out."""
        sign = 1.0 if metric.higher_is_better else -1.0
        tries: dict[str, int] = {}
        validation: dict[str, float] = {}
        for one in contenders:
            for number in range(trials):
                if any((one.name, number) not in site for site in figures):
                    continue
                sums = torch.tensor([site[one.name, number] for site in figures], dtype=torch.float64).sum(0)
                value = float(metric.value(sums))
                if one.name not in validation or sign * value > sign * validation[one.name]:
                    tries[one.name], validation[one.name] = number, value
        if ALONE not in validation or not math.isfinite(validation[ALONE]):
            raise DataError(f"{metric.title} is undefined at every site, so that nothing can be chosen by it")
        return cls(tries, validation)

    @property
    def others(self) -> list[str]:
        """Contenders but learning alone."""
        return [name for name in self.tries if name != ALONE]

    def replicates(self, rows: int, sites: int) -> int:
        """Bootstrap draws of advantages on that many validated rows of all sites."""
        return draws_for(replicates_for(rows), sites, max(len(self.others), 1))


@dataclass(frozen=True)
class SiteChoices:
    """The contender of every site, and what it rests on."""

    advantages: dict[str, Advantage]  # of all contenders but learning alone
    chosen: list[str]  # [K]
    together: list[str | None]  # [K]

    @classmethod
    def of(cls, names: Sequence[str], seen: Floats, covariance: Floats) -> SiteChoices:
        """What every site takes, by a [K, M] and S [K, M, M] of all contenders but learning alone."""
        pooled = pooled_advantages(names, seen, covariance)
        return cls(pooled, choose(pooled, len(seen)), best_together(pooled, len(seen)))

    @property
    def fitted(self) -> set[str]:
        """Contenders that a site takes or is compared with."""
        return {ALONE, ONE_MODEL, *self.chosen, *(name for name in self.together if name is not None)}
