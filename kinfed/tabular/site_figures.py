"""Figures and gains of every site, with their intervals.

Figures and gains are on test rows that nothing was chosen by. An interval is value ± t · s with the standard deviation
s of bootstrap draws of the site's test rows and Student's t for as many rows; of metrics that compare two classes
(`Metric.by_class`), for as many as the rarer has. It ends where the metric does: no share is above 1. Of a gain both
models are judged on the same draws. The mean over sites weighs every site by 1 / (τ² + s²), with Student's t for as
many sites.
"""

from collections.abc import Mapping

import torch
from scipy.special import stdtrit
from torch import Tensor

from kinfed.data import Federation
from kinfed.engine import Judged, Metric, bootstrap_draws, deviation_of_draws
from kinfed.runs import RunOutcome, constant_outputs
from kinfed.tabular.decision import FitDecision, advantage, judged_rows, replicates_for, shrunk, values
from kinfed.tabular.fit_result import Estimate, SiteRecord
from kinfed.tabular.portfolio import ALONE, BASELINE, ONE_MODEL
from kinfed.tabular.search import outputs_on_test

UNDEFINED, NO_GAIN = Estimate(None), Estimate(0.0, 0.0, 0.0)


class SiteFigures:
    """Figures of all fitted contenders, and of the baseline, at all sites."""

    def __init__(self, metric: Metric, judged: Mapping[str, Judged]) -> None:
        self.metric = metric
        alone = judged[ALONE]
        ids, self.rows = torch.arange(alone.clients), torch.from_numpy(alone.examples)
        self._support = metric.support(alone)  # rows behind a site's figure
        replicates = replicates_for(int(self.rows.sum()))
        draws = {name: bootstrap_draws(metric, one, ids, replicates=replicates) for name, one in judged.items()}
        self._values = {name: values(metric, one) for name, one in judged.items()}
        self._errors = {name: deviation_of_draws(one) for name, one in draws.items()}
        self._gains = {
            name: advantage(metric, one, alone, draws[ALONE]) for name, one in judged.items() if name != ALONE
        }

    def value(self, name: str | None, site: int) -> Estimate:
        if name is None:
            return UNDEFINED
        estimate = _estimate(self._values[name][site], self._errors[name][site], int(self._support[site]))
        return _within(estimate, 0.0, 1.0) if self.metric.percent else estimate

    def gain(self, name: str | None, site: int) -> Estimate:
        """The gain over learning alone."""
        if name is None or name == ALONE:
            return NO_GAIN
        one = self._gains[name]
        estimate = _estimate(one.seen[site], one.error[site], int(self._support[site]))
        if not self.metric.percent:
            return estimate
        alone = float(self._values[ALONE][site])
        ends = (-alone, 1 - alone) if self.metric.higher_is_better else (alone - 1, alone)
        return _within(estimate, *ends)

    def overall(self, chosen: list[str]) -> Estimate:
        """The mean gain over sites of what each has chosen."""
        moved = [(self._gains[name], site) for site, name in enumerate(chosen) if name != ALONE]
        if not moved:
            return NO_GAIN
        seen, error = (torch.stack([getattr(one, part)[k] for one, k in moved]) for part in ("seen", "error"))
        # Who stays alone gains nothing, for sure; the mean is over all sites.
        pooled, known = shrunk(seen, error), torch.isfinite(seen) & torch.isfinite(error)
        if not bool(known.any()):
            return UNDEFINED
        share = len(moved) / len(chosen)
        variance = 1 / (1 / (pooled.spread**2 + error[known].square())).sum()
        reach, mean = _reach(float(variance.sqrt()), int(known.sum())), pooled.mean
        return Estimate(share * mean, share * (mean - reach), share * (mean + reach))


def _estimate(value: Tensor, error: Tensor, rows: int) -> Estimate:
    """The value with Student's interval for as many rows; without one where there are too few."""
    if not bool(torch.isfinite(value)):
        return UNDEFINED
    if not bool(torch.isfinite(error)) or rows < 2:
        return Estimate(float(value))
    reach = _reach(float(error), rows)
    return Estimate(float(value), float(value) - reach, float(value) + reach)


def _within(estimate: Estimate, lowest: float, highest: float) -> Estimate:
    """A share lies between 0 and 1, and so do the ends of its interval."""
    if estimate.low is None or estimate.high is None:
        return estimate
    return Estimate(estimate.value, max(estimate.low, lowest), min(estimate.high, highest))


def _reach(error: float, values: int) -> float:
    return float(stdtrit(max(values - 1, 1), 0.975)) * error


def judged_test(outputs: Tensor, data: Federation) -> Judged:
    return judged_rows(outputs, data.test.rows, data.test.owner, data)


def judged_baseline(data: Federation) -> Judged:
    """Every site's test rows by the shares of classes or the mean of its own training rows (kinfed.runs.baseline): what
    it takes no model to reach."""
    outputs = constant_outputs(data, torch.arange(data.num_clients))[data.test.owner]
    return judged_test(data.problem.restored(outputs) if data.problem.is_regression else outputs, data)


def figures_on_test(
    metric: Metric, data: Federation, decision: FitDecision, fitted: Mapping[str, RunOutcome]
) -> SiteFigures:
    judged = {one.name: judged_test(outputs_on_test(fitted[one.name], one.name, one), data) for one in decision.fitted}
    return SiteFigures(metric, {**judged, BASELINE: judged_baseline(data)})


def site_records(data: Federation, decision: FitDecision, figures: SiteFigures) -> tuple[SiteRecord, ...]:
    counts, rarer = data.train.count, data.class_counts("test").min(1)
    binary, classes = data.problem.kind == "binary", data.problem.class_labels

    def expected(name: str | None, k: int) -> float:
        return 0.0 if name is None or name == ALONE else float(decision.advantages[name].expected[k])

    fitted = {one.name for one in decision.fitted}
    return tuple(
        SiteRecord(
            site, int(counts[k]), int(decision.validated[k]), int(figures.rows[k]),
            int(rarer.values[k]) if binary else None, chosen, together,
            expected(chosen, k), expected(together, k), figures.value(BASELINE, k), figures.value(ALONE, k),
            figures.value(ONE_MODEL if ONE_MODEL in fitted else None, k), figures.value(together, k),
            figures.value(chosen, k), figures.gain(chosen, k), figures.gain(together, k),
            classes[int(rarer.indices[k])] if binary else "",
        )
        for k, (site, chosen, together) in enumerate(zip(data.names, decision.chosen, decision.together, strict=True))
    )  # fmt: skip
