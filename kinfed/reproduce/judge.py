"""Claims against measurements: paired differences over seeds, with Student's 95 % interval.

A claim is *reproduced* if the interval of every margin lies above zero, and *not reproduced* otherwise, with the
reason: the difference has the other sign, or the interval contains zero. No claim is judged from one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

from kinfed.report.tables import shown
from kinfed.reproduce.recipe import Claim, Found, Recipe, Scale, Untestable

Status = Literal["reproduced", "not reproduced", "cannot be tested here", "not judged"]


@dataclass(frozen=True)
class Interval:
    """Mean of differences that belong together seed by seed, and where the true mean may lie."""

    mean: float
    low: float
    high: float
    n: int


def interval(differences: Mapping[int, float], confidence: float = 0.95) -> Interval | None:
    """Student's interval; None for fewer than two seeds or values that are not finite."""
    n = len(differences)
    if n < 2 or not all(math.isfinite(value) for value in differences.values()):
        return None
    mean = math.fsum(differences.values()) / n
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in differences.values()) / (n - 1) / n)
    reach = float(stats.t.ppf(0.5 + confidence / 2, n - 1)) * error
    return Interval(mean, mean - reach, mean + reach, n)


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
        return Verdict(claim.text, "not judged", "this scale does not run what it needs", claim.asked_by)
    found_intervals = {rival: interval(by_seed) for rival, by_seed in margins.items()}
    said = []
    for rival, by_seed in margins.items():
        against = f" against {names.get(rival, rival)}" if len(margins) > 1 and rival else ""
        said.append(_in_words(by_seed, found_intervals[rival], claim) + against)
    if any(entry is None for entry in found_intervals.values()):
        return Verdict(claim.text, "not judged", "one seed is no evidence: " + "; ".join(said), claim.asked_by)
    known = [entry for entry in found_intervals.values() if entry is not None]
    seeds = min(entry.n for entry in known)
    ending = f" ({seeds} seeds, 95 % interval)"
    if all(entry.low > 0 for entry in known):
        return Verdict(claim.text, "reproduced", "yes, " + "; ".join(said) + ending, claim.asked_by)
    opposite = [entry for entry in known if entry.mean <= 0]
    reason = "no, " if opposite else "not clear, an interval contains zero: "
    return Verdict(claim.text, "not reproduced", reason + "; ".join(said) + ending, claim.asked_by)


def _in_words(by_seed: Mapping[int, float], entry: Interval | None, claim: Claim) -> str:
    mean = math.fsum(by_seed.values()) / len(by_seed)
    text = _signed(mean * claim.factor)
    if entry is not None:
        text += f" [{_signed(entry.low * claim.factor)}, {_signed(entry.high * claim.factor)}]"
    return f"{text} {claim.unit}".rstrip()


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + shown(value, 1 if abs(value) >= 0.1 or value == 0 else 3)
