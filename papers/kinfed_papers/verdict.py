"""A verdict on a claim, how sure it is, and its figures in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtr

from kinfed.analysis import Interval, student_quantile
from kinfed.report.drawing import format_number
from kinfed_papers.recipe import Source

Status = Literal["holds", "does not hold", "exact tie", "unknown", "not testable", "not judged"]
DECIDED: tuple[Status, ...] = ("holds", "does not hold", "exact tie", "unknown")  # those that rest on intervals

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
    outlook: str = ""  # of a claim that is unknown: how many seeds would decide
    earlier: str = ""  # of a published verdict whose figures were not kept: the day it was measured
    limit: float = 0.0  # what the difference is held against, in shown units: -2 allows two points
    confidence: float = 0.95  # of the interval
    fewest_seeds: int = 0  # of all its comparisons; 0: not noted
    at_most: bool = False  # the limit is an upper one
    other_data: bool = False  # on another data set than the paper's
    draws: int = 1  # how often seeds were drawn for it: open ones are measured again, with other seeds
    length: str = ""  # rounds, where they are fewer than the paper's: 40 of 400 rounds


def by_chance(judged: Sequence[Verdict]) -> float:
    """How many claims would at most hold, and as many not hold, if each lay exactly on its border, at zero or at its
    limit. Intervals of one that was drawn twice are wide enough for both draws."""
    return ONE_SIDED * sum(verdict.status in DECIDED for verdict in judged)


def firm_verdicts(judged: Sequence[Verdict], level: float = 0.05) -> list[Verdict]:
    """Decided verdicts, with an error of at most `level` for all of them together (Holm's correction over all
    that rest on intervals). A claim that holds is as sure as its least sure margin; one that does not had as many
    chances as margins; both had as many as draws."""
    decided = [verdict for verdict in judged if verdict.status in DECIDED]
    ranked = sorted(decided, key=_chance)
    count = 0
    while count < len(ranked) and _chance(ranked[count]) <= level / (len(ranked) - count):
        count += 1
    return ranked[:count]


def _chance(verdict: Verdict) -> float:
    """Chance of an interval at least as far from zero without any true difference, on either side. One without width
    has a spread that its seeds do not show: nothing can be said of it."""
    margin = verdict.margin
    if margin is None or verdict.status not in ("holds", "does not hold") or margin.low == margin.high:
        return 1.0
    if min(margin.n, verdict.fewest_seeds or margin.n) < FIRM_SEEDS:
        return 1.0
    both_sides = 2 * chance_of_more(abs(student_t(margin, verdict.confidence)), margin.n)
    return min(1.0, both_sides * verdict.draws * (verdict.margins if verdict.status == "does not hold" else 1))


def joint_confidence(confidence: float, comparisons: int) -> float:
    """Confidence of each of several intervals, for `confidence` of all together (Bonferroni)."""
    return 1 - (1 - confidence) / comparisons


def chance_of_more(t: float, seeds: int) -> float:
    """P(T > t) of Student's t with the degrees of freedom of `seeds` seeds."""
    return float(stdtr(seeds - 1, -t))


def student_t(margin: Interval, confidence: float) -> float:
    """The mean in units of its standard error, from an interval with this confidence."""
    reach = margin.high - margin.mean
    if reach == 0:
        return math.copysign(math.inf, margin.mean) if margin.mean else 0.0
    return margin.mean / (reach / float(student_quantile(margin.n - 1, confidence)))


def certainty(verdict: Verdict) -> str:
    """How sure a verdict is by itself; of an open one, how many seeds would decide."""
    if verdict.status not in ("holds", "does not hold") or verdict.margin is None:
        return verdict.outlook.removesuffix(" would decide") or "–"
    if verdict.margin.low == verdict.margin.high:
        return "same in every seed"
    return "95 %" if verdict.draws == 1 else f"95 % in draw {verdict.draws}"


def margin_text(verdict: Verdict) -> str:
    """What decides, in the unit of the claim; "" if nothing does."""
    if verdict.margin is None:
        return ""
    return interval_text(verdict.margin, verdict.unit, verdict.limit, at_most=verdict.at_most)


def interval_text(margin: Interval, unit: str, limit: float = 0.0, *, at_most: bool = False) -> str:
    """What was measured with its interval, and the limit that it is held against; `margin` is how far it is on the
    right side of that limit. A difference has its sign, what may be `at_most` so much is a plain number."""
    mean, low, high = _figures(margin, limit, at_most)
    return f"{mean} [{low}, {high}] {unit}".rstrip() + _limit_text(limit, at_most)


def mean_text(margin: float, unit: str, limit: float = 0.0, *, at_most: bool = False) -> str:
    """The same without an interval."""
    mean, _, _ = _figures(Interval(margin, margin, margin, n=1), limit, at_most)
    return f"{mean} {unit}".rstrip() + _limit_text(limit, at_most)


def _figures(margin: Interval, limit: float, at_most: bool) -> tuple[str, str, str]:
    """Mean and ends of what was measured, all with the same decimals."""
    if at_most:
        values = (limit - margin.mean, limit - margin.high, limit - margin.low)
    else:
        values = (margin.mean + limit, margin.low + limit, margin.high + limit)
    mean, low, high = (round(value, 9) for value in values)
    digits = _digits((high - low) / 2)
    if low == high:  # as many as tell it from its limit
        digits = max(_digits(abs(mean)), len(f"{round(limit, 6):.6f}".rstrip("0").partition(".")[2]))
    shown = format_number if at_most else signed
    return shown(mean, digits), shown(low, digits), shown(high, digits)


def _limit_text(limit: float, at_most: bool) -> str:
    exact = f"{round(limit, 9):g}".replace("-", "−")
    if at_most:
        return f" (at most {exact})"
    return f" (limit {'+' if limit > 0 else ''}{exact})" if limit else ""


def _digits(size: float) -> int:
    """Decimals that show two digits of what is below one, and one decimal of everything else."""
    return max(1, min(6, 1 + math.ceil(-math.log10(size)))) if 0 < size < 1 else 1


def signed(value: float, digits: int = 1) -> str:
    return ("+" if value > 0 else "") + format_number(value, digits)
