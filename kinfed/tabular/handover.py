"""What every site is handed after a fit: the chosen model, a safe mixture of it with its own, or what tests certify.

    safe         experts are learning alone, what the folds chose, and the mixture that the folds make most likely; a
                 part of the site's test rows sets their shares (kinfed.theory.safe_mixture): in expectation the log
                 loss is at most that of learning alone + log 2 / (n + 1). No row and no message leaves a site for it
    chosen       what the folds chose, as it is
    certified    what the folds chose where the site's test rows show a gain, and else what it has alone

Test rows train no model and choose none. With `safe`, half of them, drawn by a key of the site, set the shares; every
one of these is judged by the shares that the rows before it left, so that all figures are of rows that a prediction had
not seen. The other half calibrates the site's prediction sets (kinfed.theory.certificates); their coverage is that of
each row by the threshold that the other rows set.

The likely mixture maximizes the likelihood of the validated rows, Σ log Σ_m π_m p_m, by EM; shares of all sites
together count like ten further rows of every site, as for `kin`. Where a number is predicted, densities are normal
around predictions with one variance per site, that of the residuals of learning alone in the folds (of the target, if
they are larger), and models are mixed by their predictions: log loss is then that of the density, up to a constant of
the site, and nothing is promised for squared error.

A model that diverged has no part in the mixture of a site: a thousandth of a number without bounds is no small thing.
Its predictions tell, on rows that the folds left out and on test rows, whatever their targets are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinfed.core import rng
from kinfed.data import Federation
from kinfed.tabular.decision import reach_of
from kinfed.tabular.portfolio import ALONE, ONE_MODEL
from kinfed.theory import certificates, safe_mixture

Floats = NDArray[np.float64]
SAFE, CHOSEN, CERTIFIED = "safe", "chosen", "certified"
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)  # of prediction sets that a model's file knows
HOPELESS = 1e9  # log density of what is too far off for its own number to matter
PRIOR_ROWS = 10.0  # rows that residuals of all sites count for in a site's variance


@dataclass(frozen=True)
class PredictionSets:
    """Thresholds of scores by level, and how many of the rows that set them were covered."""

    rows: int
    thresholds: dict[float, float]  # score: 1 − p of a class, or the distance from the predicted number
    covered: dict[float, float]  # share of rows, each by a threshold that it had no part in
    sizes: dict[float, float]  # mean number of classes in a set, or the width of the interval


@dataclass(frozen=True)
class Handover:
    """What K sites are handed, as shares of M fitted contenders."""

    names: list[str]  # [M]
    shares: Floats  # [K, M]
    outputs: Tensor  # [T, C] what was handed over says of the test rows, as `judged_test` takes it
    most_it_costs: list[float | None]  # [K] in nats of log loss against alone; None if nothing is promised
    sets: list[PredictionSets]  # [K]
    new_site_sets: dict[float, float]  # thresholds of the one model of all at a site without labelled rows

    def shares_of(self, site: int) -> dict[str, float]:
        return {name: float(share) for name, share in zip(self.names, self.shares[site], strict=True) if share > 0}


@dataclass(frozen=True)
class OutputsOfAll:
    """Outputs [M, T, C] of all fitted contenders on rows of K sites, one site after the other, and their targets [T].
    A probability is that of the truth; where a number is predicted, its density with a variance per site [K]."""

    outputs: Floats
    target: NDArray[Any]
    owner: NDArray[np.int64]
    weight: Floats | None = None  # [T] how much every row counts
    variance: Floats | None = None
    reach: tuple[float, float] = (-math.inf, math.inf)  # of numbers that a prediction can be meant to be

    @classmethod
    def of_rows(
        cls, outputs: Mapping[str, Tensor], names: list[str], data: Federation, rows: Tensor, owner: Tensor,
        variance: Floats | None = None,
    ) -> OutputsOfAll:  # fmt: skip
        stacked = torch.stack([outputs[name].double() for name in names])
        if data.problem.classifies:
            stacked = torch.softmax(stacked, 2)
        weight = None if data.weights is None else data.weights[rows].double().numpy()
        reach = reach_of(data.problem) if data.problem.is_single_number else cls.reach
        return cls(stacked.numpy(), data.labels[rows].numpy(), owner.numpy(), weight, variance, reach)

    def weights(self, rows: NDArray[np.int64]) -> Floats:
        """[n] how much these rows count."""
        return np.ones(len(rows)) if self.weight is None else self.weight[rows]

    def log_p(self, shares: Floats, rows: NDArray[np.int64]) -> Floats:
        """[E, n] of experts that are shares [E, M] of the contenders, on these rows."""
        mixed = np.stack([self.mixed(np.broadcast_to(one, (len(rows), len(one))), rows) for one in shares])
        if self.variance is None:
            truth = np.take_along_axis(mixed, self.target[rows].astype(np.int64)[None, :, None], 2)[..., 0]
            return np.asarray(np.log(np.maximum(truth, 1e-300)))
        variance = self.variance[self.owner[rows]]
        return density(mixed[..., 0] - self.target[rows], variance)

    def mixed(self, shares: Floats, rows: NDArray[np.int64]) -> Floats:
        """[n, C] by shares [n, M] of the contenders, one row of shares each; what has no share need not be finite."""
        outputs = np.where(shares.T[:, :, None] > 0, self.outputs[:, rows], 0.0)
        return np.asarray(np.einsum("tm,mtc->tc", shares, outputs))

    def are_sound(self, sites: int) -> NDArray[np.bool_]:
        """[K, M] which contenders have not diverged on the rows of each site."""
        low, high = self.reach
        lost = np.any(~((self.outputs >= low) & (self.outputs <= high)), axis=2)  # [M, T]; NaN is nowhere
        return np.stack([np.bincount(self.owner, weights=one, minlength=sites) == 0 for one in lost], 1)

    def scores(self, mixed: Floats, rows: NDArray[np.int64]) -> Floats:
        """[n] how strange the truth is: 1 − p of it, or its distance from the predicted number."""
        if self.variance is None:
            return np.asarray(1 - np.take_along_axis(mixed, self.target[rows].astype(np.int64)[:, None], 1)[:, 0])
        return np.asarray(np.abs(mixed[:, 0] - self.target[rows]))

    def size_of_sets(self, mixed: Floats, threshold: float) -> float:
        """The mean number of classes in sets, or the width of intervals; NaN without rows."""
        if self.variance is not None:
            return 2 * threshold
        inside = (1 - mixed <= threshold).sum(1)
        return float(np.maximum(inside, 1).mean()) if len(mixed) else math.nan  # the likeliest class is always inside


def density(errors: Floats, variance: Floats | float) -> Floats:
    """Logarithm of a normal density of errors, less its largest value: bounds on it know no unit."""
    return np.asarray(np.maximum(np.nan_to_num(-(errors**2) / (2 * variance), nan=-HOPELESS), -HOPELESS))


def residual_variance(alone: Tensor, data: Federation, rows: Tensor, owner: Tensor) -> Floats:
    """[K] variance of the residuals of learning alone on validated rows, at each site at most that of the target; those
    of all sites count like ten rows."""
    most = float(np.ravel(data.problem.scale)[0]) ** 2
    squares = (alone.double()[:, 0] - data.labels[rows].double()).square().nan_to_num(nan=math.inf).numpy()
    count = np.bincount(owner.numpy(), minlength=data.num_clients)
    total = np.minimum(np.bincount(owner.numpy(), weights=squares, minlength=data.num_clients), most * count)
    pooled = max(float(total.sum() / count.sum()) if len(squares) else most, 1e-12 * most)
    return np.asarray((total + PRIOR_ROWS * pooled) / (count + PRIOR_ROWS))


def safe_handover(
    names: list[str], chosen: list[str], validated: OutputsOfAll, test: OutputsOfAll, data: Federation, seed: int,
    alone_prior: float,
) -> Handover:  # fmt: skip
    """Safe mixtures at all sites; `validated` are outputs of models of the folds, `test` of the fitted ones."""
    M, sites = len(names), data.num_clients
    alone = names.index(ALONE)
    equal = np.full(M, 1 / M)
    everything = np.arange(len(validated.target))
    one_hot = np.eye(M)
    population = safe_mixture.likely_shares(validated.log_p(one_hot, everything), equal, strength=1.0)
    population = 0.9 * population + 0.1 * equal
    sound = validated.are_sound(sites) & test.are_sound(sites)
    sound[~sound.any(1), alone] = True  # where all are lost, nothing is mixed
    shares = np.zeros((sites, M))
    costs: list[float | None] = []
    row_shares = np.zeros((len(test.target), M))
    calibration: list[NDArray[np.int64]] = []
    for k in range(sites):
        own = np.flatnonzero(validated.owner == k)
        taken = np.flatnonzero(sound[k])
        prior = population[taken] / population[taken].sum()
        likely = np.zeros(M)
        likely[taken] = safe_mixture.likely_shares(validated.log_p(one_hot[taken], own), prior, PRIOR_ROWS)
        # Learning alone first; what the folds chose only where that is something else.
        pure = [m for m in dict.fromkeys((alone, names.index(chosen[k]))) if sound[k, m]]
        experts = np.stack([*(one_hot[m] for m in pure), likely])
        learning, setting = halves(np.flatnonzero(test.owner == k), rng.fold(rng.root(seed, "fit-shares"), k))
        counted = test.weights(learning)
        even = np.full(len(experts), 1 / len(experts))
        prior = safe_mixture.prior_weights(len(experts), alone_prior) if sound[k, alone] else even
        result = safe_mixture.safe_shares(test.log_p(experts, learning), prior, counted)
        shares[k] = result.shares @ experts
        row_shares[learning], row_shares[setting] = result.row_shares @ experts, shares[k]
        costs.append(safe_mixture.most_it_costs(float(counted.sum()), alone_prior) if sound[k, alone] else None)
        calibration.append(setting)
    sets = prediction_sets(test, shares, calibration)
    return Handover(names, shares, _outputs(test, row_shares), costs, sets, new_site_sets(test, names))


def plain_handover(names: list[str], taken: list[str], test: OutputsOfAll) -> Handover:
    """One contender for every site; all test rows calibrate its sets."""
    shares = np.stack([np.eye(len(names))[names.index(name)] for name in taken])
    calibration = [np.flatnonzero(test.owner == k) for k in range(len(taken))]
    sets = prediction_sets(test, shares, calibration)
    nothing: list[float | None] = [None] * len(taken)
    return Handover(names, shares, _outputs(test, shares[test.owner]), nothing, sets, new_site_sets(test, names))


def single_handover(names: list[str], taken: list[str], test: OutputsOfAll) -> Handover:
    """One contender for every site, without sets: of problems whose predictions are neither classes nor one number."""
    shares = np.stack([np.eye(len(names))[names.index(name)] for name in taken])
    unknown = dict.fromkeys(LEVELS, math.nan)
    sets = [PredictionSets(0, {}, unknown, unknown)] * len(taken)
    outputs = torch.from_numpy(test.mixed(shares[test.owner], np.arange(len(test.owner))))
    return Handover(names, shares, outputs, [None] * len(taken), sets, {})


def prediction_sets(test: OutputsOfAll, shares: Floats, calibration: list[NDArray[np.int64]]) -> list[PredictionSets]:
    mixed = [test.mixed(np.repeat(shares[k : k + 1], len(rows), 0), rows) for k, rows in enumerate(calibration)]
    scores = [test.scores(outputs, rows) for outputs, rows in zip(mixed, calibration, strict=True)]
    sets = []
    for k, own in enumerate(scores):
        others = scores[:k] + scores[k + 1 :]
        thresholds = {level: certificates.set_threshold(own, others, level) for level in LEVELS}
        covered = {level: certificates.covered_share(own, others, level) for level in LEVELS}
        sizes = {level: test.size_of_sets(mixed[k], threshold) for level, threshold in thresholds.items()}
        sets.append(PredictionSets(len(own), thresholds, covered, sizes))
    return sets


def new_site_sets(test: OutputsOfAll, names: list[str]) -> dict[float, float]:
    """Thresholds of the one model of all at a site without labelled rows, by level; none without that model."""
    if ONE_MODEL not in names:
        return {}
    server = names.index(ONE_MODEL)
    sites = [np.flatnonzero(test.owner == k) for k in np.unique(test.owner)]
    scores = [test.scores(test.outputs[server, rows], rows) for rows in sites]
    return {level: certificates.new_site_threshold(scores, level) for level in LEVELS}


def halves(rows: NDArray[np.int64], key: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows that set shares, and rows that calibrate sets."""
    order = rng.permutation(key, len(rows)).numpy()
    half = (len(rows) + 1) // 2
    return np.sort(rows[order[:half]]), np.sort(rows[order[half:]])


def _outputs(test: OutputsOfAll, row_shares: Floats) -> Tensor:
    """[T, C] logits, or numbers, of every test row by its own shares."""
    mixed = torch.from_numpy(test.mixed(row_shares, np.arange(len(test.target))))
    return mixed if test.variance is not None else mixed.clamp_min(1e-300).log()
