"""Newton's method on totals over sites: where it stands, and the step that a round's totals lead to.

Methods whose log likelihood is a sum over sites ask all of them about one point (β, λ) in a round: coefficients of
columns, that of the ones first, then deviations of random effects where a method has any. When a step would gain
nothing, nobody is asked any more, and the last point is the fit.

Where a coefficient of a standardized column runs away, the likelihood has no maximum: the columns separate those with
the event from those without. The fit then starts again with a normal prior of precision RIDGE on all but the intercept,
and says so. Where a deviation runs away, nearly every site has one class only, and effects of sites are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kinfed.algorithms.common.by_sums import Array, numpy_of, tensor_of
from kinfed.author import Tree
from kinfed.theory.sums import FLOOR, LARGEST, RIDGE, Ascent, Likelihood, at_zero, independent_columns

DONE = 1e-9  # gain in the log likelihood for which another round is not asked
HUGE = 1e300  # of what nothing is known yet: states are finite
START = 0.5  # λ before the first step
# What became of the fit.
NOTHING_YET, FITTED, SEPARATED, ONE_CLASS = range(4)


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

    @classmethod
    def of(cls, p: int, q: int, ridge: float) -> NewtonFit:
        """Before the first round."""
        point = tensor_of([*np.zeros(p), *np.full(q, START)])
        value, promise, prior = (torch.tensor(number, dtype=torch.float64) for number in (-HUGE, HUGE, ridge))
        return cls(
            point, point.clone(), value, promise, tensor_of(np.zeros((p, p))), tensor_of(np.ones(q)),
            torch.ones(p, dtype=torch.bool), tensor_of(np.zeros(2)), prior, torch.tensor(NOTHING_YET),
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
        before = Ascent(numpy_of(self.point), numpy_of(self.best), float(self.value) if same else -HUGE)
        after = before.after(Likelihood(total.value, gradient[None], curvature[None]), p, rms, ridge)
        verdict = verdict or FITTED
        runs_away = bool((np.abs(after.point[1:p]) > LARGEST).any()) and ridge == 0
        alone = bool((after.point[p:] * rms > LARGEST).any())
        if runs_away or alone:  # begin again, with a prior or without effects of sites
            verdict, ridge = (ONE_CLASS if alone else SEPARATED), max(ridge, RIDGE)
            start = np.concatenate([np.zeros(p), FLOOR / rms if alone else np.full(q, START)])
            after = Ascent(start, start, -HUGE)
        covariance = _covariance(curvature, basis, p, rms, after.point, ridge)
        mask = torch.from_numpy(np.isin(np.arange(p), basis))
        return replace(
            self, point=tensor_of(after.point), best=tensor_of(after.best), value=tensor_of(after.value),
            promise=tensor_of(min(after.promise, HUGE)), covariance=tensor_of(covariance), rms=tensor_of(rms),
            basis=mask, count=tensor_of([rows, sites]), ridge=tensor_of(ridge), verdict=torch.tensor(verdict),
        )  # fmt: skip

    def figures(self) -> dict[str, object]:
        """Numbers for the journal, as kinfed.serving.coefficients reads them."""
        lower = torch.tril_indices(len(self.covariance), len(self.covariance))
        return {
            "log_likelihood": float(self.value), "rows": float(self.count[0]), "sites": float(self.count[1]),
            "verdict": int(self.verdict), "ridge": float(self.ridge), "coefficients": tensor_of(self.fit[0]),
            "covariance": self.covariance[lower[0], lower[1]], "basis": self.basis.to(torch.int64),
        }  # fmt: skip


def _covariance(curvature: Array, basis: list[int], p: int, rms: Array, point: Array, ridge: float) -> Array:
    """[p, p] of β, from the inverse of the whole curvature but for variances at zero; 0 for columns left out."""
    free = [*basis, *(p + np.flatnonzero(~at_zero(point[p:], rms)))]
    prior = np.diag([ridge if 0 < j < p else 0.0 for j in free])
    square, covariance = curvature[np.ix_(free, free)] + prior, np.zeros((p, p))
    covariance[np.ix_(basis, basis)] = np.linalg.pinv(square, hermitian=True)[: len(basis), : len(basis)]
    return covariance
