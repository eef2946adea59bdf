"""Linear models beside boosted trees: coefficients β of all clients and effects of each, grown from sums.

    η_ki = x_i'β + z_i'u_k,      u_kj ~ N(0, φ / τ_j)

where z is the constant alone (kind `linear`), or x with it (kind `slopes`). A client fits its effects at β and answers
with gradient and curvature of its penalized loss, the effects profiled out, so that the server's step of Newton is
exact for squared losses however strong the effects are; T is the diagonal matrix of τ:

    g = Σ_i x_i ∂L_i,      H = X'WX − X'WZ (Z'WZ + T)⁻¹ Z'WX                                                      (5)

Its effects have a size, and as many of them are free as the data say, not the prior:

    τ_j ← φ Σ_k γ_kj / Σ_k u_kj²,      γ_kj = 1 − τ_j [(Z'WZ + T)⁻¹]_jj                                            (6)

(Schall 1991), with φ the mean of squared residuals and τ u² together, 1 for classes. A variance of zero
is reached by a factor a round, not asymptotically as by steps of EM. That is the mixed model of Breslow and Clayton
(1993) by penalized quasi-likelihood; `lmm` and `glmm` are exact, and this one serves any loss of the trees, from totals
alone, in the folds of the trees. Missing values are 0 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kinfed.algorithms.trees.tree_candidates import LARGEST_STEP, NEWTON
from kinfed.author import Split
from kinfed.engine.trees import ClientRows, TreeLoss, flat_rows

Array = np.ndarray[Any, Any]

STEPS = 12  # rounds
MOST_COLUMNS = 200  # of features: a client's sums take their square
MOST_SLOPES = 40  # of features: effects of a client take their third power
RIDGE = 1.0  # rows that hold a coefficient, but the constant, near 0
FIXED = 1e30  # τ of a column that has no effects
WEAKEST, STRONGEST = 1e-3, 1e9  # τ
SETTLED = 1e-6  # a smaller step of an effect is none
AT_ONCE = 4096  # rows


@dataclass(frozen=True)
class LinearModels:
    """M linear models: of every kind those of all ensembles."""

    beta: Array  # float64 [M, p + 1, C], the constant first
    tau: Array  # float64 [M, p + 1, C]
    phi: Array  # float64 [M]

    def ensembles(self, which: slice) -> LinearModels:
        return LinearModels(self.beta[which], self.tau[which], self.phi[which])

    def scores(self, design: Array, effects: Array | None = None) -> Array:
        """float32 [R, M, C] of rows [R, p + 1], with effects [R, M, p + 1, C] or without."""
        scores = np.einsum("rp,mpc->rmc", design, self.beta, optimize=True)
        if effects is not None:
            scores += np.einsum("rp,rmpc->rmc", design, effects)
        return np.asarray(scores, np.float32)


def design(split: Split, rows: Array) -> Array:
    """float64 [R, p + 1]: ones, then features."""
    x = flat_rows(split.features, torch.from_numpy(rows)).astype(np.float64)
    return np.concatenate([np.ones((len(x), 1)), np.where(np.isfinite(x), x, 0.0)], 1)


def num_sums(columns: int, scores: int) -> int:
    """Numbers of one model in a message, for p + 1 columns."""
    return int(scores * (3 * columns + columns * (columns + 1) // 2)) + 2


def effects_of(loss: TreeLoss, data: ClientRows, x: Array, weight: Array, models: LinearModels) -> Array:
    """u [n, M, p + 1, C] of clients with rows x [R, p + 1], at the models' β."""
    out = np.zeros((len(data.first) - 1, *models.beta.shape))
    for block in _blocks(loss, data, x, weight, models):
        for m in range(len(models.beta)):
            out[block.clients, m] = block.effects(m)
    return out


@dataclass(frozen=True)
class _Block:
    """Clients of about one size, with their rows padded to as many: n_k of one after the other would be slow, as sites
    are thousands and tiny."""

    loss: TreeLoss
    clients: Array  # int64 [k]
    x: Array  # float64 [k, N, p + 1]
    y: Array  # [k N]
    weight: Array  # float32 [k, N, M]; 0 of padding
    models: LinearModels

    def slopes(self, m: int, u: Array) -> tuple[Array, Array, float]:
        """g and h [k, N, 2C] of the rows, the sums of losses [k], and how much curvature counts."""
        shape = self.weight.shape[:2]
        score = (self.x @ (self.models.beta[m] + u)).astype(np.float32).reshape(len(self.y), -1)
        weight = self.weight[..., m]
        slope = self.loss.gradients(score, self.y).reshape(*shape, -1).astype(np.float64) * weight[..., None]
        losses = (self.loss.losses(score, self.y).reshape(shape) * weight).sum(1, dtype=np.float64)
        several = self.loss.scores > 1 and self.loss.objective.classifies
        return slope, losses, 2.0 if several else 1.0  # of several classes, as by Böhning's bound

    def effects(self, m: int) -> Array:
        """u [k, p + 1, C] by steps of Newton from 0."""
        tau, C = self.models.tau[m], self.loss.scores
        free = np.flatnonzero(tau[:, 0] < FIXED)
        u, z = np.zeros((len(self.clients), *tau.shape)), self.x[..., free]
        for _ in range(NEWTON):
            slope, _, bound = self.slopes(m, u)
            largest = 0.0
            for c in range(C):
                curvature = bound * _moments(z, slope[..., C + c]) + np.diag(tau[free, c])
                right = np.einsum("kn,knp->kp", slope[..., c], z) + tau[free, c] * u[:, free, c]
                step = np.linalg.solve(curvature, right[..., None])[..., 0]
                if self.loss.is_logarithmic:
                    step = step.clip(-LARGEST_STEP, LARGEST_STEP)
                u[:, free, c] -= step
                largest = max(largest, float(np.abs(step).max(initial=0.0)))
            if largest < SETTLED:
                break
        return u

    def sums(self, m: int) -> Array:
        """[k, num_sums] of a model."""
        tau, C = self.models.tau[m], self.loss.scores
        free, u = np.flatnonzero(tau[:, 0] < FIXED), self.effects(m)
        slope, losses, bound = self.slopes(m, u)
        rows, places = np.triu_indices(len(tau))
        out = np.zeros((len(u), num_sums(len(tau), C)))
        for c, part in enumerate(out[:, :-2].reshape(len(u), C, -1).swapaxes(0, 1)):
            curvature, freedom = bound * _moments(self.x, slope[..., C + c]), np.zeros((len(u), len(tau)))
            held = np.linalg.inv(curvature[:, free[:, None], free] + np.diag(tau[free, c]))
            freedom[:, free] = 1 - tau[free, c] * held.diagonal(axis1=1, axis2=2)
            curvature -= curvature[:, :, free] @ held @ curvature[:, free]
            gradient = np.einsum("kn,knp->kp", slope[..., c], self.x)
            part[:] = np.concatenate([gradient, curvature[:, rows, places], u[..., c] ** 2, freedom], 1)
        out[:, -2] = 2 * losses + (np.where(tau < FIXED, tau, 0.0) * u**2).sum((1, 2))
        out[:, -1] = self.weight[..., m].sum(1)
        return out


def _moments(x: Array, weight: Array) -> Array:
    """[k, q, q] sums of x x' by weight [k, N]."""
    return np.asarray((x * weight[..., None]).swapaxes(1, 2) @ x)


def _blocks(loss: TreeLoss, data: ClientRows, x: Array, weight: Array, models: LinearModels) -> Iterator[_Block]:
    """Clients with rows, the smallest first."""
    size = np.diff(data.first)
    order = np.argsort(size, kind="stable")
    order, begin = order[size[order] > 0], 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and (end + 1 - begin) * size[order[end]] <= AT_ONCE:
            end += 1
        clients, begin = order[begin:end], end
        at = np.arange(size[clients[-1]])
        there = at < size[clients][:, None]
        place = np.where(there, data.first[clients][:, None] + at, 0)
        counts = np.where(there[..., None], weight[place], np.float32(0))
        yield _Block(loss, clients, x[place], data.y[place.reshape(-1)], counts, models)


def linear_sums(loss: TreeLoss, data: ClientRows, x: Array, weight: Array, models: LinearModels) -> Array:
    """Sums (5) and (6) of clients [n, M · num_sums]: of every score g, H, u² and γ; then squares and their weight."""
    count, columns, C = models.beta.shape
    out = np.zeros((len(data.first) - 1, count, num_sums(columns, C)))
    for block in _blocks(loss, data, x, weight, models):
        for m in range(count):
            out[block.clients, m] = block.sums(m)
    return out.reshape(len(out), -1)


def newton(loss: TreeLoss, models: LinearModels, sums: Array, clients: float = 1.0) -> LinearModels:
    """The models after a step, from the sums of all clients [M · num_sums], or from their means over `clients`."""
    count, columns, C = models.beta.shape
    rows, places = np.triu_indices(columns)
    parts = sums[: count * num_sums(columns, C)].reshape(count, -1)
    beta, tau, phi = models.beta.copy(), models.tau.copy(), np.ones(count)
    penalty = RIDGE / clients * np.ones(columns)
    penalty[0] *= 1e-6
    for m in range(count):
        if loss.has_variance:
            phi[m] = max(parts[m, -2] / max(parts[m, -1], 1e-30), 1e-12)
        for c, of_score in enumerate(parts[m, :-2].reshape(C, -1)):
            curvature = np.zeros((columns, columns))
            upper, (size, freedom) = of_score[columns : -2 * columns], of_score[-2 * columns :].reshape(2, -1)
            curvature[rows, places] = curvature[places, rows] = upper
            gradient = of_score[:columns] + penalty * beta[m, :, c]
            scale = max(float(np.trace(curvature)) / columns, 1e-12)
            step = np.linalg.solve(curvature + np.diag(penalty + 1e-9 * scale), gradient)
            beta[m, :, c] -= step.clip(-LARGEST_STEP, LARGEST_STEP) if loss.is_logarithmic else step
            free = tau[m, :, c] < FIXED
            held = phi[m] * np.maximum(freedom, 0.0) / np.maximum(size, 1e-30)
            tau[m, free, c] = np.clip(held, WEAKEST, STRONGEST)[free]
    return LinearModels(beta, tau, phi)
