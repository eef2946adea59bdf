"""Gains of M models over learning alone at K sites, estimated together: what to expect where nothing is shown.

a_k [M] are the gains that site k saw on its validation rows, S_k [M, M] their covariance over draws of its rows. Models
that are compared with the same one that learnt alone err alike, so that S_k is far from diagonal.

    a_k | α_k ~ N(α_k, S_k)                       α_k [M] the true gains of site k
    α_k       ~ N(μ, T),  T = τ_b² 11ᵀ + τ_e² I   a site that gains by one gains by others, too
    μ_m       ~ N(μ_0, ω²)                        of several models the best looks better than it is

    B_k = S_k (T + S_k)⁻¹
    α̂_k = a_k − B_k (a_k − μ̃)                     V_k = (I − B_k) S_k + B_k Cov(μ̃) B_kᵀ

All three variances by the moments of Paule and Mandel: τ_e² is where the squares of what models differ by within sites,
Σ_k r_kᵀ (S_k + τ_e² I)⁻¹ r_k in M − 1 contrasts, meet their mean (K − 1)(M − 1); τ_b² follows from the mean over models
at every site, whose variance it is with τ_e² / M; ω² from the M numbers μ̂ by generalized least squares and their
covariance. A site of which nothing was seen has α̂ = μ̃. With one model it is partial pooling as everybody knows it.

Decided: one τ_e² for all models, since one for each is too noisy to help (50 sites, 7 models, no gains: expected less
true gain of the chosen 0.0012 with one, 0.0021 with each, 0.0026 model by model); but one of a portfolio that is bad
somewhere would then make it large for all (squared errors double). So a model whose own spread is larger beyond doubt,
the lower end of its 95 % range being above the median model's, is measured in a larger unit d_m, d_m² = (lowest τ_m² +
v) / (median τ² + v), v being the variance that a typical site sees it with.

**Drift.** Validation rows were predicted by models of fewer rows, and learning alone suffers most from that, so
that gains on validation rows are too large even where nothing was chosen. What test rows say of the chosen model at all
sites together corrects it, downwards only:

    b = min(0, Σ_k w_k (t_k − α̂_k) / Σ_k w_k),    w_k = 1 / (Var t_k + V_k),    Var b = 1 / Σ_k w_k

t_k being the gain on test rows. α̂_k + b and t_k are then one estimate by their precisions (`with_test_rows`). All of it
is what to expect, never what is shown: no bound of a single site follows from it.

Var t_k is σ² / n_k with one variance σ² of a row for all sites (`row_variances`). A site's own few test rows say too
little of their variance, and what they say is tied to their mean: sites where two models happened to agree on four rows
took all of the weight. On 60 districts (eight draws, five test rows a site) what was called expected lay 0.200 nats
below the gain on fresh rows so, and 0.058 with one variance; validation rows alone 0.040.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kinfed.theory.spread import estimate_spread, falls_to

Floats = NDArray[np.float64]
SMALLEST_ERROR = 1e-9  # variance of a sampling error, in units of those of the same site


@dataclass(frozen=True)
class JointGains:
    """Posterior of the true gains."""

    mean: Floats  # [M] μ̃
    spread: Floats  # [M] how much sites differ, (τ_b² + τ_e²)^½ in every model's unit
    expected: Floats  # [K, M] α̂
    covariance: Floats  # [K, M, M] V


def joint_gains(seen: Floats, covariance: Floats) -> JointGains:
    """The formulas at the head of this file, for a [K, M] and S [K, M, M]; NaN at sites of which nothing was seen.

    >>> one = joint_gains(np.array([[0.3], [-0.1]]), np.full((2, 1, 1), 0.01))
    >>> one.expected.round(4).tolist()
    [[0.275], [-0.075]]
    """
    sites, models = seen.shape
    known = np.isfinite(seen).all(1) & np.isfinite(covariance).all((1, 2))
    nothing = np.zeros((sites, models))
    if not models or not known.any():
        return JointGains(np.zeros(models), np.zeros(models), nothing, np.zeros((sites, models, models)))
    a, S = seen[known], covariance[known]
    if not S.any():  # no contender ever differs from learning alone
        return JointGains(np.zeros(models), np.zeros(models), nothing, np.zeros((sites, models, models)))
    # Contenders that agree in every row of a site have a singular S.
    error = np.trace(S, axis1=1, axis2=2) / models  # [K]
    S = S + SMALLEST_ERROR * (error + SMALLEST_ERROR * error.mean())[:, None, None] * np.eye(models)
    unit = _units(a, S)
    a, S = a / unit, S / np.outer(unit, unit)
    T = _between_sites(a, S)
    weight = np.linalg.inv(T + S)  # [K, M, M]
    C = np.linalg.inv(weight.sum(0))
    mu = C @ np.einsum("kml,kl->m", weight, a)
    mean, uncertain = _shrunk_mean(mu, C, _between_models(mu, C))
    B = S @ weight
    expected = np.tile(mean, (sites, 1))
    expected[known] = a - np.einsum("kml,kl->km", B, a - mean)
    V = np.tile(T + uncertain, (sites, 1, 1))
    V[known] = S - B @ S + B @ uncertain @ B.transpose(0, 2, 1)
    spread = np.sqrt(np.diagonal(T)) * unit
    return JointGains(mean * unit, spread, expected * unit, V * np.outer(unit, unit))


def _units(a: Floats, S: Floats) -> Floats:
    """d [M], 1 of most models."""
    models = a.shape[1]
    if len(a) < 2:
        return np.ones(models)
    spreads = [estimate_spread(torch.from_numpy(a[:, m]), torch.from_numpy(S[:, m, m].copy())) for m in range(models)]
    middle = float(np.median([one.s0 for one in spreads]))
    typical = 1 / (1 / np.diagonal(S, axis1=1, axis2=2)).mean(0)
    lowest = np.array([one.low for one in spreads], dtype=np.float64)
    return np.asarray(np.sqrt(np.maximum(1.0, (lowest + typical) / (middle + typical))))


def _between_sites(a: Floats, S: Floats) -> Floats:
    """T [M, M]."""
    sites, models = a.shape
    within = 0.0
    if sites < 2:
        return np.zeros((models, models))
    if models > 1:
        contrasts = np.linalg.svd(np.ones((models, 1)))[0][:, 1:]
        x, covariance = a @ contrasts, contrasts.T @ S @ contrasts

        def squares(tau2: float) -> float:
            weight = np.linalg.inv(covariance + tau2 * np.eye(models - 1))
            rest = x - np.linalg.solve(weight.sum(0), np.einsum("kml,kl->m", weight, x))
            return float(np.einsum("km,kml,kl->", rest, weight, rest))

        scale = float(np.trace(covariance, axis1=1, axis2=2).mean()) / (models - 1)
        within = falls_to((sites - 1) * (models - 1), squares, scale)  # τ_e²
    of_mean = estimate_spread(torch.from_numpy(a.mean(1)), torch.from_numpy(S.mean((1, 2)))).s0
    between = max(of_mean - within / models, 0.0)  # τ_b²
    return np.full((models, models), between) + within * np.eye(models)


def _between_models(mu: Floats, C: Floats) -> float:
    """ω² where the squared deviations of μ̂ from μ_0, in units of C + ω² I, meet their mean M − 1."""
    if len(mu) < 2:
        return 0.0

    def squares(omega2: float) -> float:
        precision = np.linalg.inv(C + omega2 * np.eye(len(mu)))
        rest = mu - (precision @ mu).sum() / precision.sum()
        return float(rest @ precision @ rest)

    return falls_to(len(mu) - 1, squares, scale=float(np.diagonal(C).mean()))


def _shrunk_mean(mu: Floats, C: Floats, omega2: float) -> tuple[Floats, Floats]:
    """μ̃ [M] and its covariance, of a prior N(μ_0, ω²) whose μ_0 is not known."""
    models = len(mu)
    if models == 1:
        return mu, C
    precision = np.linalg.inv(C + omega2 * np.eye(models))
    total = precision.sum()
    mean = (precision @ mu).sum() / total  # μ_0
    rest = np.eye(models) - omega2 * precision
    column = rest.sum(1)
    covariance = omega2 * rest + np.outer(column, column) / total
    return mean + omega2 * precision @ (mu - mean), covariance


def row_variances(variance: Floats, rows: Floats) -> Floats:
    """[K] variances of means over these numbers of rows, with one variance of a row for all sites, from every site's
    own; NaN where a site has none.

    >>> row_variances(np.array([0.1, 0.0]), np.array([4.0, 16.0])).round(4).tolist()
    [0.02, 0.005]
    """
    known = np.isfinite(variance) & (rows > 0)
    if not known.any():
        return variance
    of_row = float((rows**2 * variance)[known].sum() / rows[known].sum())
    return np.where(known, of_row / np.maximum(rows, 1), np.nan)


@dataclass(frozen=True)
class Drift:
    """How much lower gains are than validation rows had promised, at all sites together."""

    value: float  # b, at most 0
    variance: float


def drift_of(test: Floats, test_variance: Floats, expected: Floats, variance: Floats) -> Drift:
    """Drift of the models that sites have chosen, each [K]; NaN where test rows say nothing. None is 0 for certain."""
    known = np.isfinite(test) & np.isfinite(test_variance)
    if not known.any():
        return Drift(0.0, 0.0)
    w = 1 / (test_variance + variance)[known]
    return Drift(min(0.0, float(w @ (test - expected)[known] / w.sum())), float(1 / w.sum()))


def with_test_rows(
    test: Floats, test_variance: Floats, expected: Floats, variance: Floats, drift: Drift
) -> tuple[Floats, Floats]:
    """Gains [K] to expect of the chosen models and their variances [K], from validation rows, drift and test rows."""
    prior, spread = expected + drift.value, variance + drift.variance
    known = np.isfinite(test) & np.isfinite(test_variance)
    own = np.where(known, spread / (spread + np.where(known, test_variance, 1.0)), 0.0)  # weight of the test rows
    return prior + own * (np.where(known, test, 0.0) - prior), (1 - own) * spread
