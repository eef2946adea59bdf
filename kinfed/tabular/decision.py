"""The choice after a search: the settings of every contender, and the contender of every site.

Choices are made by a proper score (log loss of classes, RMSE of numbers), whatever metric is reported: AUROC within a
site is blind to the site's level, and accuracy to how sure a model is. The settings of a contender are those with the
best score over the validated rows of all sites. Which contender a site should take rests on its own validation rows,
and on those of all other sites.

Of contender m at site k, a_km is its advantage over learning alone on the rows of the site that validated it (the
difference of the score, positive is better), and S_k the covariance of these differences by the bootstrap over the
site's rows, the same draws for all models. A site with thirty rows has an a_km that is mostly noise; an average over
sites says nothing of the one site that is different. Between the two stands partial pooling (empirical Bayes), of all
contenders together (kinfed.theory.joint_gains): sites and contenders that differ by no more than chance share what they
saw. A site takes the contender with the largest α̂_km; alone has 0 and comes first among equals, then the order of the
portfolio: what shares less is preferred where nothing speaks for sharing more.

S_k has the variance of half a row on its diagonal, (m_k / 2 n_k)², where m_k is the metric of learning alone and n_k
its number of rows, of metrics such as AUROC that of the rarer class: ten rows that both models get right are no proof
that they are equal. It is that of the rows of the site for models as they are, and not of training them again; and two
sites tell little of how much sites differ. Gains on validation rows are too large for a second reason: a fold's model
of a site alone suffers more from the rows it lacks than one that learns with others. What is printed
is corrected for it by what the test rows of all sites say (`ExpectedGains`); nothing is chosen by that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.data import Federation, Problem
from kinfed.engine import Judged, Metric, bootstrap_draws, deviation_of_draws
from kinfed.errors import DataError
from kinfed.tabular.portfolio import ALONE, LOCAL, ONE_MODEL, Contender, Try, contenders_of
from kinfed.tabular.search import NEVER, Search, Tries
from kinfed.theory import joint_gains

FARTHEST = 20.0  # standard deviations of the target beyond which a prediction is not meant: the model has diverged
ROWS_DRAWN = 20_000_000  # rows of all bootstrap draws of one contender together, at most
DRAWS_KEPT = 30_000_000  # advantages of all contenders at all sites in all draws, at most
EQUAL = 1e-6  # advantages that differ by less of the largest are equal
FEWEST_DRAWS = 100
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Advantage:
    """The advantage of a contender over learning alone, in the metric's unit; positive is better."""

    mean: float  # μ: over sites
    spread: float  # how much sites differ in it
    expected: Tensor  # [K] α̂
    variance: Tensor  # [K] of α̂


def advantages_of(metric: Metric, judged: Mapping[str, Judged], *, replicates: int = 200) -> dict[str, Advantage]:
    """Advantages of all contenders but learning alone, in the order in which they are judged."""
    others = [name for name in judged if name != ALONE]
    sites = judged[ALONE].clients
    if not others:
        return {}
    draws = draws_for(replicates, sites, len(others))
    return pooled_advantages(others, *seen_advantages(metric, judged, draws, torch.arange(sites)))


def draws_for(replicates: int, sites: int, contenders: int) -> int:
    """Number of bootstrap draws of that many contenders at all sites together."""
    return max(FEWEST_DRAWS, min(replicates, DRAWS_KEPT // (sites * contenders)))


def seen_advantages(
    metric: Metric, judged: Mapping[str, Judged], replicates: int, ids: Tensor
) -> tuple[Floats, Floats]:  # fmt: skip
    """[K, M] what the rows of every site say of all contenders but learning alone, and [K, M, M] its covariance; `ids`
    [K] name the sites, by which rows are drawn."""
    alone = judged[ALONE]
    draws = bootstrap_draws(metric, alone, ids, replicates=replicates)
    pairs = [advantage(metric, one, alone, draws, ids=ids) for name, one in judged.items() if name != ALONE]
    covariance = covariance_of_draws(torch.stack([one.draws for one in pairs], 2).numpy())
    covariance += pairs[0].half_row.square().numpy()[:, None, None] * np.eye(len(pairs))
    return torch.stack([one.seen for one in pairs], 1).numpy(), covariance


def pooled_advantages(names: Sequence[str], seen: Floats, covariance: Floats) -> dict[str, Advantage]:
    """Advantages of these contenders by what the rows of all sites say (kinfed.theory.joint_gains)."""
    joint = joint_gains.joint_gains(seen, covariance)
    columns = [torch.from_numpy(joint.expected), torch.from_numpy(joint.covariance)]
    return {
        name: Advantage(float(joint.mean[m]), float(joint.spread[m]), columns[0][:, m], columns[1][:, m, m])
        for m, name in enumerate(names)
    }


@dataclass(frozen=True)
class SeenAdvantage:
    """What rows say of the advantage of one model over another, by site."""

    seen: Tensor  # [K] a; NaN where it is not known
    draws: Tensor  # [R, K] over the bootstrap
    half_row: Tensor  # [K] the error that half a row makes

    @property
    def error(self) -> Tensor:
        """[K] standard deviation, at least that of half a row; NaN where it is not known."""
        error = deviation_of_draws(self.draws).maximum(self.half_row.clamp_min(1e-12))
        return torch.where(torch.isnan(self.seen), torch.nan, error)


def advantage(
    metric: Metric, judged: Judged, alone: Judged, draws: Tensor | None = None, *, replicates: int = 200,
    ids: Tensor | None = None,
) -> SeenAdvantage:  # fmt: skip
    """`draws` [R, K] of learning alone, where they are known already; `ids` [K] name the sites by which rows are drawn,
    where these are some of all."""
    ids = torch.arange(judged.clients) if ids is None else ids
    if draws is None:
        draws = bootstrap_draws(metric, alone, ids, replicates=replicates)
    sign = 1.0 if metric.higher_is_better else -1.0
    own = values(metric, alone)
    differences = sign * (bootstrap_draws(metric, judged, ids, replicates=len(draws)) - draws)
    half_row = own.abs() / (2 * torch.from_numpy(metric.support(judged)).clamp_min(1))
    return SeenAdvantage(sign * (values(metric, judged) - own), differences, half_row)


def values(metric: Metric, judged: Judged) -> Tensor:
    """[K] the metric at every site; NaN where it is undefined."""
    numerator, denominator = metric.sums(judged)
    return metric.value(torch.stack([torch.from_numpy(numerator), torch.from_numpy(denominator)], 1).double())


def covariance_of_draws(draws: Floats) -> Floats:
    """[K, M, M] from draws [R, K, M]; NaN where most of them are undefined."""
    known: NDArray[np.bool_] = np.isfinite(draws).all(2)  # type: ignore[assignment]  # [R, K]
    number = known.sum(0)
    centred = np.where(known[..., None], draws, 0.0)
    centred -= known[..., None] * (centred.sum(0) / np.maximum(number, 1)[:, None])
    covariance = np.einsum("rkm,rkl->kml", centred, centred) / np.maximum(number - 1, 1)[:, None, None]
    return np.where((number > len(draws) // 2)[:, None, None], covariance, np.nan)


def choose(advantages: Mapping[str, Advantage], sites: int) -> list[str]:
    """[K] the contender of every site; `advantages` are of all but learning alone, in the order of the portfolio."""
    alone = {ALONE: torch.zeros(sites, dtype=torch.float64)}
    return _largest(alone | {name: one.expected for name, one in advantages.items()})


def best_together(advantages: Mapping[str, Advantage], sites: int) -> list[str | None]:
    """[K] the best contender that learns with others, whatever learning alone gives; None if there is none."""
    return [*_largest({name: one.expected for name, one in advantages.items()})] if advantages else [None] * sites


def _largest(expected: Mapping[str, Tensor]) -> list[str]:
    """[K] the name with the largest entry; the first among those that differ by rounding only."""
    names, rows = list(expected), torch.stack(list(expected.values()))
    first = (rows >= rows.max(0).values - EQUAL * rows.abs().max()).to(torch.int64).cummax(0).values.sum(0)
    return [names[len(names) - int(count)] for count in first]


@dataclass(frozen=True)
class FitDecision:
    contenders: list[Contender]
    tries: dict[str, Try]  # the chosen settings, by contender
    validation: dict[str, float]  # the metric over all validated rows, by contender
    advantages: dict[str, Advantage]  # of all contenders but learning alone
    chosen: list[str]  # [K]
    together: list[str | None]  # [K]
    validated: Tensor  # [K] rows
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # [V] validated training rows
    outputs: dict[str, Tensor] = field(default_factory=dict)  # [V, C] of the chosen tries there, by contender

    @property
    def fitted(self) -> list[Contender]:
        """Contenders that are fitted on all training rows: what a site takes or is compared with."""
        names = {ALONE, ONE_MODEL, *self.chosen, *self.together}
        return [one for one in self.contenders if one.name in names]

    @property
    def newcomer(self) -> Contender:
        """The contender for a new site: of the fitted ones that with the largest μ, as of a site without validation
        rows; alone, which has 0, comes first among equals."""
        return max(self.fitted, key=lambda one: 0.0 if one.name == ALONE else self.advantages[one.name].mean)


def decide(search: Search, tries: Tries, metric: Metric, reported: Metric | None = None) -> FitDecision:
    """The choice by `metric`; where the `reported` one is undefined at every site, nothing could be said of it."""
    data, places = search.data, (search.fold_of != NEVER).nonzero().squeeze(1)
    best, validation = best_tries(tries, metric, data, places)
    reference = metric if reported is None else reported
    if ALONE not in best or not math.isfinite(pooled_value(reference, best[ALONE][1])):
        raise DataError(
            f"{reference.title} is undefined at every site (one class only?), so that nothing can be chosen by it; "
            "choose another --metric, such as accuracy or log_loss"
        )
    sites, replicates = data.num_clients, replicates_for(len(places))
    advantages = advantages_of(metric, {one.name: best[one.name][1] for one in tries.contenders}, replicates=replicates)
    chosen_tries = {one.name: search.make_try(best[one.name][0], one.method) for one in tries.contenders}
    validated = torch.bincount(data.train.owner[places], minlength=sites)
    outputs = {name: tries.outputs[name, number][places] for name, (number, _) in best.items()}
    return FitDecision(
        tries.contenders, chosen_tries, validation, advantages, choose(advantages, sites),
        best_together(advantages, sites), validated, places, outputs,
    )  # fmt: skip


def best_tries(
    tries: Tries, metric: Metric, data: Federation, places: Tensor
) -> tuple[dict[str, tuple[int, Judged]], dict[str, float]]:
    """The best try of every contender with what was judged of it, and the metric over all validated rows."""
    best: dict[str, tuple[int, Judged]] = {}
    validation: dict[str, float] = {}
    sign = 1.0 if metric.higher_is_better else -1.0
    for one in tries.contenders:
        for number in range(tries.trials):
            if (one.name, number) not in tries.outputs:
                continue
            judged = judged_training(within_reach(tries.outputs[one.name, number], data.problem), data, places)
            value = pooled_value(metric, judged)
            if one.name not in validation or sign * value > sign * validation[one.name]:
                best[one.name], validation[one.name] = (number, judged), value
    return best, validation


@dataclass
class Standing:
    """An answer before a search has ended: which contender is ahead, told whenever it is another or better."""

    search: Search
    metric: Metric
    _told: float = -math.inf

    def tell(self, tries: Tries) -> None:
        search, places = self.search, (self.search.fold_of != NEVER).nonzero().squeeze(1)
        _, values = best_tries(tries, self.metric, search.data, places)
        sign = 1.0 if self.metric.higher_is_better else -1.0
        titles = {one.name: one.title for one in tries.contenders if math.isfinite(values.get(one.name, math.nan))}
        if ALONE not in titles or len(titles) < 2:
            return
        name = max(titles, key=lambda one: sign * values[one])
        if sign * values[name] <= self._told:
            return
        self._told = sign * values[name]
        beside = "" if name == ALONE else f" (alone {self.metric.shown(values[ALONE])})"
        search.observer.note(
            f"so far, after {search.budget.spent:.0f} s of work: {titles[name]} leads on rows that folds left out, "
            f"{self.metric.title} {self.metric.shown(values[name])}{beside}"
        )


def only_choice(search: Search) -> FitDecision:
    """Learning alone with default settings, where nothing else is to be tried: there is nothing to validate."""
    (alone,) = contenders_of(LOCAL)
    sites, first = search.data.num_clients, search.make_try(0, LOCAL)
    choices, unknown = torch.zeros(sites, dtype=torch.int64), {ALONE: math.nan}
    return FitDecision([alone], {ALONE: first}, unknown, {}, choose({}, sites), best_together({}, sites), choices)


def judged_rows(outputs: Tensor, rows: Tensor, owner: Tensor, data: Federation) -> Judged:
    """The rows of `data` in order of their sites, each as often as its weight says; outputs of a regression are in the
    target's own unit."""
    problem, labels = data.problem, data.labels[rows]
    if problem.is_regression and problem.shape:
        outputs, labels = problem.standardized(outputs), problem.standardized(labels)
    elif problem.is_regression:
        problem = Problem.of_numbers()
    else:
        outputs = torch.nan_to_num(outputs, nan=0.0, posinf=1e30, neginf=-1e30)
    weight = None if data.weights is None else data.weights[rows].double().numpy()
    return Judged(outputs.numpy(), labels.numpy(), np.asarray(owner), data.num_clients, problem, weight=weight)


def judged_test(outputs: Tensor, data: Federation) -> Judged:
    return judged_rows(outputs, data.test.rows, data.test.owner, data)


def judged_training(outputs: Tensor, data: Federation, places: Tensor) -> Judged:
    """The entries `places`, ascending, of `data.train.rows`; outputs [T, C] are of all of them."""
    train = data.train
    return judged_rows(outputs[places], train.rows[places], train.owner[places], data)


def within_reach(outputs: Tensor, problem: Problem) -> Tensor:
    """Numbers no farther off than a prediction can be meant to be: the error of a model that diverged at one site would
    else be all that is known of the others."""
    if not problem.is_single_number:
        return outputs
    low, high = reach_of(problem)
    return torch.nan_to_num(outputs, nan=high).clamp(low, high)


def reach_of(problem: Problem) -> tuple[float, float]:
    """How far from the mean of the training targets a prediction of a single number can be meant to be."""
    mean, reach = (float(np.ravel(value)[0]) for value in (problem.mean, problem.scale))
    return mean - FARTHEST * reach, mean + FARTHEST * reach


def pooled_value(metric: Metric, judged: Judged) -> float:
    """The metric over all rows; within sites, as kinfed.engine.scoring.metrics defines it."""
    numerator, denominator = metric.sums(judged)
    return float(metric.value(torch.tensor([numerator.sum(), denominator.sum()], dtype=torch.float64)))


def replicates_for(rows: int) -> int:
    """Number of bootstrap draws: a thousand, fewer of large tables, whose errors are small anyway."""
    return max(FEWEST_DRAWS, min(1000, ROWS_DRAWN // max(rows, 1)))
