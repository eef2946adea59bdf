"""Which contender a site should take: its own validation rows, and those of all other sites.

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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kinfed.analysis import gain
from kinfed.engine import Judged, Metric, bootstrap_draws, deviation_of_draws
from kinfed.tabular.portfolio import ALONE


@dataclass(frozen=True)
class Advantage:
    """Of one contender over learning alone, at all sites; in the unit of the metric, positive is better."""

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
    names = [ALONE, *advantages]
    expected = torch.stack([torch.zeros(sites, dtype=torch.float64), *(one.expected for one in advantages.values())])
    best = expected.max(0).values
    # The first among equals, which argmax does not promise.
    return [names[next(m for m in range(len(names)) if expected[m, k] == best[k])] for k in range(sites)]


def best_together(advantages: Mapping[str, Advantage], sites: int) -> list[str | None]:
    """[K] the best contender that learns with others, whatever learning alone gives; None where there is none."""
    if not advantages:
        return [None] * sites
    names = list(advantages)
    expected = torch.stack([one.expected for one in advantages.values()])
    best = expected.max(0).values
    return [names[next(m for m in range(len(names)) if expected[m, k] == best[k])] for k in range(sites)]
