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
from kinfed.reproduce.recipe import Claim, Found, Recipe, Scale, Untestable

NOT_RUN = "this scale does not run what it needs"

Status = Literal["reproduced", "not reproduced", "cannot be tested here", "not judged"]


@dataclass(frozen=True)
class Verdict:
    claim: str
    status: Status
    sentence: str  # the numbers behind it
    asked_by: str


def verdicts(recipe: Recipe, found: Found, scale: Scale) -> list[Verdict]:
    said = []
    for claim in recipe.claims:
        if isinstance(claim, Untestable):
            said.append(Verdict(claim.text, "cannot be tested here", claim.reason, "paper"))
            continue
        verdict = _judged(claim, recipe, found)
        if scale == "smoke" and verdict.status != "not judged":
            verdict = replace(verdict, status="not judged", sentence=f"only a trial of the code: {verdict.sentence}")
        said.append(verdict)
    return said


def _judged(claim: Claim, recipe: Recipe, found: Found) -> Verdict:
    names = {row: name for table in recipe.tables for row, name in table.rows.items()}
    margins = {rival: by_seed for rival, by_seed in claim.margins(found).items() if by_seed}
    if not margins:
        return Verdict(claim.text, "not judged", NOT_RUN, claim.asked_by)
    found_intervals = {rival: interval(by_seed) for rival, by_seed in margins.items()}
    known = {rival: entry for rival, entry in found_intervals.items() if entry is not None}
    if len(known) < len(margins):
        means = {rival: _mean(by_seed, claim) for rival, by_seed in margins.items()}
        said = _listed(means, names if len(margins) > 1 else None)
        return Verdict(claim.text, "not judged", f"one seed is no evidence: {said}", claim.asked_by)
    ending = f" ({min(entry.n for entry in known.values())} seeds, 95 % interval)"
    failed = {rival: entry for rival, entry in known.items() if entry.low <= 0}
    if not failed:
        nearest = min(known, key=lambda rival: known[rival].low)
        by = "yes, " if len(known) == 1 else f"yes, above all {len(known)}; nearest: "
        said = _listed({nearest: _in_words(known[nearest], claim)}, names if len(known) > 1 else None)
        return Verdict(claim.text, "reproduced", by + said + ending, claim.asked_by)
    reason = "no, " if any(entry.mean <= 0 for entry in failed.values()) else "not clear, an interval contains zero: "
    if len(known) > 1:
        reason += f"above {len(known) - len(failed)} of {len(known)}; "
    said = _listed(
        {rival: _in_words(entry, claim) for rival, entry in failed.items()}, names if len(known) > 1 else None
    )
    return Verdict(claim.text, "not reproduced", reason + said + ending, claim.asked_by)


def _listed(said: Mapping[str, str], names: Mapping[str, str] | None) -> str:
    """The figures, each with the rival's name where there are several."""
    if names is None:
        return "; ".join(said.values())
    return "; ".join(f"{text} against {names.get(rival, rival)}" for rival, text in said.items())


def _mean(by_seed: Mapping[int, float], claim: Claim) -> str:
    return f"{_signed(math.fsum(by_seed.values()) / len(by_seed) * claim.factor)} {claim.unit}".rstrip()


def _in_words(entry: Interval, claim: Claim) -> str:
    low, high = _signed(entry.low * claim.factor), _signed(entry.high * claim.factor)
    return f"{_signed(entry.mean * claim.factor)} [{low}, {high}] {claim.unit}".rstrip()


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + format_number(value, 1 if abs(value) >= 0.1 or value == 0 else 3)
