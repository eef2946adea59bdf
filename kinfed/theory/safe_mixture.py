"""Safe mixtures: shares of several fixed models at one site, such that mixing them can hardly cost more than the first.

Experts e = 0, ..., E − 1 were fitted before; p_e(i) is the probability, or density, that expert e gives to the truth of
row i, for n rows of the site that trained and chose nothing. With prior weights w_e (1/2 on expert 0, what the site has
alone, and the rest evenly),

    W_i(e) ∝ w_e Π_{j ≤ i} p_e(j),   i = 0, ..., n                 weights after i rows
    share(e) = mean over i = 0, ..., n of W_i(e)                    and over a few fixed orders of the rows
    deployed: p(x) = Σ_e share(e) p_e(x)

Guarantee: if the rows and the next one are exchangeable, then for every expert

    E[−log p(next)] ≤ E[−log p_e(next)] + log(1 / w_e) / (n + 1)

Proof. Predicting row i by Σ_e W_{i−1}(e) p_e, one after the other, has a total loss that telescopes to
−log Σ_e w_e Π_j p_e(j) ≤ −Σ_j log p_e(j) + log(1 / w_e), for any rows at all. Over n + 1 exchangeable rows the loss of
step i is in expectation that of W_{i−1} on the last row; the mean over i of −log Σ_e W_i(e) p_e is at least −log of
the mixture with the mean of the W_i, by Jensen's inequality, and so it is for the mean over orders.

It holds on average over rows, not for every draw of them; the models must not be trained again afterwards; and it says
nothing of accuracy or AUROC. Probabilities are kept above `LEAST`, and the guarantee is that of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kinfed.core import rng

Floats = NDArray[np.float64]
LEAST = 1e-6  # probability of a truth that an expert held to be impossible
ORDERS = 6  # fixed orders of the rows that shares are averaged over
ALONE_PRIOR = 0.5


@dataclass(frozen=True)
class SafeShares:
    """Shares of E experts at a site with n rows."""

    shares: Floats  # [E] that are deployed
    row_shares: Floats  # [n, E] by which each row was predicted before it counted, mean over the orders
    log_p: Floats  # [E, n] log p_e(i), bounded below

    @property
    def predictive_loss(self) -> Floats:
        """[n] −log of what the mixture gave to each row before it had seen it: an honest figure of the deployed."""
        return np.asarray(-np.log((self.row_shares * np.exp(self.log_p.T)).sum(1)))


def prior_weights(experts: int, alone: float = ALONE_PRIOR) -> Floats:
    """[E] `alone` on expert 0, the rest evenly; all of it if it is the only one."""
    if experts == 1:
        return np.ones(1)
    return np.concatenate([[alone], np.full(experts - 1, (1 - alone) / (experts - 1))])


def most_it_costs(rows: float, alone: float = ALONE_PRIOR) -> float:
    """The most that the mixture costs against expert 0 in expected log loss, in nats."""
    return math.log(1 / alone) / (rows + 1)


def safe_shares(log_p: Floats, prior: Floats, weight: Floats | None = None) -> SafeShares:
    """Shares by `log_p` [E, n] and prior weights [E]; a row of `weight` 2 counts as two.

    >>> safe_shares(np.zeros((2, 0)), prior_weights(2)).shares
    array([0.5, 0.5])
    """
    log_p = np.maximum(log_p, math.log(LEAST))
    experts, rows = log_p.shape
    counted = log_p if weight is None else log_p * weight
    shares, row_shares = np.zeros(experts), np.zeros((rows, experts))
    for number in range(ORDERS):
        order = rng.permutation(rng.fold(rng.root(0, "safe-mixture"), number), rows).numpy()
        passed = np.concatenate([np.zeros((experts, 1)), np.cumsum(counted[:, order], 1)], 1)
        log_w = np.log(prior)[:, None] + passed  # [E, n + 1] W_i, not normalized
        w = np.exp(log_w - log_w.max(0))
        w /= w.sum(0)
        shares += w.mean(1) / ORDERS
        row_shares[order] += w[:, :-1].T / ORDERS
    return SafeShares(shares, row_shares, log_p)


def likely_shares(log_p: Floats, prior: Floats, strength: float = 10.0, steps: int = 50) -> Floats:
    """[E] shares that maximize Σ_i log Σ_e π_e p_e(i) by EM; prior shares [E] count like `strength` further rows."""
    pi = prior
    p = np.exp(log_p - log_p.max(0, initial=-np.inf))
    for _ in range(steps):
        q = pi[:, None] * p
        q /= np.maximum(q.sum(0), 1e-300)
        pi = (q.sum(1) + strength * prior) / (p.shape[1] + strength)
    return pi
