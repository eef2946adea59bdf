"""Newton's method on totals over sites: where it stands, and the step that a round's totals lead to.

Methods whose log likelihood is a sum over sites ask all of them about one point (β, λ) in a round: coefficients of
columns, that of the ones first, then deviations of random effects where a method has any. When a step would gain
nothing, no client is asked any more, and the last point is the fit.

Where a coefficient of a standardized column runs away, the likelihood has no maximum: the columns separate those with
the event from those without. The fit then starts again with a normal prior of precision RIDGE on all but the intercept,
and says so. Where a deviation runs away, nearly every site has one class only, and effects of sites are left out.

Coefficients γ ~ N(0, τ) that bend columns (kinfed.algorithms.common.bending) come behind the linear ones. Every round
takes the τ of the largest evidence, the integral over all coefficients with the log likelihood as the quadratic that
the totals describe. In the end curves stay if their evidence exceeds that of τ = 0 by more than 1, as Akaike's
criterion has it for one variance more; else the fit goes on without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import linalg, optimize
from torch import Tensor

from kinfed.algorithms.common.by_sums import Array, numpy_of, tensor_of
from kinfed.author import Tree
from kinfed.theory.sums import FLOOR, LARGEST, RIDGE, Ascent, Likelihood, at_zero, independent_columns

DONE = 1e-9  # gain in the log likelihood for which another round is not asked
HUGE = 1e300  # of what nothing is known yet: states are finite
START = 0.5  # λ before the first step
# What became of the fit.
NOTHING_YET, FITTED, SEPARATED, ONE_CLASS, UNFINISHED = range(5)
# What became of curves.
NO_CURVES, TRIED, TAKEN = range(3)
LOG_TAU = (np.log(1e-6), np.log(1e3))
STEADY = 1e-3  # change of log τ that is none: Newton's method has an end


@dataclass
class NewtonFit(Tree):
    point: Tensor  # [p + q] (β, λ) to ask about
    best: Tensor  # [p + q] the last point that was an improvement
    value: Tensor  # [] log likelihood there
    promise: Tensor  # [] what the step from there promises to gain
    covariance: Tensor  # [p, p] of β
    rms: Tensor  # [q] of the columns with random effects
    basis: Tensor  # [p] bool: columns that no others determine
    count: Tensor  # [2] rows and sites in the fit
    ridge: Tensor  # [] precision of a normal prior on β
    verdict: Tensor  # [] int64
    tau: Tensor  # [] variance of coefficients that bend columns
    curves: Tensor  # [] int64
    linear: Tensor  # [] int64: coefficients of β that bend no column

    @classmethod
    def of(cls, p: int, q: int, ridge: float, bends: int = 0) -> NewtonFit:
        """Before the first round; the last `bends` of p coefficients bend columns."""
        point = tensor_of([*np.zeros(p), *np.full(q, START)])
        value, promise, prior = (torch.tensor(number, dtype=torch.float64) for number in (-HUGE, HUGE, ridge))
        return cls(
            point, point.clone(), value, promise, tensor_of(np.zeros((p, p))), tensor_of(np.ones(q)),
            torch.ones(p, dtype=torch.bool), tensor_of(np.zeros(2)), prior, torch.tensor(NOTHING_YET),
            torch.ones((), dtype=torch.float64), torch.tensor(TRIED if bends else NO_CURVES), torch.tensor(p - bends),
        )  # fmt: skip

    @property
    def is_done(self) -> bool:
        return float(self.promise) < DONE

    @property
    def fit(self) -> tuple[Array, Array]:
        """(β [p], λ [q]): a step further than the best point where that promised nothing more, as Newton's method has
        twice as many digits there."""
        point, p = numpy_of(self.point if self.is_done else self.best).copy(), len(self.covariance)
        return point[:p], point[p:]

    @property
    def between(self) -> Array:
        """[q] variances of random effects; 0 where they are as low as they go."""
        _, lam = self.fit
        return np.where(at_zero(lam, numpy_of(self.rms)), 0.0, lam**2)

    def after(self, total: Likelihood, squares: Array, rows: float, sites: float) -> NewtonFit:
        """Step from the totals of a round at `point`, over these numbers of rows and sites; `squares` [q] are those of
        the columns with random effects."""
        if not rows > 0:
            return self  # noise has spoilt it
        p, q = len(self.covariance), len(self.rms)
        gradient, curvature = total.gradient[0].copy(), total.curvature[0].copy()
        rms, ridge, verdict = np.sqrt(np.maximum(squares, 1e-12) / rows), float(self.ridge), int(self.verdict)
        same = verdict != NOTHING_YET and float(self.count[0]) == rows  # or other sites answered: values do not compare
        basis = np.flatnonzero(numpy_of(self.basis)).tolist() if same else independent_columns(curvature[:p, :p])
        left_out = np.setdiff1d(np.arange(p), basis)  # they stay at 0
        gradient[left_out], curvature[left_out], curvature[:, left_out] = 0.0, 0.0, 0.0
        curvature[left_out, left_out] = 1.0
        if verdict == ONE_CLASS:
            gradient[p:] = -1.0  # held at zero
        linear, tau, curves = int(self.linear), float(self.tau), int(self.curves)
        gain, old = 0.0, _precision(p, q, linear, ridge, tau)
        if curves == TRIED:
            point = numpy_of(self.point)[:p]
            best_tau, gain = _evidence(point, gradient[:p], curvature[:p, :p], basis, linear, ridge)
            tau = best_tau if abs(np.log(best_tau / tau)) > STEADY else tau
        prior = _precision(p, q, linear, ridge, tau)
        best = numpy_of(self.best)
        value = float(self.value) + 0.5 * float((old - prior) @ best**2) if same else -HUGE
        before = Ascent(numpy_of(self.point), best, value)
        after = before.after(Likelihood(total.value, gradient[None], curvature[None]), p, rms, prior)
        verdict = verdict or FITTED
        runs_away = bool((np.abs(after.point[1:linear]) > LARGEST).any()) and ridge == 0
        alone = bool((after.point[p:] * rms > LARGEST).any())
        if runs_away or alone:  # begin again, with a prior or without effects of sites
            verdict, ridge = (ONE_CLASS if alone else SEPARATED), max(ridge, RIDGE)
            start = np.concatenate([np.zeros(p), FLOOR / rms if alone else np.full(q, START)])
            after = Ascent(start, start, -HUGE)
        elif curves == TRIED and after.promise < DONE:
            curves = TAKEN if gain > 1 else NO_CURVES
            if curves == NO_CURVES:  # go on without
                basis = [j for j in basis if j < linear]
                start = after.point.copy()
                start[linear:p] = 0.0
                after = Ascent(start, start, -HUGE)
        prior = _precision(p, q, linear, ridge, tau)
        covariance = _covariance(curvature, basis, p, rms, after.point, prior)
        mask = torch.from_numpy(np.isin(np.arange(p), basis))
        return replace(
            self, point=tensor_of(after.point), best=tensor_of(after.best), value=tensor_of(after.value),
            promise=tensor_of(min(after.promise, HUGE)), covariance=tensor_of(covariance), rms=tensor_of(rms),
            basis=mask, count=tensor_of([rows, sites]), ridge=tensor_of(ridge), verdict=torch.tensor(verdict),
            tau=tensor_of(tau), curves=torch.tensor(curves),
        )  # fmt: skip

    def figures(self) -> dict[str, object]:
        """Numbers for the journal, as kinfed.serving.coefficients reads them."""
        linear, verdict = int(self.linear), int(self.verdict)
        verdict = UNFINISHED if verdict == FITTED and not self.is_done else verdict
        lower = torch.tril_indices(linear, linear)
        return {
            "log_likelihood": float(self.value), "rows": float(self.count[0]), "sites": float(self.count[1]),
            "verdict": verdict, "ridge": float(self.ridge), "coefficients": tensor_of(self.fit[0][:linear]),
            "covariance": self.covariance[lower[0], lower[1]], "basis": self.basis[:linear].to(torch.int64),
        }  # fmt: skip


def _precision(p: int, q: int, linear: int, ridge: float, tau: float) -> Array:
    """[p + q] of the normal priors: none on the intercept and on deviations, `ridge` on linear coefficients."""
    return np.concatenate([[0.0], np.full(linear - 1, ridge), np.full(p - linear, 1 / tau), np.zeros(q)])


def _evidence(
    point: Array, gradient: Array, curvature: Array, basis: list[int], linear: int, ridge: float
) -> tuple[float, float]:
    """(τ, its evidence beyond that of τ = 0), from the quadratic around point [p] with this gradient and curvature:

    log ∫ exp(g'd − d'Hd/2) N(γ + d_γ; 0, τ) dd = ½ r'H_τ⁻¹r − ½ γ'γ/τ − ½ log|H_τ| − ½ m log τ,
    H_τ = H + D/τ,  r = g − Dγ/τ
    """
    bends = np.array(basis) >= linear
    gamma, m = np.where(bends, point[basis], 0.0), int(bends.sum())
    if not m:
        return 1.0, 0.0
    prior = np.where(bends | (np.array(basis) == 0), 0.0, ridge)
    h, g = curvature[np.ix_(basis, basis)] + np.diag(prior), gradient[basis] - prior * point[basis]

    def evidence(log_tau: float) -> float:
        precision = bends * np.exp(-log_tau)
        factor = linalg.cho_factor(h + np.diag(precision + 1e-9 * np.diag(h)), lower=True)
        r = g - precision * gamma
        log_det = 2 * float(np.log(np.diag(factor[0])).sum())
        return float(r @ linalg.cho_solve(factor, r) - precision @ gamma**2 - log_det - m * log_tau) / 2

    best = optimize.minimize_scalar(
        lambda log_tau: -evidence(log_tau), bounds=LOG_TAU, method="bounded", options={"xatol": 1e-5}
    )
    return float(np.exp(best.x)), evidence(float(best.x)) - evidence(LOG_TAU[0] - 5)


def _covariance(curvature: Array, basis: list[int], p: int, rms: Array, point: Array, prior: Array) -> Array:
    """[p, p] of β, from the inverse of the whole curvature but for variances at zero; 0 for columns left out."""
    free = [*basis, *(p + np.flatnonzero(~at_zero(point[p:], rms)))]
    square, covariance = curvature[np.ix_(free, free)] + np.diag(prior[free]), np.zeros((p, p))
    covariance[np.ix_(basis, basis)] = np.linalg.pinv(square, hermitian=True)[: len(basis), : len(basis)]
    return covariance
