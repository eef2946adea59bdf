"""What entries say beside each other: skill, regret, ranks, clients that are hurt. Computed from scores alone.

Skill puts a mean over clients on one scale: 0 is what clients reach without a model, 1 is no error. Regret is how much
less skill a method has than the best of the references, the one with the best mean over seeds in that federation: this
best one is picked with hindsight, so that even a reference has some. A method that cannot run in a federation, or
diverges there, leaves its clients with what they learn alone, or without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from kinfed.algorithms import ALGORITHMS
from kinfed.analysis import Interval, interval, rankings
from kinfed.arena.entries import ArenaEntry
from kinfed.arena.suites import SuiteFederation, suite
from kinfed.errors import ConfigError

BySeed = dict[int, float]
OTHERS = "Methods of others"
_EQUAL = 1e-9


@dataclass(frozen=True)
class Hurt:
    """Clients whose model is worse than what they learn alone, over federations and seeds."""

    share: float
    points: float  # mean loss of those that lose, in skill of their federation's scale


@dataclass(frozen=True)
class Standings:
    """Entries of one subset, the references among them."""

    entries: tuple[ArenaEntry, ...]

    def __post_init__(self) -> None:
        kinds = {(entry.suite, entry.subset) for entry in self.entries}
        if len(kinds) != 1:
            shown = " and ".join(sorted(" ".join(kind) for kind in kinds)) or "nothing"
            raise ConfigError(f"entries of one suite and subset stand beside each other; these are of {shown}")
        names = [entry.method for entry in self.entries]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two entries are of {min(twice)}; a method enters a subset once")
        if lacking := [name for name in suite(self.entries[0].suite).references if name not in names]:
            raise ConfigError(f"the references {', '.join(lacking)} have no entry here; kinfed arena run makes them")

    @property
    def federations(self) -> tuple[SuiteFederation, ...]:
        return suite(self.entries[0].suite).federations(self.entries[0].subset)

    @property
    def references(self) -> tuple[str, ...]:
        return suite(self.entries[0].suite).references

    @cached_property
    def by_method(self) -> dict[str, ArenaEntry]:
        return {entry.method: entry for entry in self.entries}

    def only(self, names: Sequence[str]) -> Mapping[str, Mapping[str, BySeed]]:
        """Skills of all methods in some federations."""
        return {method: {name: own[name] for name in names} for method, own in self.skills.items()}

    def by_family(self) -> dict[str, list[str]]:
        """Methods by what they share; those that are not kinfed's come last."""
        families: dict[str, list[str]] = {}
        for name in (*(name for name in ALGORITHMS if name in self.by_method), *self.by_method):
            family = ALGORITHMS[name].facts.get("family") if name in ALGORITHMS else None
            own = families.setdefault(family or OTHERS, [])
            own += [] if name in own else [name]
        return families

    def title(self, method: str) -> str:
        return self.by_method[method].title

    def skills_in(self, method: str, federations: Sequence[str]) -> list[float]:
        """Skill in some federations, seed by seed."""
        return [skill for place in federations for skill in self.skills[method][place].values()]

    @cached_property
    def skills(self) -> dict[str, dict[str, BySeed]]:
        """Skill by method, federation and seed."""
        return {name: {one.name: self._skills(name, one) for one in self.federations} for name in self.by_method}

    def _skills(self, method: str, one: SuiteFederation) -> BySeed:
        scores = self.by_method[method].federations[one.name]
        if scores.refused:
            return self._skills(self.references[0], one)
        means = {seed: cell.mean for seed, cell in scores.cells.items()}
        return {seed: 0.0 if mean is None else one.skill(mean, seed) for seed, mean in means.items()}

    @cached_property
    def best_references(self) -> dict[str, str]:
        """The reference with the best mean over seeds, by federation."""
        means = {
            one.name: {name: fmean(self.skills[name][one.name].values()) for name in self.references}
            for one in self.federations
        }
        return {name: max(of, key=lambda method: of[method]) for name, of in means.items()}

    @cached_property
    def regrets(self) -> dict[str, dict[str, BySeed]]:
        """Skill that is missing to the best reference, by method, federation and seed."""
        return {
            name: {
                place: {
                    seed: self.skills[self.best_references[place]][place][seed] - skill for seed, skill in own.items()
                }
                for place, own in by_place.items()
            }
            for name, by_place in self.skills.items()
        }

    def regret_in(self, method: str, federations: Sequence[str]) -> Interval | None:
        """Mean regret in some federations; the interval is Student's over their seeds, which share data."""
        values = [value for place in federations for value in self.regrets[method][place].values()]
        return interval(dict(enumerate(values)))

    @cached_property
    def regret(self) -> dict[str, Interval]:
        """Mean over federations, with the interval of drawing federations and seeds anew."""
        return rankings.mean_intervals(self.regrets)

    @cached_property
    def ranks(self) -> dict[str, Interval]:
        return rankings.rank_intervals(self.skills)

    @property
    def plain_ranks(self) -> dict[str, float]:
        return rankings.mean_ranks(self.skills)

    def by_axis(self) -> dict[str, list[str]]:
        """Names of federations by axis."""
        axes: dict[str, list[str]] = {}
        for one in self.federations:
            axes.setdefault(one.axis, []).append(one.name)
        return axes

    def client_skills(self, method: str, one: SuiteFederation) -> dict[tuple[int, int], float]:
        """Skills by seed and client, on the scale of the federation's mean."""
        scores = self.by_method[method].federations[one.name]
        if scores.refused:
            return self.client_skills(self.references[0], one)
        skills: dict[tuple[int, int], float] = {}
        for seed, cell in scores.cells.items():
            if cell.scores is None:  # diverged: no better than without a model
                skills |= {(seed, client): 0.0 for client in range(self._clients(one, seed))}
            else:
                own = enumerate(cell.scores)
                skills |= {(seed, client): one.skill(value, seed) for client, value in own if value is not None}
        return skills

    def _clients(self, one: SuiteFederation, seed: int) -> int:
        """How many clients are judged: training alone has a score for each."""
        return len(self.by_method[self.references[0]].federations[one.name].cells[seed].scores or ())

    def hurt(self, method: str) -> Hurt:
        losses, clients = [], 0
        for one in self.federations:
            own, alone = self.client_skills(method, one), self.client_skills(self.references[0], one)
            shared = own.keys() & alone.keys()
            losses += [alone[key] - own[key] for key in shared if own[key] < alone[key] - _EQUAL]
            clients += len(shared)
        return Hurt(len(losses) / clients if clients else 0.0, fmean(losses) if losses else 0.0)

    def worst_tenth(self, method: str) -> float:
        """Skill of the worst tenth of clients, mean over federations."""
        return fmean(rankings.worst_share(self.client_skills(method, one).values()) for one in self.federations)

    def work(self, method: str) -> float:
        """Gradients that were taken, as a share of FedAvg's."""
        own, usual = (
            {
                (name, seed): cell.gradients
                for name, one in entry.federations.items()
                for seed, cell in one.cells.items()
            }
            for entry in (self.by_method[method], self.by_method["fedavg"])
        )
        shares = [own[key] / usual[key] for key in own if usual.get(key)]
        return fmean(shares) if shares else 0.0
