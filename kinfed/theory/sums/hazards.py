"""Cox's proportional hazards stratified by site, from sums: every site has its own baseline hazard, all share β.

    h_k(t | x) = h_0k(t) exp(x'β)

Cox, JRSS B 34 (1972); ties as Efron, JASA 72 (1977). Risk sets lie within a site, so that log partial likelihood,
gradient and information are sums over sites, and Newton's method on the totals is exact. With D events of rows d at a
time, R the rows at risk, weights r = exp(x'β) and shares l/D of the tied rows that have left, l = 0..D−1:

    L = Σ_times  Σ_d x_d'β − Σ_l log( Σ_R r − (l/D) Σ_d r )
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import linalg

from kinfed.errors import DataError
from kinfed.theory.sums.generalized import Likelihood
from kinfed.theory.sums.mixed import Array

DECREMENT = 1e-16  # Newton stops where a step promises less: eight digits of β need it
MOST_ROUNDS = 50


def partial_likelihood(x: Array, time: Array, event: Array, beta: Array) -> Likelihood:
    """Log partial likelihood of one site with rows x [N, p]; `event` is 1 at the time of an event, 0 where censored."""
    order = np.argsort(-time, kind="stable")
    x, time, died = x[order], time[order], event[order] > 0
    centre = x.mean(0) if len(x) else 0.0
    x = x - centre  # β'x enters by differences alone
    eta = x @ beta
    top = float(eta.max(initial=0))
    risk = np.exp(eta - top)
    weighted = risk[:, None] * x
    p = x.shape[1]
    value, gradient, curvature = 0.0, np.zeros(p), np.zeros((p, p))
    s0, s1, s2 = 0.0, np.zeros(p), np.zeros((p, p))  # sums over the rows at risk
    edges = np.flatnonzero(np.diff(time, prepend=np.inf, append=-np.inf))
    for begin, end in pairwise(edges):
        here = slice(begin, end)
        s0, s1 = s0 + float(risk[here].sum()), s1 + weighted[here].sum(0)
        s2 = s2 + x[here].T @ weighted[here]
        tied = np.flatnonzero(died[here]) + begin
        if not len(tied):
            continue
        d0, d1, d2 = float(risk[tied].sum()), weighted[tied].sum(0), x[tied].T @ weighted[tied]
        value += float(eta[tied].sum())
        gradient += x[tied].sum(0)
        for share in np.arange(len(tied)) / len(tied):
            total = s0 - share * d0
            mean = (s1 - share * d1) / total
            value -= np.log(total) + top
            gradient -= mean
            curvature += (s2 - share * d2) / total - np.outer(mean, mean)
    return Likelihood(np.array([value]), gradient[None], curvature[None])


@dataclass(frozen=True)
class BaselineHazard:
    """Breslow's cumulative hazard of a row with x = 0, right after each of its times."""

    time: Array  # [m] ascending times of events
    hazard: Array  # [m] Λ_0


def baseline_hazard(x: Array, time: Array, event: Array, beta: Array) -> BaselineHazard:
    """Cumulative hazard of one site; with Efron's shares for ties, as survival's `basehaz`."""
    risk, times = np.exp(x @ beta), np.unique(time[event > 0])
    steps = np.zeros(len(times))
    for i, t in enumerate(times):
        died = (time == t) & (event > 0)
        total, tied = risk[time >= t].sum(), risk[died].sum()
        count = int(died.sum())
        steps[i] = (1 / (total - np.arange(count) / count * tied)).sum()
    return BaselineHazard(times, np.cumsum(steps))


def newton_on_totals(beta: Array, totals: Likelihood, ridge: float = 0.0) -> tuple[Array, float]:
    """β after one step, and what the step promises to gain. A `ridge` is a normal prior with that precision."""
    gradient = totals.gradient[0] - ridge * beta
    curvature = totals.curvature[0] + ridge * np.eye(len(beta))
    try:
        step = linalg.solve(curvature, gradient, assume_a="pos")
    except linalg.LinAlgError:
        raise DataError(
            "the information about some column is zero: it does not vary among the rows at risk of any site, or is a "
            "linear function of others; leave it out or set a ridge"
        ) from None
    return beta + step, float(gradient @ step)
