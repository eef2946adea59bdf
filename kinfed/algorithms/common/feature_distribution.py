"""Gaussian classifiers of features, and how far one should go from the common to a client's own (pFedFDA).

LDA(M, S, π):  W = M S'⁻¹,  b_c = −⟨M_c, W_c⟩/2 + log π_c,  S' = (1 − ε) S + ε tr(S)/d_f I
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.optimize import minimize
from torch import Tensor

EPS = 1e-4  # ε
ITERATIONS = 10  # of the search for β


@dataclass(frozen=True)
class Distribution:
    """Class means and the common covariance of one client's features, in float64."""

    means: Tensor  # [C, d_f]
    covariance: Tensor  # [d_f, d_f]

    def toward(self, local: Distribution, beta: Tensor) -> Distribution:
        """β [2] of the way to the local one, for means and covariance."""
        covariance = self.covariance + beta[1] * (local.covariance - self.covariance)
        return Distribution(self.means + beta[0] * (local.means - self.means), covariance)

    def shrunk(self) -> Tensor:
        """S' [d_f, d_f]"""
        width = len(self.covariance)
        identity = torch.eye(width, dtype=torch.float64)
        return (1 - EPS) * self.covariance + EPS * self.covariance.trace() / width * identity

    def classifier(self, prior: Tensor) -> tuple[Tensor, Tensor]:
        """LDA: W [C, d_f] and b [C] for class shares [C]. NaN where the covariance is none."""
        root, failed = torch.linalg.cholesky_ex(self.shrunk())
        if int(failed):  # features that are not finite
            root = torch.full_like(root, torch.nan)
        weight = torch.cholesky_solve(self.means.T, root).T
        return weight, -0.5 * (self.means * weight).sum(1) + prior.log()


def local_distribution(phi: Tensor, y: Tensor, fallback: Tensor, ridge: float) -> Distribution:
    """M_loc and S_loc of features φ [N, d_f]; classes without examples have their mean from `fallback` [C, d_f]."""
    classes, width = fallback.shape
    count = torch.bincount(y, minlength=classes)
    total = phi.new_zeros(classes, width).index_add_(0, y, phi)
    means = torch.where((count > 0)[:, None], total / count.clamp_min(1)[:, None], fallback)
    apart = phi - means[y]
    scatter = apart.T @ apart / max(len(y) - 1, 1)
    return Distribution(means, scatter + ridge * torch.eye(width, dtype=torch.float64))


def best_beta(
    trials: list[tuple[Distribution, Tensor, Tensor]], common: Distribution, prior: Tensor, *, single: bool
) -> Tensor:
    """[2] β in [0, 1] with the least cross-entropy, over trials (local distribution, φ [N, d_f], y [N]) of examples
    that it was not made from."""
    views = [Pencil.of(common, *trial) for trial in trials]
    log_prior = prior.log().numpy()

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        parts = [view.loss(float(values[0]), float(values[-1]), log_prior) for view in views]
        slope = np.sum([part[1] for part in parts], axis=0)
        return sum((part[0] for part in parts), 0.0), slope.sum(keepdims=True) if single else slope

    start = np.full(1 if single else 2, 0.5)
    bounds, options = [(0, 1)] * len(start), {"maxiter": ITERATIONS}
    result = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return torch.from_numpy(np.asarray(result.x, dtype=np.float64)).expand(2)


@dataclass(frozen=True)
class Pencil:
    """One trial in the basis V with V'S'V = I and V'S'_loc V = diag(d): there S'_β is diagonal for every β, and a loss
    takes no factorization."""

    d: np.ndarray  # [d_f]
    means: np.ndarray  # [C, d_f] M V
    apart: np.ndarray  # [C, d_f] (M_loc − M) V
    phi: np.ndarray  # [N, d_f] φ V
    y: np.ndarray  # [N]

    @classmethod
    def of(cls, common: Distribution, local: Distribution, phi: Tensor, y: Tensor) -> Pencil:
        d, basis = eigh(local.shrunk().numpy(), common.shrunk().numpy())
        means = common.means.numpy() @ basis
        return cls(d, means, local.means.numpy() @ basis - means, phi.numpy() @ basis, y.numpy())

    def loss(self, beta_m: float, beta_s: float, log_prior: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean cross-entropy of LDA(M_β, S_β, π), and its derivatives [2] in β_M and β_S."""
        scale = 1 / (1 + beta_s * (self.d - 1))  # S'_β⁻¹
        means = self.means + beta_m * self.apart
        z = self.phi @ (means * scale).T - 0.5 * (means**2 * scale).sum(1) + log_prior
        by_means = self.phi @ (self.apart * scale).T - (means * self.apart * scale).sum(1)  # ∂z/∂β_M
        moved = (self.d - 1) * scale**2
        by_scale = 0.5 * (means**2 * moved).sum(1) - self.phi @ (means * moved).T  # ∂z/∂β_S
        log_p = z - z.max(1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        rows = np.arange(len(self.y))
        delta = np.exp(log_p)
        delta[rows, self.y] -= 1
        slopes = np.array([(delta * by_means).sum(), (delta * by_scale).sum()]) / len(rows)
        return float(-log_p[rows, self.y].mean()), slopes
