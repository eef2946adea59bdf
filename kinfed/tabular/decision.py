"""The choice after a search, the settings of every contender and the contender of every site; and what sites gain.

The settings of a contender are those with the best metric over the validated rows of all sites. Which contender a site
should take rests on its own validation rows, and on those of all other sites.

Of contender m at site k, a_km is its advantage over learning alone on the rows of the site that validated it (the
difference of the metric, positive is better), and s_km² the variance of that difference, by the bootstrap over the
site's rows, the same draws for both models. A site with thirty rows has an a_km that is mostly noise; an average over
sites says nothing of the one site that is different. Between the two stands partial pooling (empirical Bayes):

    a_km | α_km ~ N(α_km, s_km²)                 what is seen of the site's true advantage α_km
    α_km        ~ N(μ_m, τ_m²)                   sites differ in how much the method helps them

    w_km = 1 / (τ_m² + s_km²),   μ_m = Σ_k w_km a_km / Σ_k w_km
    α̂_km = B_km μ_m + (1 − B_km) a_km,           B_km = s_km² / (s_km² + τ_m²)

with τ_m² by the moments of Paule and Mandel (kinfed.analysis.gain.estimate_spread). Where sites do not differ by more
than chance, τ_m² = 0 and all take the same. A site where the metric is undefined, or without validation rows, has α̂ =
μ_m. A site takes the contender with the largest α̂_km; alone has 0 and comes first among equals, then the order of the
portfolio: what shares less is preferred where nothing speaks for sharing more.

Limits: two sites tell little of τ²; s_km² is that of the rows of the site for models as they are, and not of training
them again; the largest of several estimates is too large on average, and the gain that is reported is not this
one but that on test rows. s_km² is at least that of half a row: (m_k / 2 n_k)², where m_k is the metric of learning
alone and n_k its number of rows, of metrics such as AUROC that of the rarer class: ten rows that both models get right
are no proof that they are equal.

Figures and gains are on test rows that nothing was chosen by. An interval is value ± t · s with the standard deviation
s of bootstrap draws of the site's test rows and Student's t for as many rows; of metrics that compare two classes
(`Metric.by_class`), for as many as the rarer has. It ends where the metric does: no share is above 1. Of a gain both
models are judged on the same draws. The mean over sites weighs every site by 1 / (τ² + s²), with Student's t for as
many sites.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from kinfed.analysis import gain
from kinfed.data import Federation, Problem
from kinfed.engine import Judged, Metric, bootstrap_draws, deviation_of_draws
from kinfed.errors import DataError
from kinfed.runs import RunOutcome, constant_outputs
from kinfed.tabular.fit_result import Estimate, SiteRecord
from kinfed.tabular.portfolio import ALONE, BASELINE, LOCAL, ONE_MODEL, Contender, Try, contenders_of
from kinfed.tabular.search import NEVER, Search, Tries, outputs_on_test

ROWS_DRAWN = 20_000_000  # rows of all bootstrap draws of one contender together, at most
UNDEFINED, NO_GAIN = Estimate(None), Estimate(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Advantage:
    """The advantage of a contender over learning alone, at all sites, in the metric's unit; positive is better."""

    seen: Tensor  # [K] a_k; NaN where it is not known
    error: Tensor  # [K] s_k; NaN there
    mean: float  # μ
    spread: float  # τ
    expected: Tensor  # [K] α̂_k


def advantage(
    metric: Metric, judged: Judged, alone: Judged, draws: Tensor | None = None, *, replicates: int = 200
) -> Advantage:
    """`draws` [R, K] of learning alone, where they are known already."""
    ids = torch.arange(judged.clients)
    if draws is None:
        draws = bootstrap_draws(metric, alone, ids, replicates=replicates)
    sign = 1.0 if metric.higher_is_better else -1.0
    own = values(metric, alone)
    seen = sign * (values(metric, judged) - own)
    error = deviation_of_draws(sign * (bootstrap_draws(metric, judged, ids, replicates=len(draws)) - draws))
    least = own.abs() / (2 * torch.from_numpy(metric.support(judged)).clamp_min(1))
    error = torch.where(torch.isnan(seen), torch.nan, error).maximum(least.clamp_min(1e-12))
    return shrunk(seen, torch.where(torch.isnan(seen), torch.nan, error))


def values(metric: Metric, judged: Judged) -> Tensor:
    """[K] the metric at every site; NaN where it is undefined."""
    numerator, denominator = metric.sums(judged)
    return metric.value(torch.stack([torch.from_numpy(numerator), torch.from_numpy(denominator)], 1).double())


def shrunk(seen: Tensor, error: Tensor) -> Advantage:
    """The formulas at the head of this file, for a_k [K] and s_k [K], NaN where they are not known."""
    known = torch.isfinite(seen) & torch.isfinite(error)
    if not bool(known.any()):
        return Advantage(seen, error, 0.0, 0.0, torch.zeros_like(seen))
    a, variance = seen[known], error[known].square()
    spread = gain.estimate_spread(a, variance).s0 if len(a) > 1 else 0.0  # τ²
    w = 1 / (spread + variance)
    mean = w @ a / w.sum()  # μ
    B = variance / (variance + spread)
    expected = torch.full_like(seen, float(mean))
    expected[known] = B * mean + (1 - B) * a
    return Advantage(seen, error, float(mean), spread**0.5, expected)


def choose(advantages: Mapping[str, Advantage], sites: int) -> list[str]:
    """[K] the contender of every site; `advantages` are of all but learning alone, in the order of the portfolio."""
    alone = {ALONE: torch.zeros(sites, dtype=torch.float64)}
    return _largest(alone | {name: one.expected for name, one in advantages.items()})


def best_together(advantages: Mapping[str, Advantage], sites: int) -> list[str | None]:
    """[K] the best contender that learns with others, whatever learning alone gives; None where there is none."""
    return [*_largest({name: one.expected for name, one in advantages.items()})] if advantages else [None] * sites


def _largest(expected: Mapping[str, Tensor]) -> list[str]:
    """[K] the name with the largest entry; the first among equals, which argmax does not promise."""
    names, rows = list(expected), torch.stack(list(expected.values()))
    first = (rows == rows.max(0).values).to(torch.int64).cummax(0).values.sum(0)
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

    @property
    def fitted(self) -> list[Contender]:
        """Contenders that are fitted on all training rows: what somebody takes or is compared with."""
        names = {ALONE, ONE_MODEL, *self.chosen, *self.together}
        return [one for one in self.contenders if one.name in names]

    @property
    def newcomer(self) -> Contender:
        """The contender for a new site: of the fitted ones that with the largest μ, as of a site without validation
        rows; alone, which has 0, comes first among equals."""
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
    nobody, unknown = torch.zeros(sites, dtype=torch.int64), {ALONE: math.nan}
    return FitDecision([alone], {ALONE: first}, unknown, {}, choose({}, sites), best_together({}, sites), nobody)


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


def judged_baseline(data: Federation) -> Judged:
    """Every site's test rows by the shares of classes or the mean of its own training rows (kinfed.runs.baseline): what
    it takes no model to reach."""
    outputs = constant_outputs(data, torch.arange(data.num_clients))[data.test.owner]
    return judged_test(data.problem.restored(outputs) if data.problem.is_regression else outputs, data)


def judged_training(outputs: Tensor, data: Federation, places: Tensor) -> Judged:
    """The entries `places`, ascending, of `data.train.rows`; outputs [T, C] are of all of them."""
    train = data.train
    return judged_rows(outputs[places], train.rows[places], train.owner[places], data)


def pooled_value(metric: Metric, judged: Judged) -> float:
    """The metric over all rows; within sites, as kinfed.engine.scoring.metrics defines it."""
    numerator, denominator = metric.sums(judged)
    return float(metric.value(torch.tensor([numerator.sum(), denominator.sum()], dtype=torch.float64)))


def replicates_for(rows: int) -> int:
    """Number of bootstrap draws: a thousand, fewer of large tables, whose errors are small anyway."""
    return max(100, min(1000, ROWS_DRAWN // max(rows, 1)))


class SiteFigures:
    """Figures of all fitted contenders, and of the baseline, at all sites."""

    def __init__(self, metric: Metric, judged: Mapping[str, Judged]) -> None:
        self.metric = metric
        alone = judged[ALONE]
        ids, self.rows = torch.arange(alone.clients), torch.from_numpy(alone.examples)
        self._support = metric.support(alone)  # rows behind a site's figure
        replicates = replicates_for(int(self.rows.sum()))
        draws = {name: bootstrap_draws(metric, one, ids, replicates=replicates) for name, one in judged.items()}
        self._values = {name: values(metric, one) for name, one in judged.items()}
        self._errors = {name: deviation_of_draws(one) for name, one in draws.items()}
        self._gains = {
            name: advantage(metric, one, alone, draws[ALONE]) for name, one in judged.items() if name != ALONE
        }

    def value(self, name: str | None, site: int) -> Estimate:
        if name is None:
            return UNDEFINED
        estimate = _estimate(self._values[name][site], self._errors[name][site], int(self._support[site]))
        return _within(estimate, 0.0, 1.0) if self.metric.percent else estimate

    def gain(self, name: str | None, site: int) -> Estimate:
        """The gain over learning alone."""
        if name is None or name == ALONE:
            return NO_GAIN
        one = self._gains[name]
        estimate = _estimate(one.seen[site], one.error[site], int(self._support[site]))
        if not self.metric.percent:
            return estimate
        alone = float(self._values[ALONE][site])
        ends = (-alone, 1 - alone) if self.metric.higher_is_better else (alone - 1, alone)
        return _within(estimate, *ends)

    def overall(self, chosen: list[str]) -> Estimate:
        """The mean gain over sites of what each has chosen."""
        moved = [(self._gains[name], site) for site, name in enumerate(chosen) if name != ALONE]
        if not moved:
            return NO_GAIN
        seen, error = (torch.stack([getattr(one, part)[k] for one, k in moved]) for part in ("seen", "error"))
        # Who stays alone gains nothing, for sure; the mean is over all sites.
        pooled, known = shrunk(seen, error), torch.isfinite(seen) & torch.isfinite(error)
        if not bool(known.any()):
            return UNDEFINED
        share = len(moved) / len(chosen)
        variance = 1 / (1 / (pooled.spread**2 + error[known].square())).sum()
        reach, mean = _reach(float(variance.sqrt()), int(known.sum())), pooled.mean
        return Estimate(share * mean, share * (mean - reach), share * (mean + reach))


def _estimate(value: Tensor, error: Tensor, rows: int) -> Estimate:
    """The value with Student's interval for as many rows; without one where there are too few."""
    if not bool(torch.isfinite(value)):
        return UNDEFINED
    if not bool(torch.isfinite(error)) or rows < 2:
        return Estimate(float(value))
    reach = _reach(float(error), rows)
    return Estimate(float(value), float(value) - reach, float(value) + reach)


def _within(estimate: Estimate, lowest: float, highest: float) -> Estimate:
    """A share lies between 0 and 1, and so do the ends of its interval."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(estimate.value, max(estimate.low, lowest), min(estimate.high, highest))


def _reach(error: float, values: int) -> float:
    return float(stdtrit(max(values - 1, 1), 0.975)) * error


def figures_on_test(
    metric: Metric, data: Federation, decision: FitDecision, fitted: Mapping[str, RunOutcome]
) -> SiteFigures:
    judged = {one.name: judged_test(outputs_on_test(fitted[one.name], one.name, one), data) for one in decision.fitted}
    return SiteFigures(metric, {**judged, BASELINE: judged_baseline(data)})


def site_records(data: Federation, decision: FitDecision, figures: SiteFigures) -> tuple[SiteRecord, ...]:
    counts, rarer = data.train.count, data.class_counts("test").min(1)
    binary, classes = data.problem.kind == "binary", data.problem.class_labels

    def expected(name: str | None, k: int) -> float:
        return 0.0 if name is None or name == ALONE else float(decision.advantages[name].expected[k])

    fitted = {one.name for one in decision.fitted}
    return tuple(
        SiteRecord(
            site, int(counts[k]), int(decision.validated[k]), int(figures.rows[k]),
            int(rarer.values[k]) if binary else None, chosen, together,
            expected(chosen, k), expected(together, k), figures.value(BASELINE, k), figures.value(ALONE, k),
            figures.value(ONE_MODEL if ONE_MODEL in fitted else None, k), figures.value(together, k),
            figures.value(chosen, k), figures.gain(chosen, k), figures.gain(together, k),
            classes[int(rarer.indices[k])] if binary else "",
        )
        for k, (site, chosen, together) in enumerate(zip(data.names, decision.chosen, decision.together, strict=True))
    )  # fmt: skip
