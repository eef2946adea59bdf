"""Claims against measurements: paired differences over seeds, with Student's 95 % interval.

A claim is *reproduced* if the interval of every margin lies above zero, and *not reproduced* otherwise, with the
reason: the difference has the other sign, or the interval contains zero. No claim is judged from one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kinfed.report.formats import format_number
from kinfed.report.statistics import Interval, interval
from kinfed.reproduce.recipe import Claim, Recipe, Results, Scale, Source, Untestable

NOT_RUN = "this scale does not run what it needs"

Status = Literal["reproduced", "not reproduced", "cannot be tested here", "not judged"]


@dataclass(frozen=True)
class Verdict:
    claim: str
    status: Status
    sentence: str  # the numbers behind it
    source: Source


def verdicts(recipe: Recipe, results: Results, scale: Scale) -> list[Verdict]:
    """One verdict per claim. The scale smoke is a trial of the code: it judges nothing."""
    row_names = {row: name for table in recipe.tables for row, name in table.rows.items()}
    verdict_list = []
    for claim in recipe.claims:
        if isinstance(claim, Untestable):
            verdict_list.append(Verdict(claim.text, "cannot be tested here", claim.reason, "paper"))
            continue
        verdict = _judge(claim, row_names, results)
        if scale == "smoke" and verdict.status != "not judged":
            verdict = replace(verdict, status="not judged", sentence=f"only a trial of the code: {verdict.sentence}")
        verdict_list.append(verdict)
    return verdict_list


def _judge(claim: Claim, row_names: Mapping[str, str], results: Results) -> Verdict:
    margins = {rival: by_seed for rival, by_seed in claim.margins(results).items() if by_seed}
    if not margins:
        return Verdict(claim.text, "not judged", NOT_RUN, claim.source)
    names = row_names if len(margins) > 1 else None
    intervals = {rival: margin for rival, by_seed in margins.items() if (margin := interval(by_seed)) is not None}
    if len(intervals) < len(margins):
        means = _join({rival: _mean_text(by_seed, claim) for rival, by_seed in margins.items()}, names)
        one_seed = any(len(by_seed) == 1 for by_seed in margins.values())
        reason = "one seed is no evidence" if one_seed else "not all figures are finite"
        return Verdict(claim.text, "not judged", f"{reason}: {means}", claim.source)
    ending = f" ({min(margin.n for margin in intervals.values())} seeds, 95 % interval)"
    failed = {rival: margin for rival, margin in intervals.items() if margin.low <= 0}
    if not failed:
        nearest = min(intervals, key=lambda rival: intervals[rival].low)
        opening = "yes, " if len(intervals) == 1 else f"yes, above all {len(intervals)}; nearest: "
        figures = _join({nearest: _interval_text(intervals[nearest], claim)}, names)
        return Verdict(claim.text, "reproduced", opening + figures + ending, claim.source)
    wrong_sign = any(margin.mean <= 0 for margin in failed.values())
    opening = "no, " if wrong_sign else "not clear, an interval contains zero: "
    if len(intervals) > 1:
        opening += f"above {len(intervals) - len(failed)} of {len(intervals)}; "
    figures = _join({rival: _interval_text(margin, claim) for rival, margin in failed.items()}, names)
    return Verdict(claim.text, "not reproduced", opening + figures + ending, claim.source)


def _join(texts: Mapping[str, str], names: Mapping[str, str] | None) -> str:
    """The texts by rival, each with the rival's name where there are several."""
    if names is None:
        return "; ".join(texts.values())
    return "; ".join(f"{text} against {names.get(rival, rival)}" for rival, text in texts.items())


def _mean_text(by_seed: Mapping[int, float], claim: Claim) -> str:
    return f"{_signed(math.fsum(by_seed.values()) / len(by_seed) * claim.factor)} {claim.unit}".rstrip()


def _interval_text(margin: Interval, claim: Claim) -> str:
    mean, low, high = (_signed(value * claim.factor) for value in (margin.mean, margin.low, margin.high))
    return f"{mean} [{low}, {high}] {claim.unit}".rstrip()


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + format_number(value, 1 if abs(value) >= 0.1 or value == 0 else 3)
