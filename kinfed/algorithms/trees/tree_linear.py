"""The linear model beside boosted trees: coefficients β of all clients and an intercept of each, grown from sums.

    η_ki = x_i'β + b_k,      b_k ~ N(0, φ / τ)

A client fits its intercept at β and answers with the gradient and the curvature of its penalized loss, the intercept
profiled out, so that the server's step of Newton is exact for squared losses however strong the intercepts are:

    g = Σ_i x_i ∂L_i,      H = Σ_i h_i x_i x_i' − u u' / (Σ_i h_i + τ),      u = Σ_i h_i x_i                     (5)
    τ ← φ / mean_k(b_k² + φ/(Σ_i h_i + τ))                                                                       (3)

That is the mixed model of Breslow and Clayton (1993) by penalized quasi-likelihood; `lmm` and `glmm` are exact, and
this one serves any loss of the trees, from totals alone, in the folds of the trees. Missing values are 0 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kinfed.algorithms.trees.tree_candidates import intercepts
from kinfed.author import Split
from kinfed.engine.trees import ClientRows, TreeLoss, flat_rows

Array = np.ndarray[Any, Any]

STEPS = 12  # rounds
MOST_COLUMNS = 200  # of features: a client's sums take their square
RIDGE = 1.0  # rows that hold a coefficient, but the constant, near 0
LARGEST_STEP = 2.0  # of a coefficient of classes: two that a column separates have no finite one


@dataclass(frozen=True)
class LinearModels:
    """Linear models of E ensembles."""

    beta: Array  # float64 [E, p + 1, C], the constant first
    tau: Array  # float64 [E, C]
    phi: Array  # float64 [E]

    def ensembles(self, which: slice) -> LinearModels:
        return LinearModels(self.beta[which], self.tau[which], self.phi[which])

    def scores(self, design: Array) -> Array:
        """float32 [R, E, C] of rows [R, p + 1], without intercepts."""
        scores: Array = np.einsum("rp,epc->rec", design, self.beta, optimize=True).astype(np.float32)
        return scores


def design(split: Split, rows: Array) -> Array:
    """float64 [R, p + 1]: ones, then features."""
    x = flat_rows(split.features, torch.from_numpy(rows)).astype(np.float64)
    return np.concatenate([np.ones((len(x), 1)), np.where(np.isfinite(x), x, 0.0)], 1)


def num_sums(columns: int, scores: int) -> int:
    """Numbers of one ensemble in a message, for p + 1 columns."""
    return int(scores * (columns + columns * (columns + 1) // 2))


def linear_sums(
    loss: TreeLoss, data: ClientRows, x: Array, weight: Array, models: LinearModels
) -> tuple[Array, Array, Array]:
    """Sums (5) of clients [n, E · num_sums], their intercepts b [n, E, C] and the curvature of each [n, E, C]."""
    score = models.scores(x)
    b = intercepts(loss, data, score, weight, models.tau)
    gradient = loss.gradients(score + b[data.owner], data.y) * weight[..., None]
    (clients, ensembles, C), columns = b.shape, x.shape[1]
    rows, places = np.triu_indices(columns)
    out = np.zeros((clients, ensembles, C, columns + len(rows)))
    bound = 2.0 if C > 1 and loss.objective.classifies else 1.0  # diagonal curvatures say too little of classes
    size = data.sums(gradient[..., C:])
    for k in range(clients):
        place = slice(data.first[k], data.first[k + 1])
        for e in range(ensembles):
            for c in range(C):
                g, h = gradient[place, e, c].astype(np.float64), bound * gradient[place, e, C + c].astype(np.float64)
                u = h @ x[place]
                curvature = (x[place] * h[:, None]).T @ x[place]
                curvature -= np.outer(u, u) / (h.sum() + models.tau[e, c])
                out[k, e, c] = np.concatenate([g @ x[place], curvature[rows, places]])
    return out.reshape(clients, -1), b, size


def newton(loss: TreeLoss, models: LinearModels, sums: Array) -> LinearModels:
    """The models after a step, from the sums of all clients [E · num_sums]; τ and φ stay."""
    ensembles, columns, C = models.beta.shape
    rows, places = np.triu_indices(columns)
    parts = sums[: ensembles * num_sums(columns, C)].reshape(ensembles, C, -1)
    beta, penalty = models.beta.copy(), RIDGE * np.ones(columns)
    penalty[0] = 1e-6
    for e in range(ensembles):
        for c in range(C):
            curvature = np.zeros((columns, columns))
            curvature[rows, places] = curvature[places, rows] = parts[e, c, columns:]
            gradient = parts[e, c, :columns] + penalty * beta[e, :, c]
            scale = max(float(np.trace(curvature)) / columns, 1e-12)
            step = np.linalg.solve(curvature + np.diag(penalty + 1e-9 * scale), gradient)
            beta[e, :, c] -= step.clip(-LARGEST_STEP, LARGEST_STEP) if loss.is_logarithmic else step
    return LinearModels(beta, models.tau, models.phi)
