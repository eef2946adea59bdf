"""Cox's proportional hazards stratified by site, from sums: every site has its own baseline hazard, all share β.

    h_k(t | x) = h_0k(t) exp(x'β)

Cox, JRSS B 34 (1972); ties as Efron, JASA 72 (1977). Risk sets lie within a site, so that log partial likelihood,
gradient and information are sums over sites, and Newton's method on the totals is exact. With D events of rows d at a
time, R the rows at risk, weights r = exp(x'β) and shares l/D of the tied rows that have left, l = 0..D−1:

    L = Σ_times  Σ_d x_d'β − Σ_l log( Σ_R r − (l/D) Σ_d r )
"""

from __future__ import annotations

import numpy as np

from kinfed.theory.sums.generalized import Likelihood
from kinfed.theory.sums.mixed import Array


def partial_likelihood(x: Array, time: Array, event: Array, beta: Array) -> Likelihood:
    """Log partial likelihood of one site with rows x [N, p]; `event` is 1 at the time of an event, 0 where censored."""
    order = np.argsort(-time, kind="stable")
    x, time, died = x[order], time[order], event[order] > 0
    x = x - x.mean(0) if len(x) else x  # β'x enters by differences alone
    eta, p = x @ beta, x.shape[1]
    top = float(eta.max(initial=0))
    risk = np.exp(eta - top)
    if not died.any():
        return Likelihood(np.zeros(1), np.zeros((1, p)), np.zeros((1, p, p)))
    _, group = np.unique(-time, return_inverse=True)  # rows with the same time, the latest first
    last = np.searchsorted(group, np.arange(group[-1] + 1), side="right") - 1  # everybody up to there is at risk
    first = np.flatnonzero(np.diff(group[died], prepend=-1))  # of the events at a time
    tied = group[died][first]  # times with events
    size = np.diff([*first, died.sum()])
    share = (np.arange(died.sum()) - np.repeat(first, size)) / np.repeat(size, size)  # l / D, a row per event
    at_risk, leaving = (np.cumsum(risk)[last[tied]], np.add.reduceat(risk[died], first))
    sums = np.cumsum(risk[:, None] * x, 0)[last[tied]]
    of_leaving = np.add.reduceat(risk[died, None] * x[died], first)
    total = np.repeat(at_risk, size) - share * np.repeat(leaving, size)
    mean = (np.repeat(sums, size, 0) - share[:, None] * np.repeat(of_leaving, size, 0)) / total[:, None]
    value = eta[died].sum() - (np.log(total) + top).sum()
    gradient = x[died].sum(0) - mean.sum(0)
    # Σ_events Σ_R r x x' / total, by rows: each counts for all events up to its own time.
    shares = np.zeros(len(last))
    shares[tied] = np.add.reduceat(1 / total, first)
    weight = risk * np.cumsum(shares[::-1])[::-1][group]
    weight[died] -= risk[died] * np.repeat(np.add.reduceat(share / total, first), size)
    curvature = x.T @ (weight[:, None] * x) - mean.T @ mean
    return Likelihood(np.array([value]), gradient[None], curvature[None])


def baseline_hazard(x: Array, time: Array, event: Array, beta: Array, at: Array) -> Array:
    """[len(at)] cumulative hazard of one site for a row with x = 0, right after each of the times `at` [m]: Breslow's,
    with Efron's shares for ties, as survival's `basehaz`."""
    order = np.argsort(time, kind="stable")
    time, died, risk = time[order], event[order] > 0, np.exp(x @ beta)[order]
    times, first, count = np.unique(time[died], return_index=True, return_counts=True)
    at_risk = np.cumsum(risk[::-1])[::-1][np.searchsorted(time, times)]
    tied = np.add.reduceat(risk[died], first) if len(times) else np.zeros(0)
    steps = [(1 / (r - np.arange(d) / d * own)).sum() for r, own, d in zip(at_risk, tied, count, strict=True)]
    return np.concatenate([[0.0], np.cumsum(steps)])[np.searchsorted(times, at, side="right")]


def exposure(x: Array, time: Array, event: Array, beta: Array, ends: Array) -> tuple[Array, Array]:
    """(events [m], exposure [m]) of one site in periods that end at `ends`: the exposure of a row is its weight
    exp(x'β) for the share of the period that it lived through, so that events by exposure are the hazard of a period
    for a row with x = 0 where that is constant within the period."""
    begin = np.concatenate([[0.0], ends[:-1]])
    lived = np.clip((time[:, None] - begin) / (ends - begin), 0, 1)
    inside = (time[:, None] > begin) & (time[:, None] <= ends) & (event[:, None] > 0)
    return inside.sum(0).astype(np.float64), np.exp(x @ beta) @ lived
