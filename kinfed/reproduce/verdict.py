"""A verdict on a claim, how sure it is, and its figures in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtr

from kinfed.report.formats import format_number
from kinfed.report.statistics import Interval, student_quantile
from kinfed.reproduce.recipe import Source

Status = Literal["reproduced", "contradicted", "tied", "undecided", "cannot be tested here", "not judged"]
DECIDED: tuple[Status, ...] = ("reproduced", "contradicted", "tied", "undecided")  # those that rest on intervals

ONE_SIDED = 0.025  # the chance that a 95 % interval of no difference lies above zero; as much again below it
FIRM_SEEDS = 5  # with fewer, far tails of Student's t rest on two or three degrees of freedom


@dataclass(frozen=True)
class Verdict:
    claim: str
    status: Status
    sentence: str  # the numbers behind it
    source: Source
    place: str = ""  # where the paper says it
    main: bool = False  # the paper stands on it; or a control or reading beside it
    margin: Interval | None = None  # what decides: how far it is beyond the limit, in shown units
    unit: str = ""
    margins: int = 0  # how many were judged
    rival: str = ""  # of several margins: whose it is that decides
    outlook: str = ""  # of an undecided claim: how many seeds would decide
    earlier: str = ""  # of a published verdict whose figures were not kept: the day it was measured
    limit: float = 0.0  # what the difference is held against, in shown units: -2 allows two points
    confidence: float = 0.95  # of the interval
    fewest_seeds: int = 0  # of all its comparisons; 0: not noted
    at_most: bool = False  # the limit is an upper one
    other_data: bool = False  # at the scale paper: on data that stand in for the paper's


def by_chance(judged: Sequence[Verdict]) -> float:
    """How many claims would at most be reproduced, and as many contradicted, if each lay exactly on its border, at zero
    or at its limit."""
    return ONE_SIDED * sum(verdict.status in DECIDED for verdict in judged)


def firm_verdicts(judged: Sequence[Verdict], level: float = 0.05) -> list[Verdict]:
    """Those reproduced or contradicted that hold together with an error of at most `level` (Holm's correction over all
    that rest on intervals). A reproduced claim is as sure as its least sure margin; a contradicted one had as many
    chances as margins."""
    decided = [verdict for verdict in judged if verdict.status in DECIDED]
    ranked = sorted(decided, key=_chance)
    count = 0
    while count < len(ranked) and _chance(ranked[count]) <= level / (len(ranked) - count):
        count += 1
    return ranked[:count]


def _chance(verdict: Verdict) -> float:
    """Of an interval at least as far from zero without any true difference, on either side. One without width has a
    spread that its seeds do not show: nothing can be said of it."""
    margin = verdict.margin
    if margin is None or verdict.status not in ("reproduced", "contradicted") or margin.low == margin.high:
        return 1.0
    if min(margin.n, verdict.fewest_seeds or margin.n) < FIRM_SEEDS:
        return 1.0
    both_sides = 2 * chance_of_more(abs(student_t(margin, verdict.confidence)), margin.n)
    return min(1.0, both_sides * (verdict.margins if verdict.status == "contradicted" else 1))


def joint_confidence(confidence: float, comparisons: int) -> float:
    """Of each of several intervals, for `confidence` of all together (Bonferroni)."""
    return 1 - (1 - confidence) / comparisons


def chance_of_more(t: float, seeds: int) -> float:
    """P(T > t) of Student's t with the degrees of freedom of so many seeds."""
    return float(stdtr(seeds - 1, -t))


def student_t(margin: Interval, confidence: float) -> float:
    """The mean in units of its standard error, from an interval with this confidence."""
    reach = margin.high - margin.mean
    if reach == 0:
        return math.copysign(math.inf, margin.mean) if margin.mean else 0.0
    return margin.mean / (reach / float(student_quantile(margin.n - 1, confidence)))


def certainty(verdict: Verdict) -> str:
    """How sure a verdict is by itself; of an open one, how many seeds would decide."""
    if verdict.status not in ("reproduced", "contradicted") or verdict.margin is None:
        return verdict.outlook.removesuffix(" would decide") or "–"
    return "same in every seed" if verdict.margin.low == verdict.margin.high else "95 %"


def margin_text(verdict: Verdict) -> str:
    """What decides, in the unit of the claim; "" where there is nothing."""
    if verdict.margin is None:
        return ""
    return interval_text(verdict.margin, verdict.unit, verdict.limit, at_most=verdict.at_most)


def interval_text(margin: Interval, unit: str, limit: float = 0.0, *, at_most: bool = False) -> str:
    """What was measured with its interval, and the limit that it is held against; `margin` is how far it is on the
    right side of that limit. A difference has its sign, what may be `at_most` so much is a plain number."""
    digits = _digits((margin.high - margin.low) / 2 or abs(margin.mean))
    if at_most:
        sizes = (round(limit - value, 9) for value in (margin.mean, margin.high, margin.low))
        mean, low, high = (format_number(size, digits) for size in sizes)
        ending = f" (at most {_exact(limit)})"
    else:
        mean, low, high = (signed(round(value + limit, 9), digits) for value in (margin.mean, margin.low, margin.high))
        ending = f" (limit {'+' if limit > 0 else ''}{_exact(limit)})" if limit else ""
    return f"{mean} [{low}, {high}] {unit}".rstrip() + ending


def _digits(size: float) -> int:
    """Decimals that show two digits of what is below one, and one decimal of everything else."""
    return max(1, min(6, 1 + math.ceil(-math.log10(size)))) if 0 < size < 1 else 1


def _exact(limit: float) -> str:
    return f"{round(limit, 9):g}".replace("-", "−")


def signed(value: float, digits: int = 1) -> str:
    return ("+" if value > 0 else "") + format_number(value, digits)
