"""Generalized linear mixed models from sums: a site integrates over its own effects, the server takes Newton steps.

    y_i ~ f(η_i),   η = X β + Z Λ u,   u ~ N(0, I),   Λ = diag(λ),   Z = the columns `z` of X

A site answers (β, λ) with value, gradient and curvature of its log likelihood L_k, in which u is integrated out; the
server needs nothing but their totals. One random effect: adaptive Gauss-Hermite quadrature around the mode û (Pinheiro
and Bates, JCGS 1995), gradient by Fisher's identity and curvature by Louis's over the nodes. Several: Laplace:

    L_k = Σ log f(η) − u'u/2 − ½ log|A|,   A = I + ΛZ'WZΛ,   all at the mode û
    h_i = z_i'ΛA⁻¹Λz_i    t = ½ w' h    c = A⁻¹ΛZ't
    ∂β  = X'(y − μ − t + W ZΛc)
    ∂λ_j = u_j Z_j'(y − μ) − (A⁻¹ΛK)_jj − [Z_j't u_j + c_j Z_j'(y − μ) − u_j Σ_i c_i λ_i K_ij],   K = Z'WZ

Penalized quasi-likelihood is not here on purpose: with sites of four rows it halves variances. Limits: λ = 0 is a
generalized linear model of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, special

from kinfed.theory.sums.mixed import Array

MODE_STEPS = 60  # Newton steps to a site's mode; they nearly always take less than ten
FLOOR = 1e-3  # λ · rms(z) at least: a λ that were 0 would stay there, for the gradient in λ vanishes by symmetry
LARGEST = 15.0  # coefficients beyond it on standardized columns: the classes are separated, and β runs away
RIDGE = 0.5  # precision of a normal prior that holds them then


@dataclass(frozen=True)
class Family:
    """log f(y | η) with its canonical link."""

    log_density: Callable[[Array, Array], Array]  # of y and η
    mean: Callable[[Array], Array]  # μ(η)
    weight: Callable[[Array], Array]  # w = dμ/dη, of μ
    slope: Callable[[Array], Array]  # w' = dw/dη, of μ


FAMILIES = {
    "binary": Family(
        lambda y, eta: y * eta - np.logaddexp(0, eta), special.expit, lambda mu: mu * (1 - mu),
        lambda mu: mu * (1 - mu) * (1 - 2 * mu),
    ),
    "count": Family(
        lambda y, eta: y * eta - np.exp(eta) - special.gammaln(y + 1), np.exp, lambda mu: mu, lambda mu: mu
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SiteRows:
    """Rows of some sites, one site after the other."""

    x: Array  # [N, p]
    y: Array  # [N]
    start: NDArray[np.int64]  # [n] where each site's rows begin; every site has some

    @classmethod
    def of(cls, x: Array, y: Array, count: Sequence[int] | NDArray[np.int64]) -> SiteRows:
        size = np.asarray(count, dtype=np.int64)
        return cls(x, y, np.cumsum(size) - size)

    @property
    def owner(self) -> NDArray[np.int64]:
        sizes = np.diff([*self.start, len(self.y)])
        return np.repeat(np.arange(len(self.start)), sizes)

    def total(self, values: Array) -> Array:
        """[n, ...]: sums over each site's rows, of values [N, ...]."""
        return np.add.reduceat(values, self.start, axis=0)

    def moments(self, weight: Array) -> Array:
        """[n, p, p] X'WX of every site."""
        parts = np.split(np.arange(len(self.y)), self.start[1:])
        return np.stack([self.x[rows].T @ (weight[rows, None] * self.x[rows]) for rows in parts])


@dataclass(frozen=True)
class Likelihood:
    """Log likelihoods of sites with their derivatives in (β, λ), or their totals in a row of one."""

    value: Array  # [n]
    gradient: Array  # [n, p + q]
    curvature: Array  # [n, p + q, p + q] minus second derivatives


def modes(rows: SiteRows, z: Sequence[int], beta: Array, lam: Array, family: Family) -> tuple[Array, Array]:
    """(û [n, q], A [n, q, q]): modes of the sites' effects by Newton with halving, and the curvature there."""
    zl, base, owner, q = rows.x[:, list(z)] * lam, rows.x @ beta, rows.owner, len(z)
    u = np.zeros((len(rows.start), q))

    def height(u: Array) -> Array:
        eta = base + (zl * u[owner]).sum(1)
        return np.asarray(rows.total(family.log_density(rows.y, eta)) - 0.5 * (u * u).sum(1))

    def curvature(u: Array) -> tuple[Array, Array]:
        mu = family.mean(base + (zl * u[owner]).sum(1))
        a = np.eye(q) + rows.total(family.weight(mu)[:, None, None] * zl[:, :, None] * zl[:, None, :])
        return a, rows.total((rows.y - mu)[:, None] * zl) - u

    best = height(u)
    for _ in range(MODE_STEPS):
        a, slope = curvature(u)
        step = np.linalg.solve(a, slope[:, :, None])[:, :, 0]
        if float(np.abs((slope * step).sum(1)).max()) < 1e-22:
            break
        size = np.ones((len(u), 1))
        for _ in range(30):
            new = height(u + size * step)
            worse = ~(new >= best - 1e-12 * np.abs(best))
            if not worse.any():
                break
            size[worse] /= 2
        u, best = u + size * step, np.maximum(new, best)
    return u, curvature(u)[0]


def log_likelihood(
    rows: SiteRows, z: Sequence[int], beta: Array, lam: Array, family: Family, nodes: int = 15
) -> Likelihood:
    """Value, gradient and curvature of every site; `nodes` of the quadrature, with one random effect (1 is
    Laplace)."""
    if len(z) == 1 and nodes > 1:
        return _quadrature(rows, z[0], beta, float(lam[0]), family, nodes)
    value, gradient = _laplace(rows, z, beta, lam, family)
    p, q = len(beta), len(z)
    curvature = np.zeros((len(value), p + q, p + q))
    u, a = modes(rows, z, beta, lam, family)
    zl, owner = rows.x[:, list(z)] * lam, rows.owner
    w = family.weight(family.mean(rows.x @ beta + (zl * u[owner]).sum(1)))
    cross = rows.total(w[:, None, None] * zl[:, :, None] * rows.x[:, None, :])  # ΛZ'WX
    curvature[:, :p, :p] = rows.moments(w) - np.swapaxes(cross, 1, 2) @ np.linalg.solve(a, cross)
    for j in range(q):  # rows of λ: by central differences of the site's own gradient
        step = np.zeros(q)
        step[j] = 1e-4 * max(float(lam[j]), 1e-3)
        above, below = (_laplace(rows, z, beta, lam + sign * step, family)[1] for sign in (1, -1))
        column = (below - above) / (2 * step[j])
        curvature[:, p + j] = curvature[:, :, p + j] = column
    return Likelihood(value, gradient, (curvature + np.swapaxes(curvature, 1, 2)) / 2)


def _laplace(rows: SiteRows, z: Sequence[int], beta: Array, lam: Array, family: Family) -> tuple[Array, Array]:
    """(L [n], its gradient in (β, λ) [n, p + q])."""
    u, a = modes(rows, z, beta, lam, family)
    plain, owner = rows.x[:, list(z)], rows.owner
    zl = plain * lam
    eta = rows.x @ beta + (zl * u[owner]).sum(1)
    mu = family.mean(eta)
    w, residual = family.weight(mu), rows.y - mu
    _, log_det = np.linalg.slogdet(a)
    value = rows.total(family.log_density(rows.y, eta)) - 0.5 * (u * u).sum(1) - 0.5 * log_det
    inverse = np.linalg.inv(a)
    h = np.einsum("ij,ijk,ik->i", zl, inverse[owner], zl)
    t = 0.5 * family.slope(mu) * h
    c = np.einsum("njk,nk->nj", inverse, rows.total(t[:, None] * zl))
    d_beta = rows.total(rows.x * (residual - t + w * (zl * c[owner]).sum(1))[:, None])
    k = rows.total(w[:, None, None] * plain[:, :, None] * plain[:, None, :])
    score, zt = rows.total(residual[:, None] * plain), rows.total(t[:, None] * plain)
    spread = np.einsum("njk,k,nkj->nj", inverse, lam, k)  # (A⁻¹ΛK)_jj
    mixed = u * np.einsum("ni,i,nij->nj", c, lam, k)
    d_lam = u * score - spread - (zt * u + c * score - mixed)
    return value, np.concatenate([d_beta, d_lam], 1)


def _quadrature(rows: SiteRows, z: int, beta: Array, lam: float, family: Family, nodes: int) -> Likelihood:
    point, weight = np.polynomial.hermite.hermgauss(nodes)
    u, a = modes(rows, (z,), beta, np.array([lam]), family)
    width = np.sqrt(2 / a[:, :, 0])  # [n, 1] √2 times the deviation of the normal approximation
    node = u + width * point  # [n, Q]
    owner, column, sites = rows.owner, rows.x[:, z], len(u)
    eta = (rows.x @ beta)[:, None] + lam * column[:, None] * node[owner]  # [N, Q]
    mu = family.mean(eta)
    height = rows.total(family.log_density(rows.y[:, None], eta)) - node**2 / 2
    height += np.log(width / np.sqrt(2 * np.pi)) + np.log(weight) + point**2
    value = special.logsumexp(height, axis=1)
    share = np.exp(height - value[:, None])  # [n, Q] posterior of the nodes
    residual, w = rows.y[:, None] - mu, family.weight(mu)
    p = rows.x.shape[1]
    score = np.empty((sites, nodes, p + 1))
    score[:, :, :p] = rows.total(residual[:, :, None] * rows.x[:, None, :])
    score[:, :, p] = node * rows.total(residual * column[:, None])
    gradient = np.einsum("nq,nqp->np", share, score)
    curvature = np.empty((sites, p + 1, p + 1))
    curvature[:, :p, :p] = rows.moments((share[owner] * w).sum(1))
    cross = rows.total(rows.x * ((share * node)[owner] * w).sum(1)[:, None] * column[:, None])
    curvature[:, p, :p] = curvature[:, :p, p] = cross
    curvature[:, p, p] = rows.total(((share * node**2)[owner] * w).sum(1) * column**2)
    centred = (score - gradient[:, None, :]) * np.sqrt(share)[:, :, None]
    curvature -= np.swapaxes(centred, 1, 2) @ centred
    return Likelihood(value, gradient, curvature)


@dataclass(frozen=True)
class Ascent:
    """Newton's method on totals, one round at a time: (β, λ) that sites are asked about, and the best so far."""

    point: Array  # [p + q] (β, λ) asked about
    best: Array  # [p + q] the last point that was an improvement
    value: float  # of the log likelihood there; −∞ before the first answer
    promise: float = np.inf  # what the last step promised to gain: the method ends where that is nothing

    def after(self, totals: Likelihood, p: int, rms: Array, prior: Array | float = 0.0) -> Ascent:
        """The next point, from totals at this one. A point that lowered the likelihood is taken back by half. `rms` [q]
        of the columns z; `prior` [p + q]: precisions of normal priors on (β, λ)."""
        prior = np.broadcast_to(prior, self.point.shape)
        value = float(totals.value[0]) - 0.5 * float(prior @ self.point**2)
        if not value >= self.value - 1e-9 * abs(self.value) and not np.array_equal(self.point, self.best):
            return Ascent((self.point + self.best) / 2, self.best, self.value)
        gradient = totals.gradient[0] - prior * self.point
        new, promise = newton_step(self.point, p, gradient, totals.curvature[0] + np.diag(prior), rms)
        return Ascent(new, self.point, value, promise)


def newton_step(point: Array, p: int, gradient: Array, curvature: Array, rms: Array) -> tuple[Array, float]:
    """(β, λ) [p + q] after one step, and what it promises to gain. A λ is never cut below a quarter, nor below the
    floor, nor raised above its fourfold, and the step of all others is the best one given that: a step that were only
    cut need not lead uphill. Where λ is near the floor and the likelihood would lower it further, it stays: it is zero
    (`at_zero`)."""
    lam = point[p:]
    stays = np.concatenate([np.zeros(p, dtype=bool), at_zero(lam, rms) & (gradient[p:] <= 0)])
    least, most = (np.concatenate([np.full(p, end), bound - lam]) for end, bound in (
        (-np.inf, np.maximum(lam / 4, FLOOR / rms)), (np.inf, 4 * lam)
    ))  # fmt: skip
    values, vectors = linalg.eigh(curvature[np.ix_(~stays, ~stays)])
    values = np.maximum(np.abs(values), 1e-10 * np.abs(values).max())
    convex = np.zeros((len(point), len(point)))
    convex[np.ix_(~stays, ~stays)] = (vectors * values) @ vectors.T
    step, fixed = np.zeros(len(point)), stays
    while True:
        free = ~fixed
        slope = gradient - convex[:, fixed] @ step[fixed]
        step[free] = linalg.solve(convex[np.ix_(free, free)], slope[free], assume_a="pos")
        beyond = free & ((step < least) | (step > most))
        if not beyond.any():
            return point + step, float(gradient @ step)
        step = np.where(beyond, np.clip(step, least, most), step)
        fixed = fixed | beyond


def at_zero(lam: Array, rms: Array) -> NDArray[np.bool_]:
    """[q] which λ are as low as they go, and are reported as zero."""
    return np.asarray(lam < 2 * FLOOR / rms)
