"""Metrics of counts, ordered classes, several labels, positions and survival, as sums over a client's examples.

Survival is judged within clients: a pair of rows of two clients is never compared, and the chance to be censored comes
from the client's own test rows. Rows that are censored before a time count there by others that are not: weights 1 / G,
with the Kaplan-Meier estimate G of staying uncensored, at least LEAST_UNCENSORED (Graf et al. 1999).
"""

from itertools import pairwise

import numpy as np

from kinfed.data import kaplan_meier
from kinfed.engine.scoring.metrics import Judged, Sums
from kinfed.engine.scoring.metrics import add_metric as _add

LEAST_UNCENSORED = 0.05
PAIRS_AT_ONCE = 4_000_000
_LOWER = {"higher_is_better": False}


# ---- counts ----


@_add("deviance", "Deviance", "Mean Poisson deviance of counts: 0 is perfect, about 1 is chance alone.",
      "neg_mean_poisson_deviance", kinds=("counts",), **_LOWER)  # fmt: skip
def _deviance(d: Judged) -> Sums:
    return d.total(_poisson_deviance(d.target, d.probability)), d.count


@_add("d2", "D²", "Share of the deviance inside a client that the model explains: 0 is as good as the client's own "
      "mean, below 0 worse.", kinds=("counts",), finish="complement")  # fmt: skip
def _unexplained_deviance(d: Judged) -> Sums:
    mean = d.total(d.target) / np.maximum(d.count, 1e-300)
    return d.total(_poisson_deviance(d.target, d.probability)), d.total(_poisson_deviance(d.target, mean[d.owner]))


@_add("dispersion", "Dispersion", "Mean of (y − μ)² / μ: 1 where counts vary as Poisson's, more where a negative "
      "binomial fits.", kinds=("counts",), **_LOWER)  # fmt: skip
def _dispersion(d: Judged) -> Sums:
    return d.total(d.residual**2 / np.maximum(d.probability, 1e-300)), d.count


def _poisson_deviance(y: np.ndarray, mu: np.ndarray) -> np.ndarray:
    mu = np.maximum(mu, 1e-300)
    log_ratio = np.log(np.maximum(y, 1e-300) / mu)
    return np.asarray(2 * (np.where(y > 0, y * log_ratio, 0.0) - y + mu))


# ---- classes in an order ----


@_add("rank_error", "Rank error", "Mean number of classes between the median of what is predicted and the truth.",
      kinds=("ordinal",), **_LOWER)  # fmt: skip
def _rank_error(d: Judged) -> Sums:
    median = (d.probability.cumsum(1) < 0.5).sum(1)
    return d.total(np.abs(median - d.target).astype(np.float64)), d.count


@_add("ranked_probability", "Ranked probability score", "Mean squared distance of the chance to lie above each "
      "class from the truth, over classes.", kinds=("ordinal",), **_LOWER)  # fmt: skip
def _ranked_probability(d: Judged) -> Sums:
    above = 1 - d.probability.cumsum(1)[:, :-1]
    truth = d.target[:, None] > np.arange(above.shape[1])
    return d.total(((above - truth) ** 2).mean(1)), d.count


# ---- several labels ----


@_add("label_accuracy", "Label accuracy", "Share of known labels that are predicted correctly.",
      kinds=("multilabel",), unit="%")  # fmt: skip
def _label_accuracy(d: Judged) -> Sums:
    return d.known_total(np.where(np.isnan(d.target), np.nan, (d.output > 0) == (d.target > 0)))


@_add("exact_match", "Exact match", "Share of examples all of whose known labels are right.",
      kinds=("multilabel",), unit="%")  # fmt: skip
def _exact_match(d: Judged) -> Sums:
    right = np.isnan(d.target) | ((d.output > 0) == (d.target > 0))
    return d.total(right.all(1).astype(np.float64)), d.count


@_add("label_f1", "Label F1", "Harmonic mean of precision and recall over all labels of all examples.",
      kinds=("multilabel",), unit="%")  # fmt: skip
def _label_f1(d: Judged) -> Sums:
    known, positive = ~np.isnan(d.target), d.output > 0
    hits, truth = positive & (d.target > 0), d.target > 0
    either = (positive & known).sum(1) + truth.sum(1)
    return d.total(2.0 * hits.sum(1)), d.total(either.astype(np.float64))


# ---- positions ----


@_add("position_accuracy", "Position accuracy", "Share of positions with a class that are classified correctly.",
      kinds=("dense",), unit="%")  # fmt: skip
def _position_accuracy(d: Judged) -> Sums:
    return d.total(d.output[:, 1]), d.total(d.output[:, 2])


@_add("perplexity", "Perplexity", "exp of the mean −log probability of a position's class: of how many equally "
      "likely classes it is as hard to tell.", kinds=("dense",), finish="exp", **_LOWER)  # fmt: skip
def _perplexity(d: Judged) -> Sums:
    return d.total(d.output[:, 0]), d.total(d.output[:, 2])


# ---- survival ----


@_add("concordance", "C-index", "Share of pairs of rows of one client, one of which is known to have had the event "
      "first, that the model puts in the right order: 50 % is guessing (Harrell's C).",
      kinds=("survival",), unit="%", slow=True)  # fmt: skip
def _concordance(d: Judged) -> Sums:
    risk, right, pairs = cumulative_hazards(d)[:, -1], np.zeros(d.clients), np.zeros(d.clients)
    for client, rows in _clients(d):
        time, event = d.target[rows].T
        weight = np.ones(len(time)) if d.weight is None else d.weight[rows]
        first = np.flatnonzero(event > 0)
        for some in np.array_split(first, max(1, len(first) * len(time) // PAIRS_AT_ONCE)):
            later = (time > time[some, None]) | ((time == time[some, None]) & (event == 0))
            both = later * weight * weight[some, None]
            own = risk[rows]
            right[client] += (both * ((own < own[some, None]) + 0.5 * (own == own[some, None]))).sum()
            pairs[client] += both.sum()
    return right, pairs


@_add("integrated_brier", "Integrated Brier score", "Mean squared distance of the chance to have outlived a time "
      "from the truth, over times up to the end of the last period; censored rows count by weights.",
      kinds=("survival",), slow=True, **_LOWER)  # fmt: skip
def _integrated_brier(d: Judged) -> Sums:
    times = np.array((0.0, *d.problem.periods))
    total, survival = np.zeros(d.clients), d.probability
    for client, rows in _clients(d):
        time, event = d.target[rows].T
        weight = np.ones(len(time)) if d.weight is None else d.weight[rows]
        scores = [0.0]
        for place, t in enumerate(times[1:]):
            scores.append(float((weight * brier_terms(time, event, survival[rows, place], t)).sum()))
        total[client] = np.trapezoid(scores, times) / times[-1]
    return total, d.count


@_add("horizon_calibration", "Calibration at the horizon", "How far the mean chance of an event up to the end of "
      "the middle period is from the share observed there (Kaplan-Meier), client by client.",
      kinds=("survival",), unit="%", slow=True, **_LOWER)  # fmt: skip
def _horizon_calibration(d: Judged) -> Sums:
    horizon = d.problem.horizon
    place = d.problem.periods.index(horizon)
    gap, count = np.zeros(d.clients), np.zeros(d.clients)
    for client, rows in _clients(d):
        time, event = d.target[rows].T
        if time.max() < horizon and event[time.argmax()] == 0:  # no one is known to be there at the horizon
            continue
        weight = np.ones(len(time)) if d.weight is None else d.weight[rows]
        observed = 1 - kaplan_meier(time, event, np.array([horizon]), weight)[0]
        expected = np.average(1 - d.probability[rows, place], weights=weight)
        gap[client], count[client] = abs(observed - expected) * weight.sum(), weight.sum()
    return gap, count


def cumulative_hazards(d: Judged) -> np.ndarray:
    """[T, periods] up to the end of every period."""
    return np.asarray((np.array(d.problem.hazards) * np.exp(np.minimum(d.output, 700.0))).cumsum(1))


def brier_terms(time: np.ndarray, event: np.ndarray, survival: np.ndarray, t: float) -> np.ndarray:
    """[n] squared errors at time t of chances to outlive it, weighted by 1 / G."""
    uncensored = kaplan_meier(time, 1 - event, np.r_[time, t], events_first=event)
    uncensored = np.maximum(uncensored, LEAST_UNCENSORED)
    died = (time <= t) & (event > 0)
    alive = time > t
    return np.asarray(died * survival**2 / uncensored[:-1] + alive * (1 - survival) ** 2 / uncensored[-1])


def _clients(d: Judged) -> list[tuple[int, np.ndarray]]:
    """Clients with examples, and the places of these."""
    order = np.argsort(d.owner, kind="stable")
    ends = np.searchsorted(d.owner[order], np.arange(d.clients + 1))
    return [(client, order[a:b]) for client, (a, b) in enumerate(pairwise(ends)) if b > a]
