"""Linear mixed models from sums: what a site must send for all sites to be fitted exactly is one small matrix.

    y_k = X_k β + Z_k b_k + e,   b_k ~ N(0, σ² Ψ),   e ~ N(0, σ² I),   Z = the columns `z` of X
    S_k = [X_k y_k]'[X_k y_k]                        all that is needed of site k

Bates, Mächler, Bolker, Walker: Fitting Linear Mixed-Effects Models Using lme4, JSS 67 (2015), whose profiled criterion
this is, written in sums. With Ψ = ΛΛ' and S_z the rows `z` of S_k:

    A_k = I + Λ' S_z[:, z] Λ = L L'      C_k = L⁻¹ Λ' S_z         M = Σ S_k − C_k'C_k = Σ [X y]'V⁻¹[X y]
    β = M_xx⁻¹ M_xy     rss = M_yy − β'M_xy     σ² = rss/ν,  ν = N − p (REML) or N
    dev = 2 Σ log|L_k| + log|M_xx| (REML) + ν (1 + log 2πσ²)
    U_k = Z'V⁻¹[X y]    K_k = U_k[:, z]    u_k = U_k,y − U_k,x β
    ∂dev/∂Ψ = G = Σ K_k − Σ u_k u_k'/σ² − Σ U_k,x M_xx⁻¹ U_k,x' (REML)

Variances, never their roots, are what the solver steps in: at √ψ = 0 the gradient of the root vanishes by symmetry, and
a solver that touches 0 stays there. Limits: Ψ = 0 is least squares on all rows; Ψ = ∞ every site alone; an intercept
with known variances is `TwoLevel(posterior="exact")`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, optimize

from kinfed.errors import DataError

Array = NDArray[np.float64]

BLOCK = 4_000_000  # numbers of sites' terms that are worked on at once
LOG_TAU = (math.log(1e-8), math.log(1e3))  # bounds for coefficients with a prior, in units of σ²
TOLERANCE = 1e-11  # of g'd, what a step promises to gain in the criterion
MOST_STEPS = 200
ALIASED = 1e-9  # share of a column's sum of squares that the columns before it leave unexplained


@dataclass(frozen=True)
class Solution:
    """β, σ² and the criterion for a given Ψ."""

    beta: Array  # [p]
    sigma2: float
    inverse: Array  # [p, p] M_xx⁻¹, so that Cov β = σ² M_xx⁻¹
    criterion: float  # dev


@dataclass(frozen=True)
class MixedFit(Solution):
    psi: Array  # [q, q] Ψ, in units of σ²
    z: tuple[int, ...]  # columns with a random effect
    freedom: float  # ν
    sites: int

    @property
    def covariance(self) -> Array:
        """[p, p] of β."""
        return self.sigma2 * self.inverse

    @property
    def between(self) -> Array:
        """[q, q] D = σ²Ψ: how sites differ."""
        return self.sigma2 * self.psi

    @property
    def restricted_aic(self) -> float:
        """The criterion plus two for every variance that is not zero: to choose among random effects of one X."""
        return self.criterion + 2 * int((np.diag(self.psi) > 0).sum())


@dataclass(frozen=True)
class SiteTerms:
    """What sites add to the criterion and its derivatives at some Ψ; row by row, or added up in a row of one."""

    moments: Array  # [n, p + 1, p + 1] [X y]'V⁻¹[X y]
    log_det: Array  # [n] log|A_k|
    scores: Array  # [n, q] squares of u, at the β that was sent
    traces: Array  # [n, q] diagonal of K
    leverage: Array  # [n, q] diagonal of U_x M_xx⁻¹ U_x', with the M that was sent
    curvature: Array  # [n, q, q] squares of the entries of K


def root_of(psi: Array) -> Array:
    """Λ [q, q] with Ψ = ΛΛ'; a singular Ψ is no trouble."""
    if not np.any(psi - np.diag(np.diag(psi))):
        return np.diag(np.sqrt(np.diag(psi)))
    values, vectors = linalg.eigh(psi)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0)))


def _factors(rows: Array, z: Sequence[int], root: Array) -> tuple[Array, Array, Array]:
    """(C [n, q, p + 1], U [n, q, p + 1], log|A| [n]) of the rows z of sites' sums [n, q, p + 1]."""
    zz = rows[:, :, list(z)]
    if len(z) == 1:  # without a factorization: a hundred thousand sites are one division
        lam = root[0, 0]
        a = 1 + lam * lam * zz
        return lam / np.sqrt(a) * rows, rows / a, np.log(a[:, 0, 0])
    lower = np.linalg.cholesky(np.eye(len(z)) + root.T @ zz @ root)
    c = np.linalg.solve(lower, root.T @ rows)
    inner = np.linalg.solve(lower, root.T @ zz)  # L⁻¹Λ'S_zz
    log_det = 2 * np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(1)
    return c, rows - np.swapaxes(inner, 1, 2) @ c, log_det


def site_terms(sums: Array, z: Sequence[int], psi: Array, beta: Array, inverse: Array) -> SiteTerms:
    """Terms of every site, from its sums [n, p + 1, p + 1], for a server that gets nothing but their total."""
    c, u, log_det = _factors(sums[:, list(z)], z, root_of(psi))
    k, ux = u[:, :, list(z)], u[:, :, :-1]
    return SiteTerms(
        sums - np.swapaxes(c, 1, 2) @ c, log_det, (u[:, :, -1] - ux @ beta) ** 2, np.einsum("nqq->nq", k),
        np.einsum("nqp,pr,nqr->nq", ux, inverse, ux), k * k,
    )  # fmt: skip


def solve_fixed(moments: Array, log_det: float, freedom: float, *, reml: bool = True) -> Solution:
    """β, σ² and the criterion, from the total of [X y]'V⁻¹[X y]."""
    xx, xy, yy = moments[:-1, :-1], moments[:-1, -1], moments[-1, -1]
    scale = 1 / np.sqrt(np.diag(xx))  # a correlation matrix is easier to invert
    factor = linalg.cho_factor(xx * np.outer(scale, scale), lower=True)
    inverse = np.outer(scale, scale) * linalg.cho_solve(factor, np.eye(len(xx)))
    beta = scale * linalg.cho_solve(factor, scale * xy)
    rss = float(yy - beta @ xy)
    if not rss > 1e-12 * max(float(yy), 1e-300):
        raise DataError(
            "the residual variance is zero: the target is constant, or a linear function of the columns; there is "
            "nothing to estimate"
        )
    sigma2 = rss / freedom
    log_det_xx = 2 * float(np.log(np.diag(factor[0])).sum() - np.log(scale).sum())
    criterion = log_det + (log_det_xx if reml else 0.0) + freedom * (1 + np.log(2 * np.pi * sigma2))
    return Solution(beta, sigma2, inverse, float(criterion))


def scoring_step(psi: Array, gradient: Array, information: Array) -> tuple[Array, float]:
    """One step of projected Fisher scoring on variances psi [q] ≥ 0, and what it promises to gain, g'd. Variances at 0
    that the gradient would lower stay there."""
    free = (psi > 0) | (gradient < 0)
    step = np.zeros_like(psi)
    while free.any():
        block = information[np.ix_(free, free)]
        unit = 1 / np.sqrt(np.maximum(np.diag(block), 1e-300))  # variances have the units of their columns
        scaled = block * np.outer(unit, unit) + 1e-12 * np.eye(len(block))
        step[:] = 0
        step[free] = -unit * linalg.solve(scaled, unit * gradient[free], assume_a="sym")
        stuck = free & (psi == 0) & (step < 0)  # at the bound, and the others' steps would pull it below
        if not stuck.any():
            break
        free &= ~stuck
    return step, float(-(gradient @ np.maximum(step, -psi)))


@dataclass(frozen=True)
class Sums:
    """Sums of all sites, as the criterion needs them: the total, and the rows of columns with random effects."""

    total: Array  # [p + 1, p + 1]
    rows: Array  # [K, q, p + 1]
    z: tuple[int, ...]
    reml: bool = True
    held: int = 0  # last columns of X, whose coefficients have a normal prior: they are no fixed effects
    line: tuple[Array, float] | None = None  # (a [p], b): β is held where a'β = b, by maximum likelihood

    @classmethod
    def of(cls, sums: Array, z: Sequence[int] = (0,), *, reml: bool = True) -> Sums:
        """From the sums [K, p + 1, p + 1] of [X y], of which the first column is one everywhere."""
        return cls(sums.sum(0), np.ascontiguousarray(sums[:, list(z)]), tuple(z), reml)

    @property
    def count(self) -> float:
        """N"""
        return float(self.total[0, 0])

    @property
    def freedom(self) -> float:
        """ν"""
        return self.count - (len(self.total) - 1 - self.held if self.reml else 0)

    def _blocks(self) -> Iterator[Array]:
        size = max(1, BLOCK // self.rows[0].size)
        for start in range(0, len(self.rows), size):
            yield self.rows[start : start + size]

    def solve(self, psi: Array) -> Solution:
        root, width = root_of(psi), len(self.total)
        moments, log_det = self.total.copy(), 0.0
        for rows in self._blocks():
            c, _, logs = _factors(rows, self.z, root)
            flat = c.reshape(-1, width)
            moments -= flat.T @ flat
            log_det += float(logs.sum())
        at = solve_fixed(moments, log_det, self.freedom, reml=self.reml)
        return at if self.line is None else _on_line(at, *self.line, self.freedom)

    def derivatives(self, psi: Array, at: Solution, *, diagonal: bool) -> tuple[Array, Array]:
        """(G, information) of the criterion: of the variances alone, [q] and [q, q], or of the whole Ψ, [q, q] and
        [q², q²]."""
        root, q = root_of(psi), len(self.z)
        lower = linalg.cholesky(at.inverse, lower=True)
        traces, gradient = np.zeros((q, q)), np.zeros((q, q))
        information = np.zeros((q, q) if diagonal else (q * q, q * q))
        for rows in self._blocks():
            _, u, _ = _factors(rows, self.z, root)
            k, ux = u[:, :, list(self.z)], u[:, :, :-1]
            score, spread = u[:, :, -1] - ux @ at.beta, ux @ lower
            traces += k.sum(0)
            gradient += k.sum(0) - score.T @ score / at.sigma2
            if self.reml:
                gradient -= np.einsum("nqp,nrp->qr", spread, spread, optimize=True)
            if diagonal:
                information += (k * k).sum(0)
            else:
                information += np.einsum("nac,nbd->abcd", k, k, optimize=True).reshape(q * q, q * q)
        t = np.diag(traces) if diagonal else traces.reshape(-1)
        information -= np.outer(t, t) / self.freedom
        return (np.diag(gradient).copy() if diagonal else gradient), information


def _on_line(at: Solution, a: Array, b: float, freedom: float) -> Solution:
    """The likeliest β with a'β = b: rss grows by (a'β̂ − b)² / a'M⁻¹a."""
    inner = at.inverse @ a
    short = (float(a @ at.beta) - b) / float(a @ inner)
    sigma2 = at.sigma2 + short * (float(a @ at.beta) - b) / freedom
    criterion = at.criterion + freedom * math.log(sigma2 / at.sigma2)
    return Solution(at.beta - inner * short, sigma2, at.inverse, criterion)


def fit_diagonal(sums: Sums, start: Array | None = None) -> MixedFit:
    """Independent random effects: projected Fisher scoring on their variances."""
    q = len(sums.z)
    mean_zz = np.maximum(np.array([sums.total[j, j] for j in sums.z]) / sums.count, 1e-300)
    psi = 0.1 / (q * mean_zz) if start is None else np.array(start, dtype=np.float64)
    at = sums.solve(np.diag(psi))
    for _ in range(MOST_STEPS):
        gradient, information = sums.derivatives(np.diag(psi), at, diagonal=True)
        step, promise = scoring_step(psi, gradient, information)
        if promise < TOLERANCE:
            break
        size, noise = 1.0, 4e-16 * abs(at.criterion)
        while size > 1e-6:
            new = np.maximum(psi + size * step, 0.0)
            there = sums.solve(np.diag(new))
            if there.criterion <= at.criterion + noise:
                break
            size /= 2
        else:
            break
        psi, at = new, there
    # What is zero up to rounding is reported as zero, where that costs nothing.
    tiny = (psi > 0) & (psi * mean_zz < 1e-8)
    if tiny.any():
        rounded = sums.solve(np.diag(np.where(tiny, 0.0, psi)))
        if rounded.criterion <= at.criterion + 1e-7:
            psi, at = np.where(tiny, 0.0, psi), rounded
    return _fitted(sums, np.diag(psi), at)


def fit_held(sums: Sums, start: Array) -> tuple[MixedFit, float]:
    """Coefficients γ ~ N(0, σ²τ) of the last `held` columns, beside independent random effects with variances near
    `start` [q]; and τ. The criterion compares with that of a fit without these columns, of the same fixed effects:

        dev = 2 Σ log|L_k| + log|M_xx + D/τ| + m log τ + ν (1 + log 2πσ²),   D = diag(0, ..., 0, 1, ..., 1), m ones
    """
    m, psi = sums.held, start
    place = np.arange(len(sums.total) - 1 - m, len(sums.total) - 1)

    def fit(log_tau: float) -> MixedFit:
        nonlocal psi
        total = sums.total.copy()
        total[place, place] += math.exp(-log_tau)
        one = fit_diagonal(replace(sums, total=total), psi)
        psi = np.maximum(np.diag(one.psi), 1e-6 * start)  # a start for the next τ
        return replace(one, criterion=one.criterion + m * log_tau)

    best = optimize.minimize_scalar(
        lambda log_tau: fit(log_tau).criterion, bounds=LOG_TAU, method="bounded", options={"xatol": 1e-3}
    )
    return fit(float(best.x)), math.exp(float(best.x))


def fit_full(sums: Sums) -> MixedFit:
    """Correlated random effects, of at most about eight columns: L-BFGS on Λ from the diagonal solution, then Fisher
    scoring on Ψ. Where Ψ ends up singular although the gradient points inside, it is pushed off that false boundary."""
    q = len(sums.z)
    scale = np.sqrt(np.array([sums.total[j, j] for j in sums.z]) / sums.count)  # rms of Z
    lower = np.tril_indices(q)
    psi = fit_diagonal(sums).psi

    def matrix(vector: Array) -> Array:
        root = np.zeros((q, q))
        root[lower] = vector
        return root / scale[:, None]

    def value(vector: Array) -> tuple[float, Array]:
        root = matrix(vector)
        at = sums.solve(root @ root.T)
        g, _ = sums.derivatives(root @ root.T, at, diagonal=False)
        return at.criterion, (2 * g @ root / scale[:, None])[lower]

    for _ in range(4 * q):
        outer = psi * np.outer(scale, scale)
        start = linalg.cholesky(outer + 1e-10 * np.eye(q), lower=True)
        options = {"maxiter": 500, "ftol": 0.0, "gtol": 1e-7, "maxls": 40}
        best = optimize.minimize(value, start[lower], jac=True, method="L-BFGS-B", options=options)
        psi = matrix(best.x) @ matrix(best.x).T
        at = sums.solve(psi)
        psi, at = _scored(sums, psi, at)
        g, information = sums.derivatives(psi, at, diagonal=False)
        values, vectors = linalg.eigh(psi * np.outer(scale, scale))
        null = vectors[:, values < 1e-7 * max(values.max(), 1e-12)] / scale[:, None]
        if not null.shape[1]:
            break
        inside, directions = linalg.eigh(null.T @ g @ null)
        if inside[0] > -1e-6:
            break
        v = null @ directions[:, 0]
        flat = np.outer(v, v).reshape(-1)
        psi = psi - inside[0] * np.outer(v, v) / max(float(flat @ information @ flat), 1e-300)
    return _fitted(sums, psi, at)


def _scored(sums: Sums, psi: Array, at: Solution) -> tuple[Array, Solution]:
    """Ψ after Fisher scoring on all its entries, as long as that lowers the criterion and Ψ stays positive definite."""
    q = len(psi)
    symmetric = np.zeros((q * q, q * (q + 1) // 2))  # duplication matrix: entries of the lower triangle -> Ψ
    for column, (i, j) in enumerate(zip(*np.tril_indices(q), strict=True)):
        symmetric[[i * q + j, j * q + i], column] = 1
    for _ in range(30):
        g, information = sums.derivatives(psi, at, diagonal=False)
        h, slope = symmetric.T @ information @ symmetric, symmetric.T @ g.reshape(-1)
        step = -linalg.lstsq(h, slope)[0]
        new = psi + (symmetric @ step).reshape(q, q)
        if linalg.eigvalsh(new)[0] <= 0:
            return psi, at
        there = sums.solve(new)
        if there.criterion > at.criterion + 4e-16 * abs(at.criterion):
            return psi, at
        psi, at = new, there
        if abs(slope @ step) < TOLERANCE:
            break
    return psi, at


def _fitted(sums: Sums, psi: Array, at: Solution) -> MixedFit:
    return MixedFit(at.beta, at.sigma2, at.inverse, at.criterion, psi, sums.z, sums.freedom, len(sums.rows))


def site_effects(sums: Array, z: Sequence[int], beta: Array, psi: Array, sigma2: float) -> tuple[Array, Array]:
    """(b [n, q], its variance given β [n, q, q]) of sites, from their sums [n, p + 1, p + 1]: b_k = post Z'(y − Xβ)/σ²,
    post_k = σ² Λ A_k⁻¹ Λ'."""
    rows, root = sums[:, list(z)], root_of(psi)
    residual = rows[:, :, -1] - rows[:, :, :-1] @ beta
    inner = np.linalg.solve(
        np.eye(len(z)) + root.T @ rows[:, :, list(z)] @ root, np.broadcast_to(root.T, (len(rows), *root.T.shape))
    )
    posterior = root @ inner
    return (posterior @ residual[:, :, None])[:, :, 0], sigma2 * posterior


def row_variance(sums: Array, z: Sequence[int], psi: Array, sigma2: float, covariance: Array) -> Array:
    """[n, p, p]: variance of a site's coefficients c = β + b around their estimate, that of β included:
    T Cov(β) T' + post on z, with T = I − E_z Ψ-weighted regression of b on β (b̂ moves against β̂)."""
    rows, p = sums[:, list(z)], len(covariance)
    _, conditional = site_effects(sums, z, np.zeros(p), psi, sigma2)
    gain = np.broadcast_to(np.eye(p), (len(rows), p, p)).copy()
    gain[:, list(z)] -= conditional @ rows[:, :, :-1] / sigma2
    variance = gain @ covariance @ np.swapaxes(gain, 1, 2)
    variance[np.ix_(range(len(rows)), list(z), list(z))] += conditional
    return variance


def independent_columns(total: Array, tolerance: float = ALIASED) -> list[int]:
    """Columns of X that are no linear function of columns before them, from X'X [p, p]: as R drops them, from left to
    right."""
    scale = np.sqrt(np.maximum(np.diag(total), 0))
    basis: list[int] = []
    factor = np.zeros((0, 0))
    for j in range(len(total)):
        if not scale[j] > 0:
            continue
        cross = total[basis, j] / (scale[basis] * scale[j])
        part = linalg.solve_triangular(factor, cross, lower=True) if basis else np.zeros(0)
        rest = 1 - float(part @ part)
        if rest < tolerance:
            continue
        factor = np.block([[factor, np.zeros((len(basis), 1))], [part[None], np.array([[np.sqrt(rest)]])]])
        basis.append(j)
    return basis


def check_sums(sums: Array) -> None:
    """Refuse sums [K, p + 1, p + 1] that no mixed model can be fitted to."""
    sites, count, columns = len(sums), float(sums[:, 0, 0].sum()), sums.shape[1] - 1
    if sites < 2:
        raise DataError("a mixed model compares sites, and there is one; fit it with two sites or more")
    if count <= columns:
        raise DataError(
            f"{count:.0f} training rows for {columns} columns leave nothing to estimate a variance from; give more "
            "rows or fewer columns"
        )
