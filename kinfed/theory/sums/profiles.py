"""Intervals of a linear mixed model by its profile likelihood, from sums: as R's confint(method = "profile").

    ζ²(v) = min dev(everything else | parameter = v) − min dev        interval: all v with ζ² ≤ χ²₁(level)

Bates, Mächler, Bolker, Walker, JSS 67 (2015), section 5.1. The criterion is that of maximum likelihood, also where the
fit is by REML, whose criteria do not compare between fixed effects. A Wald interval is the same thing where ζ is a
straight line: it nearly is for coefficients, and it is not for deviations, which end at 0 and have no Wald interval
here.

    a coefficient a'β     the fit with β held on the line a'β = v
    a deviation σ_j       σ² = v²/ψ_j, all ψ free; v = 0 is the model without the effect
    the noise σ           σ² = v², all ψ free:   dev = 2 Σ log|L_k| + ν log 2πσ² + rss/σ²
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, stats

from kinfed.theory.sums.mixed import Array, MixedFit, Sums, fit_diagonal

FARTHEST = 40  # doublings of a step on the way to the end of an interval

Ends = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """The likelihood of a model with independent random effects around its maximum."""

    sums: Sums
    best: MixedFit
    reach: float  # ζ² at the ends of intervals

    @classmethod
    def of(cls, sums: Array, z: tuple[int, ...], level: float = 0.95) -> Profile:
        """From the sums [K, p + 1, p + 1] of sites; columns z have random effects."""
        whole = Sums.of(sums, z, reml=False)
        return cls(whole, fit_diagonal(whole), float(stats.chi2.ppf(level, 1)))

    def coefficient(self, a: Array) -> Ends:
        """Ends of the interval of a'β."""
        estimate, psi = float(a @ self.best.beta), np.diag(self.best.psi)
        step = math.sqrt(self.reach * self.best.sigma2 * float(a @ self.best.inverse @ a))  # Wald's reach
        start = np.where(psi > 0, psi, 1e-6 * self._unit)

        def excess(value: float) -> float:
            return fit_diagonal(replace(self.sums, line=(a, value)), start).criterion - self.best.criterion

        return self._end(excess, estimate, -step), self._end(excess, estimate, step)

    def deviation(self, place: int) -> Ends:
        """Ends of the interval of the deviation σ_j between sites of the effect at this place in z."""
        others = [j for j in range(len(self.sums.z)) if j != place]
        estimate = math.sqrt(self.best.sigma2 * float(self.best.psi[place, place]))
        without = self._least(None, others) - self.best.criterion

        def excess(value: float) -> float:
            return self._least(value, others, place) - self.best.criterion if value > 0 else without

        smallest = math.sqrt(self.best.sigma2 * 1e-4 * float(self._unit[place]))
        high = self._end(excess, estimate, max(estimate / 4, smallest))
        if without <= self.reach:
            return 0.0, high
        low = optimize.brentq(lambda value: excess(value) - self.reach, 1e-3 * estimate, estimate, rtol=1e-7)
        return float(low), high

    def noise(self) -> Ends:
        """Ends of the interval of σ."""
        every, estimate = list(range(len(self.sums.z))), math.sqrt(self.best.sigma2)
        step = estimate * math.sqrt(self.reach / (2 * self.sums.freedom))

        def excess(value: float) -> float:
            return self._least(value, every) - self.best.criterion

        return self._end(excess, estimate, -step), self._end(excess, estimate, step)

    @property
    def _unit(self) -> Array:
        """[q] variances that add as much to a row as its noise does."""
        return np.array([self.sums.count / max(float(self.sums.total[j, j]), 1e-300) for j in self.sums.z])

    def _end(self, excess: Callable[[float], float], estimate: float, step: float) -> float:
        """The value at which the excess reaches the bound, from the estimate in the direction of the step."""
        near, far = estimate, estimate + step
        for _ in range(FARTHEST):
            if excess(far) >= self.reach:
                break
            near, far = far, far + step
            step *= 2
        else:
            return math.copysign(math.inf, step)
        return float(optimize.brentq(lambda value: excess(value) - self.reach, near, far, rtol=1e-8))

    def _least(self, value: float | None, free: list[int], place: int | None = None) -> float:
        """The smallest dev over the variances at the places `free`. With a `place`, its deviation is `value`; without,
        σ is, and other variances are 0. Without a value nothing is held."""
        unit, psi = self._unit, np.diag(self.best.psi)
        sums = self.sums
        if value is None:
            if not free:
                return sums.solve(np.zeros_like(self.best.psi)).criterion
            z = tuple(sums.z[j] for j in free)
            return fit_diagonal(Sums(sums.total, sums.rows[:, free], z, reml=False)).criterion
        held = value
        first = [psi[j] / unit[j] for j in free]
        bounds: list[tuple[float | None, float | None]] = [(0.0, None)] * len(free)
        if place is not None:  # by its logarithm: it is never 0
            first.append(math.log(max(held**2 / self.best.sigma2, 1e-12) / unit[place]))
            bounds.append((-60.0, 60.0))

        def dev(point: Array) -> tuple[float, Array]:
            own = np.zeros(len(psi))
            own[free] = np.maximum(point[: len(free)], 0) * unit[free]
            if place is not None:
                own[place] = math.exp(point[-1]) * unit[place]
            at = sums.solve(np.diag(own))
            rss, nu = at.sigma2 * sums.freedom, sums.freedom
            sigma2 = held**2 if place is None else held**2 / own[place]
            criterion = at.criterion - nu * (1 + math.log(at.sigma2)) + nu * math.log(sigma2) + rss / sigma2
            slope, _ = sums.derivatives(np.diag(own), replace(at, sigma2=sigma2), diagonal=True)
            if place is None:
                return criterion, slope[free] * unit[free]
            last = slope[place] * own[place] + rss / sigma2 - nu  # σ² moves with it
            return criterion, np.append(slope[free] * unit[free], last)

        limits = {"maxiter": 200, "ftol": 1e-13, "gtol": 1e-8}
        best = optimize.minimize(dev, np.array(first), jac=True, method="L-BFGS-B", bounds=bounds, options=limits)
        return float(best.fun)
