"""Claims against measurements: paired differences over seeds, with Student's 95 % interval.

A claim with several margins (one for each rival) is

    reproduced    if the interval of every margin lies above zero;
    contradicted  if the interval of any margin lies below zero;
    tied          if every margin that does not lie above zero is exactly zero in every seed: more seeds change nothing;
    undecided     otherwise: some interval contains zero. The sentence says how many seeds would decide at the observed
                  spread: all margins above zero, or one below it.

Where some of the margins are missing (not run at this scale, not measured yet, or of a method that has diverged), the
others can contradict a claim; they cannot reproduce it.
No claim is judged from one seed, nor at the scale smoke. Every interval is judged by itself. By chance alone, with no
true difference anywhere, an interval lies above zero once in forty times, and below it as often: `by_chance` says how
many claims that would make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import MappingProxyType
from typing import Literal

from scipy.special import stdtr, stdtrit

from kinfed.report.formats import format_number
from kinfed.report.statistics import MOST_SEEDS, Interval, interval, seeds_to_decide
from kinfed.reproduce.recipe import BySeed, Claim, Recipe, Results, Scale, Source, Untestable

NOT_RUN = "not run at this scale"
NOT_TAKEN = "measured before this was asked: the figures it needs were not taken"
NO_COMMON_SEED = "its parts were measured with other seeds: no pairs to compare"

Status = Literal["reproduced", "contradicted", "tied", "undecided", "cannot be tested here", "not judged"]
DECIDED: tuple[Status, ...] = ("reproduced", "contradicted", "tied", "undecided")  # those that rest on intervals

ONE_SIDED = 0.025  # the chance that a 95 % interval of no difference lies above zero; as much again below it


@dataclass(frozen=True)
class Verdict:
    claim: str
    status: Status
    sentence: str  # the numbers behind it
    source: Source
    place: str = ""  # where the paper says it
    main: bool = False  # the paper stands on it; or a control or reading beside it
    margin: Interval | None = None  # the margin that decides, in shown units
    unit: str = ""
    margins: int = 0  # how many were judged
    rival: str = ""  # of several margins: whose it is that decides
    outlook: str = ""  # of an undecided claim: how many seeds would decide
    earlier: str = ""  # of a published verdict whose figures were not kept: the day it was measured

    @property
    def seeds(self) -> int:
        return 0 if self.margin is None else self.margin.n


@dataclass(frozen=True)
class WatchedResults(Results):
    """Results that remember what they were asked for: a claim is a function of them, and this tells its parts. They
    have no figures of a method that has diverged with any seed: the others are no fair choice of seeds."""

    asked: set[tuple[str, str]] = field(default_factory=set)  # (part, row); row "": whether the part is there

    def get(self, part: str, row: str, metric: str) -> BySeed:
        self.asked.add((part, self.aliases.get(row, (row, ""))[0]))
        return {} if self.diverged(part, row) else super().get(part, row, metric)

    def __contains__(self, part: object) -> bool:
        self.asked.add((str(part), ""))
        return super().__contains__(part)

    def unanswered(self) -> list[str]:
        """Parts that were asked for and lack what was asked, in order."""
        return sorted(
            {part for part, row in self.asked if part not in self.parts or (row and row not in self.parts[part])}
        )

    def all_diverged(self) -> list[tuple[str, str, list[int]]]:
        """(part, row, seeds) of what was asked for and has diverged, in order."""
        asked = ((part, row, self.diverged(part, row)) for part, row in sorted(self.asked))
        return [(part, row, seeds) for part, row, seeds in asked if seeds]

    def has_foreign_seeds(self) -> bool:
        """Whether two of the methods asked for have no seed in common."""
        methods = (self.parts[part][row] for part, row in self.asked if row in self.parts.get(part, {}))
        seeds = [{seed for by_seed in metrics.values() for seed in by_seed} for metrics in methods]
        return any(one.isdisjoint(other) for one, other in combinations(seeds, 2))


def verdicts(
    recipe: Recipe, results: Results, scale: Scale, gaps: Mapping[str, str] = MappingProxyType({})
) -> list[Verdict]:
    """One verdict per claim. The scale smoke is a trial of the code: it judges nothing. `gaps`: why parts of this scale
    lack figures; a claim that needs them is not judged by the rest."""
    row_names = {row: name for table in recipe.tables for row, name in table.rows.items()}
    verdict_list = []
    for claim in recipe.claims:
        if isinstance(claim, Untestable):
            verdict_list.append(Verdict(claim.text, "cannot be tested here", claim.reason, "paper", claim.place))
            continue
        verdict = _judge(claim, row_names, results, gaps)
        if scale == "smoke" and verdict.status != "not judged":
            trial = f"only a trial of the code: {verdict.sentence}"
            verdict = replace(verdict, status="not judged", sentence=trial, margin=None, margins=0)
        verdict_list.append(verdict)
    return verdict_list


def by_chance(judged: Sequence[Verdict]) -> tuple[float, float]:
    """How many claims would at most be reproduced, and contradicted, if no method differed from any other."""
    decided = [verdict for verdict in judged if verdict.status in DECIDED]
    return ONE_SIDED * len(decided), ONE_SIDED * sum(verdict.margins for verdict in decided)


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
    both_sides = 2 * float(stdtr(margin.n - 1, -abs(_t(margin))))
    return min(1.0, both_sides * (verdict.margins if verdict.status == "contradicted" else 1))


def _t(margin: Interval) -> float:
    """Student's t: the mean in units of its standard error."""
    reach = margin.high - margin.mean
    if reach == 0:
        return math.copysign(math.inf, margin.mean) if margin.mean else 0.0
    return margin.mean / (reach / float(stdtrit(margin.n - 1, 0.975)))


def certainty(verdict: Verdict) -> str:
    """How sure a verdict is by itself: 95 %, and less where one of several comparisons alone contradicts a claim; how
    many seeds would decide an open one."""
    if verdict.status not in ("reproduced", "contradicted") or verdict.margin is None:
        return verdict.outlook.removesuffix(" would decide") or "–"
    if verdict.margin.low == verdict.margin.high:
        return "same in every seed"
    return "95 %" if _chance(verdict) <= 0.05 else f"{100 * (1 - _chance(verdict)):.0f} %"


def margin_text(verdict: Verdict) -> str:
    """The margin that decides, in the unit of the claim; "" where there is none."""
    margin = verdict.margin
    if margin is None:
        return ""
    mean, low, high = (_signed(value) for value in (margin.mean, margin.low, margin.high))
    return f"{mean} [{low}, {high}] {verdict.unit}".rstrip()


def _judge(claim: Claim, row_names: Mapping[str, str], results: Results, gaps: Mapping[str, str]) -> Verdict:
    watched = WatchedResults(results.parts, results.aliases)
    by_rival = claim.margins(watched)
    margins = {rival: _without_noise(by_seed) for rival, by_seed in by_rival.items() if by_seed}
    gap_reasons = [gaps[part] for part in watched.unanswered() if part in gaps]
    gap_reasons += [
        f"{row_names.get(row, row)} has diverged with seed {', '.join(map(str, seeds))} ({part}): its figures mean "
        "nothing"
        for part, row, seeds in watched.all_diverged()
    ]
    reasons = [] if margins else gap_reasons
    if not gap_reasons and len(margins) < max(len(by_rival), 1):
        unmeasured = NOT_RUN if watched.unanswered() or not by_rival else NOT_TAKEN
        reasons = [NO_COMMON_SEED] if watched.has_foreign_seeds() else [] if margins else [unmeasured]
    unjudged = Verdict(claim.text, "not judged", "; ".join(reasons), claim.source, claim.place, claim.main)
    if reasons:
        return unjudged
    names = row_names if len(by_rival) > 1 else None
    intervals = {rival: margin for rival, by_seed in margins.items() if (margin := interval(by_seed)) is not None}
    if len(intervals) < len(margins):
        means = _join({rival: _mean_text(by_seed, claim) for rival, by_seed in margins.items()}, names)
        one_seed = any(len(by_seed) == 1 for by_seed in margins.values())
        reason = "one seed is no evidence" if one_seed else "not all figures are finite"
        return replace(unjudged, sentence=f"{reason}: {means}")
    status, telling = _status(intervals)
    if gap_reasons and status != "contradicted":
        return replace(unjudged, sentence="; ".join(gap_reasons))
    opening, outlook = _opening(status, intervals, len(telling)), ""
    if len(margins) < len(by_rival) and status != "contradicted":
        opening, status = opening.removeprefix("yes, "), "undecided"
        outlook = f"{len(by_rival) - len(margins)} of {len(by_rival)} comparisons were not run"
    elif status == "undecided":
        outlook = _seeds_text(telling)
    figures = _join({rival: _interval_text(margin, claim) for rival, margin in telling.items()}, names)
    sentence = opening + figures + (f"; {outlook}" if outlook else "")
    sentence += f" ({min(margin.n for margin in intervals.values())} seeds, 95 % interval)"
    rival, deciding = _deciding(status, telling)
    return Verdict(
        claim.text,
        status,
        sentence,
        claim.source,
        claim.place,
        claim.main,
        replace(deciding, **{end: getattr(deciding, end) * claim.factor for end in ("mean", "low", "high")}),
        claim.unit,
        len(intervals),
        "" if names is None else names.get(rival, rival),
        outlook,
    )


def _status(intervals: Mapping[str, Interval]) -> tuple[Status, dict[str, Interval]]:
    """The verdict, and the margins that tell why: the least sure of a claim that holds, else those against it."""
    open_ones = {rival: margin for rival, margin in intervals.items() if margin.low <= 0}
    if not open_ones:
        least_sure = min(intervals, key=lambda rival: _t(intervals[rival]))
        return "reproduced", {least_sure: intervals[least_sure]}
    below = {rival: margin for rival, margin in open_ones.items() if margin.high < 0}
    if below:
        return "contradicted", below
    if all(margin.low == margin.high == 0 for margin in open_ones.values()):
        return "tied", open_ones
    return "undecided", open_ones


def _deciding(status: Status, telling: Mapping[str, Interval]) -> tuple[str, Interval]:
    """Of the margins that tell why, the one that settles it: the surest of those against a claim, the least sure of
    those for it, and of an open claim the one that says how many seeds would decide."""
    if status != "undecided":
        return min(telling.items(), key=lambda item: _t(item[1]))
    if below := {rival: margin for rival, margin in telling.items() if margin.mean < 0}:
        return min(below.items(), key=lambda item: seeds_to_decide(item[1]) or math.inf)
    return max(telling.items(), key=lambda item: seeds_to_decide(item[1]) or math.inf)


def _opening(status: Status, intervals: Mapping[str, Interval], telling: int) -> str:
    above = sum(margin.low > 0 for margin in intervals.values())
    of_all = f"{above} of {len(intervals)}"
    if status == "reproduced":
        return "yes, " if len(intervals) == 1 else f"yes, above all {len(intervals)}; least sure: "
    if len(intervals) == 1:
        return {"contradicted": "no, ", "tied": "equal in every seed: ", "undecided": ""}[status]
    if status == "contradicted":
        return f"no, below {telling} and above {of_all}: "
    return f"above {of_all}; " + ("equal in every seed: " if status == "tied" else "open: ")


def _seeds_text(open_margins: Mapping[str, Interval]) -> str:
    """How many seeds would decide. One margin below zero contradicts; otherwise all must rise above it."""
    below = [seeds_to_decide(margin) for margin in open_margins.values() if margin.mean < 0]
    if below:
        enough = [count for count in below if count is not None]
        count = min(enough) if enough else None
    else:
        counts = [seeds_to_decide(margin) for margin in open_margins.values()]
        count = None if None in counts else max(count for count in counts if count is not None)
    if count is None:
        return f"not even {MOST_SEEDS:,} seeds would decide"
    return f"about {count} seeds would decide"


def _without_noise(by_seed: BySeed) -> BySeed:
    """Without what floating point adds: 0.82 - 0.80 - 0.02 is zero."""
    return {seed: round(value, 10) for seed, value in by_seed.items()}


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
