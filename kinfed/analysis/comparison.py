"""Decides what may be compared with what, which runs are parts of one, and how metrics are written.

Methods stand in one comparison only if their runs share the data: the same settings of data, and, where both wrote
down who holds what, the same number of examples per client and class for every shared seed.

Every method and seed of a run depends on its settings and data alone (kinfed.runs.growth): folders that agree in
everything but seeds and methods are parts of one run, averaged and compared as if run together. Where the same method
and seed is in two folders, they are left apart: one is a repetition of the other, and no second seed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, product
from math import floor, isfinite, log10
from statistics import median
from typing import Any

from kinfed.algorithms import ALGORITHMS
from kinfed.config import NON_RESULT_SETTINGS, flat_settings, is_as_published
from kinfed.data import Description
from kinfed.engine import METRICS
from kinfed.records import KINDS, Baseline, Kind, RunRecord, TrialRecord

DATA_KEYS = (
    *("dataset", "partition", "clients", "client_column", "label_column", "group_column", "split_column", "columns"),
    *(
        "weight_column",
        "time_column",
        "event_column",
        "person_column",
        "order_column",
        "stratify",
        "folds",
        "validation",
        "foreign_targets",
    ),
    "eval_clients",
)
# Settings that a federation's own description repeats with all defaults filled in.
_DESCRIBED = {"partition", "clients", "validation"}

# Settings that may differ between runs of one comparison without need to say so.
_INDIFFERENT = {
    *("algorithms", "seeds", "eval_every", "early_stopping", "checkpoint_every", "save_models"),
    *("pool", "device", "backend", "workers", "state", "data"),
}
_APART = {"seeds", "algorithms", *NON_RESULT_SETTINGS}  # settings in which parts of one run may differ

# Methods met in most reports keep their hue from one report to the next.
HABITUAL_HUES = {"fedavg": 0, "selffl": 1, "fedfomo": 2, "cgpfl": 3, "ditto": 4, "pfedme": 5, "perfedavg": 6}
NUM_HUES = 7
Slot = tuple[int | None, int]  # a method's place in the palette: its hue (None: local training), and which turn


@dataclass(frozen=True)
class Method:
    """One algorithm of one run, over its seeds. This is what a method panel is given."""

    algorithm: str  # its label in the configuration
    label: str  # the name on the page, unique in the report
    index: int  # its position in the report, the same in every figure
    slot: Slot
    run: RunRecord
    trials: tuple[TrialRecord, ...]  # every seed, also the unfinished

    @property
    def options(self) -> dict[str, Any]:
        return options_of(self.run, self.algorithm)

    @property
    def family(self) -> str:
        """The registered algorithm behind the label."""
        return family(self.run, self.algorithm)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(trial.seed for trial in self.complete_trials))

    @property
    def final_round(self) -> int:
        return max(trial.round for trial in self.trials)

    @property
    def complete_trials(self) -> tuple[TrialRecord, ...]:
        """The trials that averages are taken over: those as far as the farthest, so that no average mixes rounds, and
        those in which the method has learnt all that it will."""
        return tuple(trial for trial in self.trials if trial.round == self.final_round or self._has_ended(trial))

    @property
    def knows_its_end(self) -> bool:
        """Whether the method has ended by itself before the last round, with every seed: more rounds change nothing."""
        return all(map(self._has_ended, self.trials))

    def _has_ended(self, trial: TrialRecord) -> bool:
        planned, private = self.run.last_planned_round, trial.final.privacy or trial.final.user_privacy
        return trial.finished and not private and planned is not None and trial.round < planned

    @property
    def participation(self) -> dict[int, tuple[int, int]]:
        """(clients that took part in a round, all clients) by seed, where both are known."""
        counts = {trial.seed: trial.final.took_part for trial in self.complete_trials}
        all_clients = {seed: federation.num_clients for seed, federation in self.run.federations.items()}
        return {seed: (n, all_clients[seed]) for seed, n in counts.items() if n is not None and seed in all_clients}

    def final_of_all(self, kind: Kind, metric: str) -> dict[int, float]:
        """The metric of all clients after the final round, by seed; clients that never took part count too."""
        finals = {trial.seed: trial.final.all_clients.get(kind) or {} for trial in self.complete_trials}
        return {seed: final[metric] for seed, final in finals.items() if metric in final}

    def final(self, kind: Kind, metric: str) -> dict[int, float]:
        """The metric of the clients that took part, after the final round, by seed."""
        finals = {trial.seed: trial.final.metrics.get(kind, {}) for trial in self.complete_trials}
        return {seed: final[metric] for seed, final in finals.items() if metric in final}


@dataclass(frozen=True)
class MetricStyle:
    """Name of a metric, its unit and digits, and which way is better."""

    name: str
    title: str
    scale: float  # from the stored to the shown unit
    unit: str  # behind a number: " %", or another of a metric that has one
    digits: int
    lower_is_better: bool

    @property
    def in_percent(self) -> bool:
        return self.unit == " %"

    @property
    def gain_unit(self) -> str:
        """The unit of a difference of two values."""
        return "percentage points" if self.in_percent else self.unit.strip() or self.title

    @property
    def axis_title(self) -> str:
        is_word = self.title[1:2].islower() and self.name != "brier"  # and no acronym, nor a person's name
        title = self.title[0].lower() + self.title[1:] if is_word else self.title
        return f"{title},{self.unit}" if self.unit else title

    @property
    def noun(self) -> str:
        """The name in a sentence: accuracy, AUROC, RMSE."""
        return self.axis_title.removesuffix(f",{self.unit}") if self.unit else self.axis_title

    def for_values(self, values: Iterable[float]) -> MetricStyle:
        """The style with three digits that count for values of this size: 0.729, 7.29, 72.9. Shares keep theirs."""
        sizes = [abs(value) for value in values if isfinite(value) and value]
        if self.in_percent or not sizes:
            return self
        return replace(self, digits=max(0, 2 - floor(log10(median(sizes)))))

    def gain(self, own: float, other: float) -> float:
        """The lead of `own` over `other` in the stored unit; positive is better."""
        return other - own if self.lower_is_better else own - other


def metric_style(name: str) -> MetricStyle:
    one = METRICS.find(name)
    if one is None:
        return MetricStyle(name, "loss", 1.0, "", 3, lower_is_better=True)
    scale, digits = (100.0, 1) if one.percent else (1.0, 3)
    return MetricStyle(name, one.title, scale, f" {one.unit}".rstrip(), digits, not one.higher_is_better)


def headline_of(config: Mapping[str, Any], present: Collection[str]) -> str:
    """The metric that a run was configured to be judged by, else what its kind of problem is judged by, else loss."""
    name = config.get("metric")
    return METRICS.headline_among(present, name if isinstance(name, str) else None) or "loss"


@dataclass(frozen=True)
class Comparison:
    """Runs on the same data and their methods."""

    runs: tuple[RunRecord, ...]
    methods: tuple[Method, ...]

    def __repr__(self) -> str:
        return f"Comparison(runs={len(self.runs)}, methods={len(self.methods)})"

    @property
    def metric(self) -> str:
        """The metric that methods are ranked by: that of the first run, or what its problem is usually judged by."""
        finals = [trial.final.metrics for method in self.methods for trial in method.complete_trials]
        present = {name for final in finals for kind in KINDS for name in final.get(kind, {})}
        return headline_of(self.runs[0].config, present)

    @property
    def seeds(self) -> int:
        """The number of seeds that the averages rest on, the smallest over methods."""
        return min((len(method.complete_trials) for method in self.methods), default=0)

    @property
    def style(self) -> MetricStyle:
        return metric_style(self.metric)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of model that any method was evaluated with."""
        return tuple(kind for kind in KINDS if any(method.final(kind, self.metric) for method in self.methods))

    @property
    def federations(self) -> dict[int, Description]:
        return {seed: federation for run in reversed(self.runs) for seed, federation in run.federations.items()}

    @property
    def baselines(self) -> dict[int, Baseline]:
        """Baselines, which clients reach without a model, by seed."""
        return {seed: baseline for run in reversed(self.runs) for seed, baseline in run.baselines.items()}

    @property
    def same_final_round(self) -> bool:
        """Whether all methods have had the same rounds, but for those that had no use for more."""
        return len({method.final_round for method in self.methods if not method.knows_its_end}) <= 1

    @property
    def same_seeds(self) -> bool:
        return len({method.seeds for method in self.methods}) <= 1

    def local_trial(self, method: Method, seed: int) -> TrialRecord | None:
        """Local training with the same seed, from the method's own run if it is there."""
        local = [candidate for candidate in self.methods if candidate.family == "local"]
        own = [candidate for candidate in local if candidate.run is method.run]
        return next((trial for candidate in (*own, *local) for trial in candidate.trials if trial.seed == seed), None)


def compare(runs: Sequence[RunRecord]) -> list[Comparison]:
    groups: list[list[RunRecord]] = []
    for run in runs:
        for group in groups:
            if all(same_data(run, other) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    comparisons: list[Comparison] = []
    for group in groups:
        start = sum(len(comparison.methods) for comparison in comparisons)
        comparisons.append(Comparison(tuple(group), _methods(group, start)))
    return comparisons


def single_run(run: RunRecord, start: int = 0) -> Comparison:
    """One run by itself; its methods are numbered from `start`, for pages with several."""
    return Comparison((run,), _methods((run,), start))


def _methods(runs: Sequence[RunRecord], start: int) -> tuple[Method, ...]:
    """Labels are unique: where several runs have a method of one name, it carries that of its run."""
    pairs = [(run, algorithm) for run in runs for algorithm in run.algorithms]
    names = [_name_in_tables(run, algorithm) for run, algorithm in pairs]
    places = slots([family(run, algorithm) for run, algorithm in pairs])
    methods = []
    for index, ((run, algorithm), name, slot) in enumerate(zip(pairs, names, places, strict=True), start):
        label = f"{name} · {run.label}" if names.count(name) > 1 else name
        trials = tuple(trial for trial in run.trials if trial.algorithm == algorithm)
        methods.append(Method(algorithm, label, index, slot, run, trials))
    return tuple(methods)


def slots(algorithms: Sequence[str]) -> list[Slot]:
    """A slot for each entry, in order, no two alike. An algorithm may occur more than once."""
    taken: dict[int, Slot] = {}
    for i, name in enumerate(algorithms):
        if name == "local":
            taken[i] = (None, sum(hue is None for hue, _ in taken.values()))
        elif name in HABITUAL_HUES and (HABITUAL_HUES[name], 0) not in taken.values():
            taken[i] = (HABITUAL_HUES[name], 0)
    used = set(taken.values())
    free = ((hue, turn) for turn in count() for hue in range(NUM_HUES) if (hue, turn) not in used)
    return [taken[i] if i in taken else next(free) for i in range(len(algorithms))]


def configured_methods(run: RunRecord) -> dict[str, Any]:
    methods = run.config.get("algorithms")
    return methods if isinstance(methods, dict) else {}


def options_of(run: RunRecord, algorithm: str) -> dict[str, Any]:
    options = configured_methods(run).get(algorithm)
    return options if isinstance(options, dict) else {}


def family(run: RunRecord, algorithm: str) -> str:
    """The registered algorithm behind a label: {"weak": {"method": "ditto", "lam": 0.1}} is a ditto."""
    return str(options_of(run, algorithm).get("method", algorithm))


def display_name(algorithm: str) -> str:
    """The name as papers write it, for methods known by one."""
    return ALGORITHMS[algorithm].title if algorithm in ALGORITHMS else algorithm


def _name_in_tables(run: RunRecord, algorithm: str) -> str:
    """The name, with a mark where the run has switched to the options of the paper."""
    switched = run.config.get("as_published") and is_as_published(options_of(run, algorithm))
    return display_name(algorithm) + (" (as published)" if switched else "")


def same_data(one: RunRecord, other: RunRecord) -> bool:
    pairs = _shared_seeds(one, other)
    described = bool(pairs) and all(a.description and b.description for a, b in pairs)
    keys = [key for key in DATA_KEYS if not (described and key in _DESCRIBED)]
    if any(one.config.get(key) != other.config.get(key) for key in keys):
        return False
    return all((a.description, a.train, a.test) == (b.description, b.train, b.test) for a, b in pairs)


def _shared_seeds(one: RunRecord, other: RunRecord) -> list[tuple[Description, Description]]:
    return [(one.federations[seed], other.federations[seed]) for seed in one.federations.keys() & other.federations]


def cautions(comparison: Comparison) -> list[str]:
    """Notes that a reader must know before comparing the methods' figures."""
    chosen = {run.config.get("metric") for run in comparison.runs} - {None}
    fallback = f"is known here, so methods are compared by {comparison.style.noun}"
    unknown = [name for name in sorted(map(str, chosen)) if METRICS.find(name) is None]
    notes = [f"No metric {name} {fallback}: give the file that registers it with --plugin." for name in unknown]
    if differences := _differences(comparison.runs):
        notes.append("The runs share their data but differ in " + "; ".join(differences) + ".")
    for method in comparison.methods:
        if diverged := [str(trial.seed) for trial in method.trials if trial.final.diverged]:
            seeds = "" if len(diverged) == len(method.trials) else f" with seed {', '.join(diverged)}"
            notes.append(
                f"{method.label} has diverged{seeds}: losses or updates are not finite or out of all bounds, so its "
                "figures mean nothing. Try a lower learning rate."
            )
        if behind := [trial for trial in method.trials if trial not in method.complete_trials]:
            seeds = ", ".join(f"{trial.seed} (round {trial.round})" for trial in behind)
            notes.append(
                f"{method.label}: averages are over the seeds that reached round {method.final_round}; "
                f"left out: seed {seeds}."
            )
    if not comparison.same_seeds:
        seeds = ", ".join(f"{method.label} {'+'.join(map(str, method.seeds))}" for method in comparison.methods)
        notes.append(f"The averages do not rest on the same seeds ({seeds}); differences use shared seeds only.")
    if not comparison.same_final_round:
        rounds = ", ".join(f"{method.label} {method.final_round}" for method in comparison.methods)
        notes.append(f"The methods have reached different rounds ({rounds}), so no best is marked.")
    return notes


def _differences(runs: Sequence[RunRecord]) -> list[str]:
    flat = [dict(flat_settings(run.config)) for run in runs]
    keys = dict.fromkeys(key for entries in flat for key in entries)
    parts = []
    for key in keys:
        values = list(dict.fromkeys(json.dumps(entries.get(key)) for entries in flat))
        if len(values) > 1 and key.split(".")[0] not in (*_INDIFFERENT, *DATA_KEYS):
            parts.append(f"{key} ({' / '.join(values)})")
    return parts


def pool_seeds(runs: list[RunRecord]) -> list[RunRecord]:
    """The runs, those that are parts of one joined to it, in the place of the first."""
    pooled: list[RunRecord] = []
    for run in runs:
        for place, other in enumerate(pooled):
            if are_parts_of_one(other, run):
                pooled[place] = _joined(other, run)
                break
        else:
            pooled.append(run)
    return pooled


def are_parts_of_one(one: RunRecord, other: RunRecord) -> bool:
    settings = [{name: v for name, v in run.config.items() if name not in _APART} for run in (one, other)]
    ours, theirs = configured_methods(one), configured_methods(other)
    differ = any(ours[label] != theirs[label] for label in ours.keys() & theirs.keys())
    if settings[0] != settings[1] or one.version != other.version or differ:
        return False
    if one.changed_files or other.changed_files or _contents_differ(one, other):
        return False
    planned = [set(product(configured_methods(run), run.config.get("seeds") or ())) for run in (one, other)]
    if planned[0] & planned[1] or _data(one) is None or _data(one) != _data(other):
        return False
    return all((a.train, a.test) == (b.train, b.test) for a, b in _shared_seeds(one, other))


def _contents_differ(one: RunRecord, other: RunRecord) -> bool:
    """Whether the same data set or the same plugin was another one."""
    return any(one.contents[name] != other.contents[name] for name in one.contents.keys() & other.contents.keys())


def _data(run: RunRecord) -> tuple[Any, ...] | None:
    """The part of the data that is the same with every seed; None if nothing is written down."""
    described = next(iter(run.federations.values()), None)
    if described is None:
        return None
    origin = {name: described.description.get(name) for name in ("dataset", "partition", "options")}
    classes = described.problem.kind, described.class_labels
    return origin, described.num_clients, classes, bool(sum(described.sizes("val"))), described.inputs.get("shape")


def _joined(one: RunRecord, other: RunRecord) -> RunRecord:
    seeds = sorted({*one.config["seeds"], *other.config["seeds"]})
    methods = {**configured_methods(one), **configured_methods(other)}
    place = list(methods).index
    trials = sorted((*one.trials, *other.trials), key=lambda trial: (trial.seed, place(trial.algorithm)))
    note = f"{other.label} has the same settings as {one.label}: seeds and methods of both are taken together."
    return replace(
        one, label=f"{one.label} + {other.label}", config={**one.config, "seeds": seeds, "algorithms": methods},
        fingerprint=f"{one.fingerprint} + {other.fingerprint}", trials=tuple(trials),
        federations=other.federations | one.federations, baselines=other.baselines | one.baselines,
        curves={**other.curves, **one.curves},
        notes=(*one.notes, *(f"{other.label}: {text}" for text in other.notes), note),
    )  # fmt: skip
