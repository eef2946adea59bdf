"""The result of a search over sites that share no rows: of one site, for its own page, and of all, for the consortium.

A site's result has all of its figures and stays there. Of the others it has nothing, and the consortium's result has of
every site what it takes and its gain on its test rows, with the interval: what one sentence needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.data import Problem, encodings
from kinfed.engine import Metric
from kinfed.runs import baseline_name
from kinfed.tabular.decision import Advantage, FitDecision, advantage, judged_test, replicates_for
from kinfed.tabular.fit_result import ColumnWorth, ContenderRecord, Estimate, FitResult, SiteRecord
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.handover import CERTIFIED, OutputsOfAll, plain_handover, residual_variance, single_handover
from kinfed.tabular.home_search import HomeSearch, SiteChoices
from kinfed.tabular.portfolio import ALONE, BASELINE, ONE_MODEL, Contender, Try
from kinfed.tabular.site_figures import (
    HANDED,
    NO_GAIN,
    UNDEFINED,
    ExpectedGains,
    SiteFigures,
    bound_estimate,
    judged_baseline,
    site_records,
)
from kinfed.theory import certificates

AT_HOME = "Figures of a site are on a page of its own, which has not left it."


@dataclass(frozen=True)
class SiteOutcome:
    """What a site has of a search, and what it says of that."""

    result: FitResult  # stays
    taken: str  # a contender
    gain: Estimate  # of what it takes, on its test rows
    gain_chosen: Estimate  # of what was chosen
    test_gain: tuple[float, float]  # of that in the score that chose, and the variance


def site_result(
    home: HomeSearch, contenders: Sequence[ContenderRecord], terms: Mapping[str, Any], test: Mapping[str, Tensor],
    validated: Mapping[str, Tensor], settings: FitSettings, number: int, own: Sequence[encodings.OwnColumn] = (),
) -> SiteOutcome:  # fmt: skip
    """The result of one site. `terms` is what the server says to it: what was `chosen`
    for it and what is best `together`, `expected` advantages, and numbers of all sites. Outputs `test` [T, C] are those
    of the fitted contenders on its test rows, `validated` [V, C] those of the folds' models."""
    data, problem = home.data, home.data.problem
    metric, choice_metric = settings.metric_for(problem), settings.choice_metric_for(problem)
    known = {
        one.name: Contender(one.name, one.method, "server" if one.model == "server" else "personal")
        for one in contenders
    }
    unknown = torch.full((1,), torch.nan, dtype=torch.float64)
    advantages = {
        one.name: Advantage(one.mean, one.spread, torch.tensor([terms["expected"][one.name]]).double(), unknown)
        for one in contenders if one.name != ALONE
    }  # fmt: skip
    decision = FitDecision(
        list(known.values()), {one.name: Try(0, one.method, one.network, one.options) for one in contenders},
        {one.name: one.validation for one in contenders}, advantages, [terms["chosen"]], [terms["together"]],
        torch.tensor([len(home.places)]),
    )  # fmt: skip
    ids = torch.tensor([number])
    names = [one.name for one in contenders if one.name in test]
    judged = {name: judged_test(test[name], data) for name in names}
    figures = SiteFigures(metric, {**judged, BASELINE: judged_baseline(data)}, ids, terms["test_rows"])
    taken: str = terms["chosen"]
    if settings.deploy == CERTIFIED and not figures.gain(taken, 0).is_shown:
        taken = ALONE
    one_number = problem.is_single_number
    rows, owner = data.train.rows[home.places], data.train.owner[home.places]
    variance = residual_variance(validated[ALONE], data, rows, owner) if one_number else None
    outputs = OutputsOfAll.of_rows(test, names, data, data.test.rows, data.test.owner, variance)
    hand = plain_handover if one_number or problem.classifies else single_handover
    handed = hand(names, [taken], outputs)
    judged[HANDED] = judged_test(handed.outputs, data)
    figures = SiteFigures(metric, {**judged, BASELINE: judged_baseline(data)}, ids, terms["test_rows"])
    nothing_pooled = ExpectedGains(0.0, [UNDEFINED])  # a site does not know the test rows of the others
    sites = site_records(data, decision, figures, handed, nothing_pooled)
    by_sites, by_rows = figures.overall()
    result = FitResult(
        problem=problem, metric=metric.name, table=data.names[0], settings=settings.dump(), trials=settings.trials,
        left_out=dict(terms["left_out"]), contenders=tuple(contenders), sites=sites, overall=by_sites,
        overall_by_rows=by_rows, choice_metric=choice_metric.name, deploy=settings.deploy, notes=(),
        statistics_bytes=terms["statistics_bytes"], baseline=baseline_name(problem), newcomer=ALONE,
        class_rows=tuple(data.class_counts().sum(0).tolist()) if problem.has_classes else (),
        target=terms["target"], apart="site", own_columns=ColumnWorth.of_sites(data.names, [own]),
    )  # fmt: skip
    chosen, alone = judged[terms["chosen"]], judged[ALONE]
    seen = advantage(choice_metric, chosen, alone, replicates=replicates_for(terms["test_rows"]), ids=ids)
    gain, gain_chosen = (
        NO_GAIN if name == ALONE else figures.gain(of, 0, within=False)
        for name, of in ((taken, HANDED), (terms["chosen"], terms["chosen"]))
    )
    return SiteOutcome(result, taken, gain, gain_chosen, (float(seen.seen[0]), float(seen.error[0]) ** 2))


def consortium_result(
    problem: Problem, settings: FitSettings, contenders: Sequence[ContenderRecord], names: Sequence[str],
    choices: SiteChoices, answers: Sequence[Mapping[str, Any]], left_out: Mapping[str, str], statistics_bytes: int,
    target: str,
) -> FitResult:  # fmt: skip
    """The result of all sites, from what they say of themselves: rows, what each takes, and its gain."""
    seen, variance = (np.array([answer["test_gain"][place] for answer in answers], float) for place in (0, 1))
    rows = np.array([answer["rows"][2] for answer in answers], float)
    expectations = ExpectedGains.pooled(choices.chosen, choices.advantages, seen, variance, rows)
    sites = []
    for k, (name, answer) in enumerate(zip(names, answers, strict=True)):
        train, validated, test = answer["rows"]
        chosen, together = choices.chosen[k], choices.together[k]

        def expected(one: str | None, k: int = k) -> float:
            return 0.0 if one is None or one == ALONE else float(choices.advantages[one].expected[k])

        sites.append(SiteRecord(
            name, train, validated, test, None, chosen, together, expected(chosen), expected(together), UNDEFINED,
            UNDEFINED, UNDEFINED, UNDEFINED, UNDEFINED, Estimate(**answer["gain"]), UNDEFINED,
            gain_chosen=Estimate(**answer["gain_chosen"]), expected_gain=expectations.gains[k],
            shares={answer["taken"]: 1.0},
        ))  # fmt: skip
    gains = [site.gain.value for site in sites if site.gain.value is not None]
    bound = certificates.mean_over_sites(gains)
    metric: Metric = settings.metric_for(problem)
    means = {name: one.mean for name, one in choices.advantages.items()}
    best = max(means, key=lambda name: means[name], default=ALONE)
    return FitResult(
        problem=problem, metric=metric.name, table=f"{len(names)} sites", settings=settings.dump(),
        trials=settings.trials, left_out=dict(left_out), contenders=tuple(contenders), sites=tuple(sites),
        overall=UNDEFINED if bound is None else bound_estimate(bound),
        choice_metric=settings.choice_metric_for(problem).name, deploy=settings.deploy, notes=(AT_HOME,),
        statistics_bytes=statistics_bytes, baseline=baseline_name(problem), target=target,
        drift=expectations.drift, apart="consortium",
        own_columns=tuple(
            ColumnWorth(column, name, held, gain, error)
            for name, answer in zip(names, answers, strict=True) for column, held, gain, error in answer["own_columns"]
        ),
        newcomer=ONE_MODEL if means.get(best, 0.0) > 0 and ONE_MODEL in means else ALONE,
    )  # fmt: skip
