"""Conclusions from the arena in sentences: what a method is good for, what a board says, how stable ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from random import Random
from statistics import fmean

from kinfed.algorithms import ALGORITHMS
from kinfed.analysis import rankings
from kinfed.arena.contest import best_trial
from kinfed.arena.entries import ArenaEntry
from kinfed.arena.standings import Standings
from kinfed.arena.suites import SUBSETS
from kinfed.report.drawing import duration, plural

OWN = "kin"  # kinfed's own method: what speaks against it is told first
MOST_HALVES = 500  # pairs of halves of the federations that are drawn


def strengths(standings: Standings, method: str) -> list[str]:
    """What a method is good for, by axis: where it leads the best reference, where it cannot be told from it, and where
    it is behind."""
    title, kinds = standings.by_method[method].title, _axes_by_outcome(standings, method)
    sentences = []
    if kinds["ahead"]:
        sentences.append(f"{title} is ahead of the best reference with {'; '.join(kinds['ahead'])}.")
    if kinds["level"]:
        sentences.append(f"{title} is not told apart from it with {', '.join(kinds['level'])}.")
    if kinds["behind"]:
        sentences.append(f"{title} is behind it with {'; '.join(kinds['behind'])}.")
    if not kinds["ahead"]:
        sentences.insert(0, f"There is no axis on which {title} is shown to be better than the best reference.")
    hurt = standings.hurt(method)
    if method != standings.references[0]:
        sentences.append(
            f"{hurt.share:.0%} of clients have a worse model than they learn alone, by {hurt.points:.3f} of skill on "
            "average."
        )
    refused = [
        f"{name} ({one.refused})" for name, one in standings.by_method[method].federations.items() if one.refused
    ]
    if refused:
        sentences.append(f"It cannot run in {'; '.join(refused)}: its clients count as training alone there.")
    return sentences


def _axes_by_outcome(standings: Standings, method: str) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {"ahead": [], "level": [], "behind": []}
    for name, places in standings.by_axis().items():
        regret = standings.regret_in(method, places)
        if regret is None or regret.low <= 0 <= regret.high:
            kinds["level"].append(name)
        else:
            better = ", ".join(sorted({standings.title(standings.best_references[place]) for place in places}))
            amount = f"{abs(regret.mean):.3f} of skill"
            kinds["ahead" if regret.high < 0 else "behind"].append(f"{name} ({amount}; best reference: {better})")
    return kinds


def findings(standings: Standings) -> list[str]:
    """What the board says; first what speaks against kinfed's own method."""
    ranks, regret = standings.plain_ranks, standings.regret
    order = sorted(ranks, key=lambda name: ranks[name])
    sentences = _against_own(standings, order) if OWN in ranks else []
    first = order[0]
    critical = rankings.critical_difference(len(order), len(standings.federations))
    level = sum(ranks[name] - ranks[first] < critical for name in order) - 1
    sentences.append(
        f"{standings.title(first)} has the best mean rank, {ranks[first]:.1f} of {len(order)}; "
        f"{plural(level, 'method')} cannot be told apart from it (critical difference {critical:.1f} with "
        f"{len(standings.federations)} federations)."
    )
    better = [name for name in order if regret[name].high < 0]
    shown = ", ".join(standings.title(name) for name in better) or "none"
    sentences.append(f"Ahead of the best reference on average over federations, with an interval below zero: {shown}.")
    for name, places in standings.by_axis().items():
        best = sorted(order, key=lambda method: -fmean(standings.skills_in(method, places)))[:3]
        sentences.append(f"Best with {name}: {'; '.join(standings.title(method) for method in best)}.")
    return [*sentences, *stability(standings)]


def who_is_missing(standings: Standings, nowhere: Sequence[ArenaEntry]) -> list[str]:
    """The methods that can run in no federation, which are not ranked, and in the smallest subset, which all methods of
    kinfed are to enter, those of them that have no entry."""
    sentences = []
    if nowhere:
        reasons: dict[str, list[str]] = {}
        for entry in nowhere:
            reasons.setdefault(next(iter(entry.federations.values())).refused, []).append(entry.method)
        shown = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())
        sentences.append(f"Cannot run in any of these federations, and so have no rank: {shown}.")
    entered = {*standings.by_method, *(entry.method for entry in nowhere)}
    missing = [name for name in ALGORITHMS if ALGORITHMS.is_own(name) and name not in entered]
    if missing and standings.entries[0].subset == SUBSETS[0]:
        sentences.append(f"{plural(len(missing), 'method')} of kinfed without an entry: {', '.join(missing)}.")
    return sentences


def _against_own(standings: Standings, order: list[str]) -> list[str]:
    """What speaks against kinfed's own method."""
    ranks = standings.plain_ranks
    sentences = []
    ahead = [name for name in order if ranks[name] < ranks[OWN]]
    if ahead:
        shown = ", ".join(standings.title(name) for name in ahead[:8]) + (", …" if len(ahead) > 8 else "")
        sentences.append(
            f"Against {OWN}, kinfed's own method: {plural(len(ahead), 'method')} of {len(order)} rank before it: "
            f"{shown}."
        )
    behind = _axes_by_outcome(standings, OWN)["behind"]
    if behind:
        sentences.append(f"Against {OWN}: it is behind the best of the references with {'; '.join(behind)}.")
    hurt = standings.hurt(OWN)
    sentences.append(f"Against {OWN}: {hurt.share:.0%} of clients have a worse model than they learn alone.")
    return sentences


def stability(standings: Standings) -> list[str]:
    """How far ranks depend on the seed, on the federations, and on whether methods are tuned."""
    places = [one.name for one in standings.federations]
    seeds = list(standings.skills[standings.references[0]][places[0]])
    by_seed = [
        rankings.mean_ranks(
            {m: {p: {seed: own[seed]} for p, own in skills.items()} for m, skills in standings.skills.items()}
        )
        for seed in seeds
    ]
    halves = [
        (half, [name for name in places if name not in half])
        for half in combinations(places, len(places) // 2)
        if len(places) % 2 or places[0] in half  # of an even number both halves would come twice
    ]
    halves = halves if len(halves) <= MOST_HALVES else Random(0).sample(halves, MOST_HALVES)
    sentences = [
        f"Ranks by single seeds correlate with each other with {_agreement(combinations(by_seed, 2)):.2f} (Spearman, "
        "mean over pairs of seeds), ranks in one half of the federations with those in the other with "
        f"{_agreement((_ranks_in(standings, one), _ranks_in(standings, other)) for one, other in halves):.2f} (mean "
        f"over {plural(len(halves), 'pair')} of halves)."
    ]
    first = [one.name for one in standings.federations if one.subset == standings.federations[0].subset]
    if further := [name for name in places if name not in first]:
        agreement = rankings.rank_correlation(_ranks_in(standings, first), _ranks_in(standings, further))
        sentences.append(
            f"Ranks in the {len(first)} federations of {standings.federations[0].subset} correlate with those in the "
            f"{len(further)} that {standings.entries[0].subset} adds with {agreement:.2f}."
        )
    return [*sentences, *_of_tuning(standings)]


def _ranks_in(standings: Standings, places: Sequence[str]) -> dict[str, float]:
    return rankings.mean_ranks(standings.only(places))


def _agreement(pairs: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> float:
    return fmean(rankings.rank_correlation(one, other) for one, other in pairs)


def _of_tuning(standings: Standings) -> list[str]:
    """What tuning does to ranks, on the rows that it sees."""
    usual, tuned = (_validation_ranks(standings, best) for best in (False, True))
    gains = {name: usual[name] - tuned[name] for name in usual}
    order = sorted(gains, key=lambda name: -gains[name])
    most = dict.fromkeys((*order[:3], *order[-3:]))
    ends = ((standings.title(name), f"{gains[name]:+.0f}".replace("-", "−")) for name in most)
    tried = [
        (one, scores)
        for entry in standings.entries
        for one in standings.federations
        if len((scores := entry.federations[one.name]).trials) > 1
    ]
    other = fmean(bool(best_trial(scores.trials, one.metric).settings) for one, scores in tried)
    return [
        f"Tuning chose another setting than the configured one in {other:.0%} of cases. Ranks on validation rows as "
        f"configured and after tuning correlate with {rankings.rank_correlation(usual, tuned):.2f}; tuning moved a "
        f"method by {fmean(map(abs, gains.values())):.1f} places on average, most: "
        f"{', '.join(map(' '.join, ends))}."
    ]


def _validation_ranks(standings: Standings, tuned: bool) -> dict[str, float]:
    """Mean ranks by what tuning saw: of the configured setting, or of the best."""
    alone = standings.by_method[standings.references[0]]
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for name, entry in standings.by_method.items():
        for one in standings.federations:
            own = entry.federations[one.name]
            trials = alone.federations[one.name].trials if own.refused else own.trials
            skills = [0.0 if trial.value is None else one.skill(trial.value, 0) for trial in trials]
            scores.setdefault(name, {})[one.name] = {0: max(skills) if tuned else skills[0]}
    return rankings.mean_ranks(scores)


def costs(standings: Standings, method: str) -> list[str]:
    own, usual = (duration(standings.by_method[name].processor_seconds) for name in (method, "fedavg"))
    return [
        f"It took {standings.work(method):.2f} times FedAvg's gradients, as counted, in "
        f"{own} of processor time with tuning (FedAvg {usual})."
    ]
