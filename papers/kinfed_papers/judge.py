"""Claims against measurements: paired differences over seeds, with Student's interval.

A claim with several margins (one for each rival) is

    holds          if the 95 % interval of every margin lies above zero;
    does not hold  if the interval of any margin lies below zero, with 95 % for all its margins together: each is taken
                   wide enough for their number (Bonferroni). With nine rivals that differ in nothing, one of nine plain
                   95 % intervals would lie below zero in a fifth of all cases;
    exact tie      if every margin that does not lie above zero is exactly zero in every seed: more seeds change
                   nothing;
    unknown        otherwise: some interval contains zero. The sentence says how many seeds would decide at the observed
                   spread: all margins above zero, or one below it.

Where seeds were drawn a second time, because the first left the claim open, both draws had the chance to decide: every
interval is widened so that 95 % hold for all draws together. A claim that was measured in less than half of the
paper's rounds is never said not to hold: it is unknown, "not at the paper's length".

A margin with a negative mean is shown with the interval that could contradict, others with the plain one, so that what
is seen is what decides. Where some of the margins are missing (not run at this scale, not measured yet, or of a method
that has diverged), the others can speak against a claim; they cannot make it hold.
No claim is judged from one seed, nor at the scale smoke. Claims are judged each by itself. If every claim lay
exactly on its border, at zero or at its limit, one in forty at most would hold by chance, and as many would not:
`by_chance` says how many that would make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import Literal

from kinfed.analysis import MOST_SEEDS, Interval, interval, seeds_to_decide
from kinfed_papers.recipe import BySeed, Claim, Recipe, Results, RunPart, Scale, Untestable
from kinfed_papers.verdict import (
    Status,
    Verdict,
    chance_of_more,
    interval_text,
    joint_confidence,
    mean_text,
    student_t,
)

NOT_RUN = "not run at this scale"
NOT_TAKEN = "measured before this was added: the figures it needs were not recorded"
NO_COMMON_SEED = "its parts were measured with different seeds, so there are no pairs to compare"

PLAIN = 0.95  # confidence of one interval
DIGITS = 10  # of differences: what floating point adds lies below them


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
        seeds = ({seed for by_seed in metrics.values() for seed in by_seed} for metrics in methods)
        return any(one.isdisjoint(other) for one, other in combinations(filter(None, seeds), 2))


def verdicts(
    recipe: Recipe,
    results: Results,
    scale: Scale,
    gaps: Mapping[str, str] = MappingProxyType({}),
    draws: Mapping[str, int] = MappingProxyType({}),
) -> list[Verdict]:
    """One verdict per claim. The scale smoke is a trial of the code: it judges nothing. `gaps`: why parts of this scale
    lack figures; a claim that needs them is not judged by the rest. `draws`: how often seeds were drawn for a part."""
    row_names = {row: name for table in recipe.tables for row, name in table.rows.items()}
    lengths = shorter_parts(recipe, scale)
    verdict_list = []
    for claim in recipe.claims:
        if isinstance(claim, Untestable):
            verdict_list.append(Verdict(claim.text, "not testable", claim.reason, "paper", claim.place))
            continue
        watched = WatchedResults(results.parts, results.aliases)
        verdict = _judge(claim, row_names, watched, gaps, draws)
        parts = {part for part, _ in watched.asked}
        verdict = replace(verdict, other_data=not parts.isdisjoint(recipe.other_data))
        if shortened := [lengths[part] for part in sorted(parts & lengths.keys())]:
            verdict = _at_length(verdict, min(shortened, key=lambda length: length[0] / length[1]))
        if scale == "smoke" and verdict.status != "not judged":
            trial = f"only a trial of the code: {verdict.sentence}"
            verdict = replace(verdict, status="not judged", sentence=trial, margin=None, margins=0)
        verdict_list.append(verdict)
    return verdict_list


def shorter_parts(recipe: Recipe, scale: Scale) -> dict[str, tuple[int, int]]:
    """Rounds of this scale and of the paper, of parts that have fewer than the paper."""
    here, paper = (
        {
            part.name: part.settings["rounds"]
            for part in parts
            if isinstance(part, RunPart) and "rounds" in part.settings
        }
        for parts in (recipe.parts(scale), recipe.parts("paper"))
    )
    return {name: (count, paper[name]) for name, count in here.items() if count < paper.get(name, 0)}


def _at_length(verdict: Verdict, length: tuple[int, int]) -> Verdict:
    """The verdict with the rounds it rests on; a claim is not refuted by a fraction of the paper's rounds."""
    rounds, of_paper = length
    verdict = replace(verdict, length=f"{rounds} of {of_paper} rounds")
    if verdict.status != "does not hold" or 2 * rounds >= of_paper:
        return verdict
    outlook = f"not at the paper’s length: {verdict.length}"
    return replace(verdict, status="unknown", outlook=outlook, sentence=f"{verdict.sentence}; {outlook}")


@dataclass(frozen=True)
class Comparisons:
    """The margins of one claim and what they say, in stored units."""

    margins: Mapping[str, BySeed]  # by rival, above zero on the right side of the claim's limit
    draws: int = 1  # of seeds

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Intervals that decide, by rival; rivals without an interval (one seed, figures that are not finite) are left
        out."""
        by_rival = {rival: interval(by_seed, self.confidence(rival)) for rival, by_seed in self.margins.items()}
        return {rival: margin for rival, margin in by_rival.items() if margin is not None}

    def confidence(self, rival: str) -> float:
        """Confidence of the interval that decides: one that could speak against the claim is to hold for all margins
        together, and every one for all draws of seeds."""
        return joint_confidence(PLAIN, self.draws * (1 if self._total(rival) > 0 else len(self.margins)))

    def is_joint(self, rival: str) -> bool:
        """Whether the interval is one of several that hold together."""
        return self.confidence(rival) > joint_confidence(PLAIN, self.draws)

    def is_below(self, rival: str) -> bool:
        return self._total(rival) < 0

    def chance(self, rival: str, side: Literal[1, -1]) -> float:
        """Chance of a margin as far above zero (below it: side -1) without a true difference, whatever its number of
        seeds."""
        margin = self.intervals[rival]
        return chance_of_more(side * student_t(margin, self.confidence(rival)), margin.n)

    def seeds_to_decide(self, rival: str) -> float:
        return seeds_to_decide(self.intervals[rival], self.confidence(rival)) or math.inf

    def _total(self, rival: str) -> float:
        return round(sum(self.margins[rival].values()), DIGITS)


def _judge(
    claim: Claim,
    row_names: Mapping[str, str],
    watched: WatchedResults,
    gaps: Mapping[str, str],
    draws: Mapping[str, int],
) -> Verdict:
    by_rival = claim.margins(watched)
    drawn = max((draws.get(part, 1) for part, _ in watched.asked), default=1)
    margins = {rival: _margin(claim, by_seed) for rival, by_seed in by_rival.items() if by_seed}
    gap_reasons = [gaps[part] for part in watched.unanswered() if part in gaps]
    gap_reasons += [
        f"{row_names.get(row, row)} has diverged with seed {', '.join(map(str, seeds))} ({part}): its figures mean "
        "nothing"
        for part, row, seeds in watched.all_diverged()
    ]
    if not gap_reasons and len(margins) < max(len(by_rival), 1):
        if watched.has_foreign_seeds():
            gap_reasons = [NO_COMMON_SEED]
        elif not margins:
            gap_reasons = [NOT_RUN if watched.unanswered() or not by_rival else NOT_TAKEN]
    reasons = [] if margins else gap_reasons
    limit = claim.limit * claim.factor
    unjudged = Verdict(
        claim.text, "not judged", "; ".join(reasons), claim.source, claim.place, claim.main,
        limit=limit, at_most=claim.at_most, draws=drawn,
    )  # fmt: skip
    if reasons:
        return unjudged
    comparisons = Comparisons(margins, drawn)
    names = row_names if len(by_rival) > 1 else None
    link = "for" if claim.at_most else "against"
    intervals = comparisons.intervals
    if len(intervals) < len(margins):
        means = _join({rival: _mean_text(by_seed, claim) for rival, by_seed in margins.items()}, names, link)
        one_seed = any(len(by_seed) == 1 for by_seed in margins.values())
        reason = "one seed is no evidence" if one_seed else "not all figures are finite"
        return replace(unjudged, sentence=f"{reason}: {means}")
    status, against = _status(comparisons)
    if gap_reasons and status != "does not hold":
        return replace(unjudged, sentence="; ".join(gap_reasons))
    has_limit = bool(claim.limit) or claim.at_most
    opening, outlook = _opening(status, comparisons, len(against), has_limit=has_limit), ""
    if len(margins) < len(by_rival) and status != "does not hold":
        status = "unknown"
        outlook = f"{len(by_rival) - len(margins)} of {len(by_rival)} comparisons were not run"
    elif status == "unknown":
        outlook = _seeds_text(comparisons, against)
    shown = {rival: _in_shown_units(intervals[rival], claim.factor) for rival in against}
    texts = {r: interval_text(margin, claim.unit, limit, at_most=claim.at_most) for r, margin in shown.items()}
    figures = _join(texts, names, link)
    rival = _deciding(status, comparisons, against)
    return Verdict(
        claim.text,
        status,
        f"{opening}{figures}{f'; {outlook}' if outlook else ''} ({_confidence_text(comparisons, against)})",
        claim.source,
        claim.place,
        claim.main,
        shown[rival],
        claim.unit,
        len(intervals),
        "" if names is None else names.get(rival, rival),
        outlook,
        limit=limit,
        confidence=comparisons.confidence(rival),
        fewest_seeds=min(margin.n for margin in intervals.values()),
        at_most=claim.at_most,
        draws=drawn,
    )


def _status(comparisons: Comparisons) -> tuple[Status, list[str]]:
    """The verdict, and whose margins tell why: the least sure of a claim that holds, else those against it."""
    intervals = comparisons.intervals
    open_ones = [rival for rival, margin in intervals.items() if margin.low <= 0]
    if not open_ones:
        return "holds", [max(intervals, key=lambda rival: comparisons.chance(rival, 1))]
    below = [rival for rival in open_ones if intervals[rival].high < 0]
    if below:
        return "does not hold", below
    if all(intervals[rival].low == intervals[rival].high == 0 for rival in open_ones):
        return "exact tie", open_ones
    return "unknown", open_ones


def _deciding(status: Status, comparisons: Comparisons, against: Sequence[str]) -> str:
    """Pick, of the rivals that tell why, the one that settles it: the surest of those against a claim, the least sure
    of those for it, and of an open claim the one that says how many seeds would decide."""
    if status != "unknown":
        return min(against, key=lambda rival: comparisons.chance(rival, -1))
    below = [rival for rival in against if comparisons.is_below(rival)]
    return min(below, key=comparisons.seeds_to_decide) if below else max(against, key=comparisons.seeds_to_decide)


def _opening(status: Status, comparisons: Comparisons, against: int, *, has_limit: bool) -> str:
    intervals = comparisons.intervals
    better, worse, equal = ("holds", "fails", "at its limit") if has_limit else ("better", "worse", "equal")
    of_all = f"{sum(margin.low > 0 for margin in intervals.values())} of {len(intervals)}"
    if status == "holds":
        return "" if len(intervals) == 1 else f"{better} in all {len(intervals)} comparisons; least sure: "
    if len(intervals) == 1:
        return f"{equal} in every seed: " if status == "exact tie" else ""
    if status == "does not hold":
        return f"{worse} in {against} and {better} in {of_all} comparisons: "
    return f"{better} in {of_all} comparisons; " + (f"{equal} in every seed: " if status == "exact tie" else "open: ")


def _seeds_text(comparisons: Comparisons, open_ones: Sequence[str]) -> str:
    """How many seeds would decide. One margin below zero contradicts; otherwise all must rise above it."""
    below = [comparisons.seeds_to_decide(rival) for rival in open_ones if comparisons.is_below(rival)]
    count = min(below) if below else max(map(comparisons.seeds_to_decide, open_ones))
    if math.isinf(count):
        return f"not even {MOST_SEEDS:,} seeds would decide"
    return f"about {count} seeds would decide"


def _confidence_text(comparisons: Comparisons, against: Sequence[str]) -> str:
    intervals = comparisons.intervals
    drawn = "" if comparisons.draws == 1 else f" of {comparisons.draws} draws"
    seeds = f"{min(margin.n for margin in intervals.values())} seeds{drawn}"
    joint = [comparisons.is_joint(rival) for rival in against]
    if not any(joint):
        return f"{seeds}, 95 % interval" + (" for all draws together" if drawn else "")
    which = "intervals" if all(joint) else "95 % intervals, those against the claim"
    return f"{seeds}, {which} at 95 % for all {len(intervals)} comparisons{' and draws' if drawn else ''} together"


def _margin(claim: Claim, by_seed: BySeed) -> BySeed:
    """How far each is on the right side of the claim's limit, without what floating point adds: 0.80 - 0.82 + 0.02 is
    zero."""
    side = -1 if claim.at_most else 1
    return {seed: round(side * (value - claim.limit), DIGITS) for seed, value in by_seed.items()}


def _in_shown_units(margin: Interval, factor: float) -> Interval:
    return replace(margin, mean=margin.mean * factor, low=margin.low * factor, high=margin.high * factor)


def _join(texts: Mapping[str, str], names: Mapping[str, str] | None, link: str) -> str:
    """The texts by rival or case, each with its name if there are several: "against" a rival, "for" a case."""
    if names is None:
        return "; ".join(texts.values())
    return "; ".join(f"{text} {link} {names.get(rival, rival)}" for rival, text in texts.items())


def _mean_text(by_seed: Mapping[int, float], claim: Claim) -> str:
    """Mean of what was measured, as text; `by_seed` is how far it is on the right side of the claim's limit."""
    mean = claim.factor * sum(by_seed.values()) / len(by_seed)
    return mean_text(mean, claim.unit, claim.limit * claim.factor, at_most=claim.at_most)
