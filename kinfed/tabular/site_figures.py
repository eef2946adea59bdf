"""Figures of every site on its test rows: values, gains over learning alone, and what the rows show.

Intervals are value ± t · s with the standard deviation s of bootstrap draws of the site's test rows and Student's t for
as many rows; of metrics that compare two classes (`Metric.by_class`), for as many as the rarer has. They end where the
metric does: no share is above 1. For a gain both models are judged on the same draws; a gain in accuracy is bounded
with two pseudo-rows instead, as few discordant rows have far too small a variance (kinfed.theory.certificates). The
mean gain over sites counts every site alike, with Student's t over sites; beside it stands the mean by rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from kinfed.data import Federation
from kinfed.engine import Judged, Metric, bootstrap_draws, deviation_of_draws
from kinfed.runs import constant_outputs
from kinfed.tabular.decision import Advantage, FitDecision, advantage, judged_test, pooled_value, replicates_for, values
from kinfed.tabular.fit_result import Calibration, Estimate, ReferenceRecord, SiteRecord
from kinfed.tabular.portfolio import ALONE, BASELINE, ONE_MODEL
from kinfed.tabular.references import POOLED
from kinfed.theory import certificates, joint_gains

if TYPE_CHECKING:
    from kinfed.tabular.handover import Handover

UNDEFINED, NO_GAIN = Estimate(None), Estimate(0.0, 0.0, 0.0)
HANDED = "handed over"  # no contender: what a site deploys
NORMAL = 1.959964  # standard deviations to either side of a mean that hold 95 %
BINS, FEWEST_IN_A_BIN = 5, 5  # parts of a site's test rows, by what its model says of them
Floats = NDArray[np.float64]
SETS_SHOWN = 0.9  # the level of the prediction sets that pages speak of


def judged_baseline(data: Federation) -> Judged:
    """Every site's test rows by the shares of classes or the mean of its own training rows (kinfed.runs.baseline): what
    it takes no model to reach."""
    outputs = constant_outputs(data, torch.arange(data.num_clients))[data.test.owner]
    return judged_test(data.problem.restored(outputs) if data.problem.is_regression else outputs, data)


class SiteFigures:
    """Figures of all fitted contenders, and of the baseline, at all sites."""

    def __init__(
        self, metric: Metric, judged: Mapping[str, Judged], ids: Tensor | None = None, rows: int | None = None
    ) -> None:
        """`ids` [K] and `rows`, the test rows of all sites, are those of the whole where `judged` are of some sites."""
        self.metric = metric
        self._judged, alone = judged, judged[ALONE]
        ids = torch.arange(alone.clients) if ids is None else ids
        self.rows = torch.from_numpy(alone.examples)
        self._support = metric.support(alone)  # rows behind a site's figure
        self._rows_count_alike = alone.weight is None or bool(np.ptp(alone.weight) == 0)
        replicates = replicates_for(int(self.rows.sum()) if rows is None else rows)
        draws = {name: bootstrap_draws(metric, one, ids, replicates=replicates) for name, one in judged.items()}
        self._values = {name: values(metric, one) for name, one in judged.items()}
        self._errors = {name: deviation_of_draws(one) for name, one in draws.items()}
        self._gains = {
            name: advantage(metric, one, alone, draws[ALONE], ids=ids) for name, one in judged.items() if name != ALONE
        }

    def value(self, name: str | None, site: int) -> Estimate:
        if name is None:
            return UNDEFINED
        estimate = _estimate(self._values[name][site], self._errors[name][site], int(self._support[site]))
        return _within(estimate, 0.0, 1.0) if self.metric.percent else estimate

    def gain(self, name: str | None, site: int, *, within: bool = True) -> Estimate:
        """The gain over learning alone. Its interval ends where the metric does, unless `within` is false: where it
        ends tells what the site has alone."""
        if name is None or name == ALONE:
            return NO_GAIN
        one = self._gains[name]
        estimate = _estimate(one.seen[site], one.error[site], int(self._support[site]), is_gain=True)
        if self.metric.name == "accuracy" and self._rows_count_alike and estimate.low is not None:
            bound = certificates.gain_bound(self._discordant(name, site), "zero_one")
            assert bound is not None  # there is an interval
            estimate = Estimate(estimate.value, bound.low, bound.high, bound.at_least)
        if not self.metric.percent:
            return estimate
        if not within:
            return _within(estimate, -1.0, 1.0)
        alone = float(self._values[ALONE][site])
        ends = (-alone, 1 - alone) if self.metric.higher_is_better else (alone - 1, alone)
        return _within(estimate, *ends)

    def _discordant(self, name: str, site: int) -> np.ndarray:
        """[n] +1 where a contender is right and learning alone is wrong, −1 the other way round, 0 where they agree."""
        one, alone = self._judged[name], self._judged[ALONE]
        rows = alone.owner == site
        right = [(judged.predicted == judged.target)[rows].astype(np.float64) for judged in (one, alone)]
        return np.asarray(right[0] - right[1])

    def overall(self, name: str = HANDED) -> tuple[Estimate, Estimate]:
        """The mean gain over sites of what they are handed, by sites and by rows."""
        gains = self._gains[name].seen.numpy()
        known = np.isfinite(gains)
        if not known.any():
            return UNDEFINED, UNDEFINED
        bound = certificates.mean_over_sites(gains[known].tolist())
        by_sites = Estimate(float(gains[known][0])) if bound is None else bound_estimate(bound)
        rows = self.rows.numpy()[known]
        return by_sites, Estimate(float(np.average(gains[known], weights=rows)))


@dataclass(frozen=True)
class ExpectedGains:
    """Gains to expect of what the folds chose, in the score that chose: partial pooling of validation rows, corrected
    by what the test rows of all sites say of it (kinfed.theory.joint_gains)."""

    drift: float
    gains: list[Estimate]  # [K]; undefined at sites that stay alone

    @classmethod
    def of_test_rows(
        cls, metric: Metric, data: Federation, decision: FitDecision, outputs: Mapping[str, torch.Tensor]
    ) -> "ExpectedGains":
        owner = data.test.owner
        taken = torch.tensor([list(outputs).index(name) for name in decision.chosen])[owner]
        chosen = torch.stack(list(outputs.values()))[taken, torch.arange(len(owner))]
        one = advantage(
            metric, judged_test(chosen, data), judged_test(outputs[ALONE], data), replicates=replicates_for(len(owner))
        )
        rows = data.test.count.double().numpy()
        return cls.pooled(decision.chosen, decision.advantages, one.seen.numpy(), one.error.square().numpy(), rows)

    @classmethod
    def pooled(
        cls, names: Sequence[str], advantages: Mapping[str, Advantage], seen: Floats, variance: Floats, rows: Floats
    ) -> "ExpectedGains":
        """From the gains [K] of what sites chose (`names`) that test rows show, in the score that chose, their
        variances [K] and the numbers of rows [K]."""
        moves = np.array([name != ALONE for name in names])
        test = np.where(moves, seen, np.nan)
        error = joint_gains.row_variances(np.where(moves, variance, np.nan), rows)
        beliefs = [advantages.get(name) for name in names]
        expected, uncertain = (
            np.array([0.0 if belief is None else float(getattr(belief, part)[k]) for k, belief in enumerate(beliefs)])
            for part in ("expected", "variance")
        )
        drift = joint_gains.drift_of(test, error, expected, uncertain)
        mean, spread = joint_gains.with_test_rows(test, error, expected, uncertain, drift)
        reach = NORMAL * np.sqrt(spread)
        ends = zip(mean.tolist(), (mean - reach).tolist(), (mean + reach).tolist(), moves, strict=True)
        return cls(drift.value, [Estimate(*numbers) if move else UNDEFINED for *numbers, move in ends])


def reference_records(
    metric: Metric, data: Federation, outputs: Mapping[str, Tensor], titles: Mapping[str, str], handed: Tensor
) -> tuple[ReferenceRecord, ...]:
    """References beside what sites are `handed`; both are outputs [T, C] of the test rows."""
    records = []
    for name, one in outputs.items():
        judged = judged_test(one, data)
        seen = values(metric, judged)
        known = torch.isfinite(seen)
        records.append(
            ReferenceRecord(
                name, titles[name], name in POOLED, float(seen[known].mean()) if bool(known.any()) else None,
                _finite(pooled_value(metric, judged)), mean_ahead(metric, data, handed, one),
                tuple(_finite(float(value)) for value in seen),
            )
        )  # fmt: skip
    return tuple(records)


def mean_ahead(metric: Metric, data: Federation, handed: Tensor, other: Tensor) -> Estimate:
    """The gain of what sites are `handed` over the `other`, mean over sites; both are outputs [T, C] of the test
    rows."""
    own, seen = (values(metric, judged_test(outputs, data)) for outputs in (handed, other))
    ahead = own - seen if metric.higher_is_better else seen - own
    bound = certificates.mean_over_sites(ahead[torch.isfinite(ahead)].tolist())
    return UNDEFINED if bound is None else bound_estimate(bound)


def bound_estimate(bound: certificates.Bound) -> Estimate:
    return Estimate(bound.value, bound.low, bound.high, bound.at_least)


def _estimate(value: Tensor, error: Tensor, rows: int, is_gain: bool = False) -> Estimate:
    """The value with Student's interval for as many rows; without one if rows are too few."""
    if not bool(torch.isfinite(value)):
        return UNDEFINED
    if not bool(torch.isfinite(error)) or rows < 2:
        return Estimate(float(value))
    reach, one_sided = (float(stdtrit(max(rows - 1, 1), level)) * float(error) for level in (0.975, 0.95))
    at_least = float(value) - one_sided if is_gain else None
    return Estimate(float(value), float(value) - reach, float(value) + reach, at_least)


def _within(estimate: Estimate, lowest: float, highest: float) -> Estimate:
    """A share lies between 0 and 1, and so do the ends of its interval."""
    if estimate.low is None or estimate.high is None:
        return estimate
    at_least = None if estimate.at_least is None else max(estimate.at_least, lowest)
    return Estimate(estimate.value, max(estimate.low, lowest), min(estimate.high, highest), at_least)


def site_records(
    data: Federation, decision: FitDecision, figures: SiteFigures, handed: "Handover", expectations: ExpectedGains
) -> tuple[SiteRecord, ...]:
    counts, rarer = data.train.count, data.class_counts("test").min(1)
    binary, classes = data.problem.kind == "binary", data.problem.class_labels

    def expected(name: str | None, k: int) -> float:
        return 0.0 if name is None or name == ALONE else float(decision.advantages[name].expected[k])

    fitted = {one.name for one in decision.fitted}
    calibrated = calibrations(data, handed.outputs)
    return tuple(
        SiteRecord(
            site, int(counts[k]), int(decision.validated[k]), int(figures.rows[k]),
            int(rarer.values[k]) if binary else None, chosen, together,
            expected(chosen, k), expected(together, k), figures.value(BASELINE, k), figures.value(ALONE, k),
            figures.value(ONE_MODEL if ONE_MODEL in fitted else None, k), figures.value(together, k),
            figures.value(HANDED, k), NO_GAIN if handed.shares_of(k).keys() == {ALONE} else figures.gain(HANDED, k),
            figures.gain(together, k),
            classes[int(rarer.indices[k])] if binary else "", gain_chosen=figures.gain(chosen, k),
            expected_gain=expectations.gains[k], shares=handed.shares_of(k), most_it_costs=handed.most_it_costs[k],
            set_rows=handed.sets[k].rows, covered=_finite(handed.sets[k].covered[SETS_SHOWN]),
            set_size=_finite(handed.sets[k].sizes[SETS_SHOWN]), calibration=calibrated[k],
        )
        for k, (site, chosen, together) in enumerate(zip(data.names, decision.chosen, decision.together, strict=True))
    )  # fmt: skip


def calibrations(data: Federation, outputs: Tensor) -> list[Calibration | None]:
    """Calibration of every site by outputs [T, C] of what it is handed, on its test rows."""
    problem, truth = data.problem, data.labels[data.test.rows].numpy()
    if problem.classifies:
        p = torch.softmax(outputs.double(), 1).numpy()
        predicted, true = (p[:, 1], truth == 1) if p.shape[1] == 2 else (p.max(1), p.argmax(1) == truth)
    elif problem.is_single_number:
        predicted, true = outputs.double().numpy()[:, 0], truth
    else:
        return [None] * data.num_clients
    owner = data.test.owner.numpy()
    return [_calibration(predicted[owner == k], true[owner == k].astype(np.float64)) for k in range(data.num_clients)]


def _calibration(predicted: Floats, true: Floats) -> Calibration | None:
    bound = certificates.gain_bound(true - predicted, "any")
    if bound is None or len(predicted) < FEWEST_IN_A_BIN:
        return None
    order = np.argsort(predicted, kind="stable")
    bins = []
    for rows in np.array_split(order, min(BINS, len(predicted) // FEWEST_IN_A_BIN)):
        error = float((true - predicted)[rows].std(ddof=1)) / math.sqrt(len(rows))
        bins.append((float(predicted[rows].mean()), float(true[rows].mean()), error, len(rows)))
    return Calibration(bound_estimate(bound), float(predicted.mean()), tuple(bins))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
