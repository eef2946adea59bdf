"""From a finished search to what is fitted: the settings of every contender, and the contender of every site.

The settings of a contender are those with the best metric over the validated rows of all sites; the contender of a site
is then chosen by kinfed.tabular.choice. Both rest on validation alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.engine import Judged, Metric, bootstrap_draws
from kinfed.errors import DataError
from kinfed.tabular.choice import Advantage, advantage, best_together, choose
from kinfed.tabular.inner_folds import NEVER
from kinfed.tabular.portfolio import ALONE, LOCAL, ONE_MODEL, Contender, Try, contenders_of
from kinfed.tabular.search import Search, Tries
from kinfed.tabular.site_outputs import judged_training

ROWS_DRAWN = 20_000_000  # rows of all bootstrap draws of one contender together, at most


@dataclass(frozen=True)
class FitDecision:
    contenders: list[Contender]
    tries: dict[str, Try]  # the chosen settings, by contender
    validation: dict[str, float]  # the metric over all validated rows, by contender
    advantages: dict[str, Advantage]  # of all contenders but learning alone
    chosen: list[str]  # [K]
    together: list[str | None]  # [K]
    validated: Tensor  # [K] rows

    @property
    def fitted(self) -> list[Contender]:
        """Contenders that are fitted on all training rows: what somebody takes or is compared with."""
        names = {ALONE, ONE_MODEL, *self.chosen, *self.together}
        return [one for one in self.contenders if one.name in names]

    @property
    def newcomer(self) -> Contender:
        """What suits a site that was not there: of the fitted ones that with the largest μ, as of a site without
        validation rows (kinfed.tabular.choice); alone, which has 0, comes first among equals."""
        return max(self.fitted, key=lambda one: 0.0 if one.name == ALONE else self.advantages[one.name].mean)


def decide(search: Search, tries: Tries, metric: Metric) -> FitDecision:
    data, places = search.data, (search.fold_of != NEVER).nonzero().squeeze(1)
    best: dict[str, tuple[int, Judged]] = {}
    validation: dict[str, float] = {}
    sign = 1.0 if metric.higher_is_better else -1.0
    for one in tries.contenders:
        for number in range(tries.trials):
            if (one.name, number) not in tries.outputs:
                continue
            judged = judged_training(tries.outputs[one.name, number], data, places)
            value = pooled_value(metric, judged)
            if one.name not in validation or sign * value > sign * validation[one.name]:
                best[one.name], validation[one.name] = (number, judged), value
    if ALONE not in best or not torch.isfinite(torch.tensor(validation[ALONE])):
        raise DataError(
            f"{metric.title} is undefined at every site (one class only?), so that nothing can be chosen by it; "
            "choose another --metric, such as accuracy or log_loss"
        )
    sites, replicates = data.num_clients, replicates_for(len(places))
    alone = best[ALONE][1]
    draws = bootstrap_draws(metric, alone, torch.arange(sites), replicates=replicates)
    others = [one for one in tries.contenders if one.name != ALONE]
    advantages = {one.name: advantage(metric, best[one.name][1], alone, draws) for one in others}
    chosen_tries = {one.name: search.make_try(best[one.name][0], one.method) for one in tries.contenders}
    validated = torch.bincount(data.train.owner[places], minlength=sites)
    return FitDecision(
        tries.contenders, chosen_tries, validation, advantages, choose(advantages, sites),
        best_together(advantages, sites), validated,
    )  # fmt: skip


def only_choice(search: Search) -> FitDecision:
    """Learning alone with default settings, where nothing else is to be tried: there is nothing to validate."""
    (alone,) = contenders_of(LOCAL)
    sites, first = search.data.num_clients, search.make_try(0, LOCAL)
    nobody = torch.zeros(sites, dtype=torch.int64)
    return FitDecision(
        [alone], {ALONE: first}, {ALONE: math.nan}, {}, choose({}, sites), best_together({}, sites), nobody
    )


def pooled_value(metric: Metric, judged: Judged) -> float:
    """Over all rows; within sites, as kinfed.engine.scoring.metrics defines it."""
    numerator, denominator = metric.sums(judged)
    return float(metric.value(torch.tensor([numerator.sum(), denominator.sum()], dtype=torch.float64)))


def replicates_for(rows: int) -> int:
    """Bootstrap draws of so many rows: a thousand, fewer of large tables, whose errors are small anyway."""
    return max(100, min(1000, ROWS_DRAWN // max(rows, 1)))
