"""Statements about one site's test rows that hold: what a model gains at least, sets that cover, and a watch.

**Gain** of a model over what the site has alone, from the differences d_1, ..., d_n of their losses on test rows that
neither trained nor chose either model (positive is better), at confidence 1 − α:

    0/1 losses    two pseudo-rows, +1 and −1, are added, then Student's t with n − 1 degrees. With few discordant rows
                  the sample's own variance is far too small: plain t missed 11 % at 15 rows where 5 % are promised, at
                  the worst site 52 %; with the pseudo-rows it missed at most 4.9 % in 25 simulated cells
    other losses  Student's t with n − 1 degrees; "approximately" below `FEW` rows, where skewed differences missed 12
                  to 23 % in the worst simulated case

Rankings (AUROC) have no differences by row: kinfed.tabular takes the deviation of bootstrap draws there.

**The mean over sites** counts every site alike, with Student's t over sites. Weights by precision are tied to the
estimates themselves, and sites where two models answer alike would have taken all of the weight.

**Prediction sets** by conformal calibration: a label, or number, belongs to the set where its score is at most the
quantile of scores on rows that set nothing else. Own rows count 1 each, `BORROWED` rows in all come from the other
sites, and one row at infinity. With own rows alone (n ≥ 9 for 90 %) coverage is exact over draws of rows; with borrowed
ones it is measured, not proved (91 to 92 % on three tables). A new site without labels takes the hierarchical quantile:
every other site counts 1 / (K + 1), which covers new sites on average and is infinite below nine sites.

**The watch** is an e-process for losses in [0, 1] that come one by one: betting against "no worse than alone". Its
value exceeds 1 / α with probability at most α at any time, however often one looks (Ville's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Floats = NDArray[np.float64]
FEW = 60  # rows below which a bound by Student's t is called approximate
BORROWED = 30.0  # rows of other sites in a quantile of scores, in all

Losses = Literal["zero_one", "any"]


@dataclass(frozen=True)
class Bound:
    """A gain with its two-sided interval and its one-sided lower bound."""

    value: float  # the gain on the test rows
    low: float  # two-sided
    high: float
    at_least: float  # one-sided: the gain is above it, at the same confidence

    @property
    def is_shown(self) -> bool:
        """Tell whether the rows show a gain."""
        return self.at_least > 0


def gain_bound(differences: Floats, losses: Losses, confidence: float = 0.95) -> Bound | None:
    """Bound of the mean of differences [n]; None below two rows, which show nothing."""
    n = len(differences)
    if n < 2:
        return None
    rows = np.concatenate([differences, [1.0, -1.0]]) if losses == "zero_one" else differences
    error = float(rows.std(ddof=1)) / math.sqrt(len(rows))
    return _bound(float(differences.mean()), float(rows.mean()), error, n - 1, confidence)


def mean_over_sites(gains: Sequence[float], confidence: float = 0.95) -> Bound | None:
    """Bound of the mean gain over sites, each counting alike; None below two sites."""
    values = np.asarray([gain for gain in gains if math.isfinite(gain)])
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return _bound(float(values.mean()), float(values.mean()), error, len(values) - 1, confidence)


def _bound(value: float, centre: float, error: float, degrees: int, confidence: float) -> Bound:
    reach, one_sided = (float(stdtrit(degrees, level)) * error for level in ((1 + confidence) / 2, confidence))
    return Bound(value, centre - reach, centre + reach, centre - one_sided)


def weighted_quantile(scores: Floats, weight: Floats, level: float, at_infinity: float = 1.0) -> float:
    """The smallest score with at least `level` of all weight at or below it, `at_infinity` lying above all scores."""
    order = np.argsort(scores, kind="stable")
    passed = np.cumsum(weight[order])
    enough = np.flatnonzero(passed >= level * (weight.sum() + at_infinity) - 1e-12)
    return float(scores[order[enough[0]]]) if len(enough) else math.inf


def set_threshold(own: Floats, others: Sequence[Floats], level: float, borrowed: float = BORROWED) -> float:
    """Threshold of a site's prediction sets from its own scores [n] and those of other sites.

    >>> set_threshold(np.arange(9.0), [], 0.9, borrowed=0), set_threshold(np.arange(8.0), [], 0.9, borrowed=0)
    (8.0, inf)
    """
    scores, weight = _pooled(own, others, borrowed)
    return weighted_quantile(scores, weight, level)


def _pooled(own: Floats, others: Sequence[Floats], borrowed: float) -> tuple[Floats, Floats]:
    """Scores and weights of own rows and borrowed ones."""
    lenders = [scores for scores in others if len(scores)]
    weights = [np.ones(len(own)), *(np.full(len(one), borrowed / len(lenders) / len(one)) for one in lenders)]
    return np.concatenate([own, *lenders]), np.concatenate(weights)


def covered_share(own: Floats, others: Sequence[Floats], level: float, borrowed: float = BORROWED) -> float:
    """Share of own rows inside their sets, each by a threshold that it had no part in; NaN without rows. A row is
    outside where the weight of smaller scores alone reaches the level."""
    scores, weight = _pooled(own, others, borrowed)
    order = np.argsort(scores, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(weight[order])])[np.searchsorted(scores[order], own)]
    return float((below < level * weight.sum() - 1e-12).mean()) if len(own) else math.nan


def new_site_threshold(sites: Sequence[Floats], level: float) -> float:
    """Threshold for a site without labelled rows: every site counts 1 / (K + 1), shared out among its rows."""
    known = [scores for scores in sites if len(scores)]
    if not known:
        return math.inf
    weights = [np.full(len(scores), 1 / len(scores)) for scores in known]
    return weighted_quantile(np.concatenate(known), np.concatenate(weights), level)


def e_process(harm: Floats) -> Floats:
    """[n] evidence after each row that mean harm is above 0, for harms in [−1, 1] (the loss of the watched model less
    that of the other). Bets are predictable: λ_i from the rows before i alone, at most 1/2.

    >>> float(e_process(np.zeros(5))[-1])
    1.0
    """
    before = np.arange(len(harm))
    total, squares = (np.concatenate([[0.0], np.cumsum(values)])[:-1] for values in (harm, harm**2))
    mean = total / (before + 1)
    bet = np.clip(mean / ((squares + 1) / (before + 1)), 0.0, 0.5)
    return np.asarray(np.exp(np.cumsum(np.log1p(bet * np.clip(harm, -1.0, 1.0)))))
