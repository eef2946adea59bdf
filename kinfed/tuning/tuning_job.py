"""Common parts of all ways of tuning: the ranges that are varied, an experiment with validation examples, a folder,
and best.toml."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w

from kinfed.algorithms import AnyAlgorithm, make_algorithm, tuning_space
from kinfed.config import NON_RESULT_SETTINGS, RunConfig, Where, split_choice
from kinfed.core import Range, storage
from kinfed.data import Federation
from kinfed.engine import METRICS, Builder
from kinfed.errors import ConfigError, DataError, unknown_name
from kinfed.records import JobFolder
from kinfed.runs import ClientTable, Experiment, MethodRun, Metrics, NullObserver, audit_record, check_run
from kinfed.server import RoundReport


@dataclass(frozen=True)
class TuningTrial:
    """One setting of one method. `value` is None if the trial was stopped early or refused."""

    settings: dict[str, Any]  # empty: the method as configured
    value: float | None
    reason: str = ""  # why there is no value


@dataclass(frozen=True)
class Tuned:
    """Result of tuning for one method."""

    label: str
    method: str
    space: dict[str, Range]
    trials: tuple[TuningTrial, ...]  # the first is the method as configured
    metric: str = "accuracy"  # whose mean over clients is the value

    @property
    def default(self) -> float:
        """The value of the method as configured."""
        value = self.trials[0].value
        assert value is not None
        return value

    @property
    def best(self) -> TuningTrial:
        """The best trial; of equals the first."""
        sign = 1.0 if METRICS.named(self.metric).higher_is_better else -1.0
        return max(self.trials, key=lambda trial: -math.inf if trial.value is None else sign * trial.value)

    @property
    def settings(self) -> dict[str, Any]:
        return self.best.settings

    @property
    def at_edge(self) -> list[str]:
        """Options whose chosen value lies at the end of its range."""
        return [name for name, value in self.best.settings.items() if self.space[name].at_edge(value)]

    def last_trial_sentence(self, trials: int) -> str:
        """Sentence on the newest trial, with how many there are."""
        trial, best, shown = self.trials[-1], self.best.value or 0.0, METRICS.named(self.metric).shown
        outcome = "stopped: " + trial.reason if trial.value is None else shown(trial.value)
        settings = ", ".join(f"{name}={value:g}" for name, value in trial.settings.items()) or "as configured"
        return f"{self.label} trial {len(self.trials)}/{trials}: {outcome} (best {shown(best)})  {settings}"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method, "metric": self.metric, "default": self.default,
            "best": self.best.value, "settings": self.best.settings,
            "at_edge": self.at_edge, "space": {name: asdict(range_) for name, range_ in self.space.items()},
            "trials": [asdict(trial) for trial in self.trials],
        }  # fmt: skip


@dataclass(frozen=True)
class Explored:
    """Result of tuning while training for one method."""

    label: str
    method: str
    metric: str
    value: float  # mean of the metric over clients and seeds, on validation examples after the last round
    configurations: tuple[dict[str, Any], ...]  # the first is empty: the method as configured
    chances: tuple[float, ...]  # of each at the end, mean over seeds

    @property
    def settings(self) -> dict[str, Any]:
        """The likeliest configuration; of equals the first."""
        return self.configurations[max(range(len(self.chances)), key=lambda j: (self.chances[j], -j))]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "settings": self.settings}


def best_toml(config: RunConfig, heading: str, comments: Mapping[str, str]) -> str:
    """Settings that differ from the defaults of a run, with a comment above every method, by label. Seeds are left to
    the run: those of the tuning need not be those of the results."""
    changed = config.changed
    skipped = {*NON_RESULT_SETTINGS, "algorithms", "seeds"} - {"data", "plugins"}
    settings = {name: value for name, value in changed.items() if name not in skipped}
    seeds, toml = ", ".join(map(str, config.seeds)), tomli_w.dumps(_without_none(settings))
    parts = [f"# {heading},\n# seed(s) {seeds}. Run with: kinfed run best.toml --seeds ...\n{toml}"]
    for label, comment in comments.items():
        parts.append(f"# {comment}\n" + tomli_w.dumps(_without_none({"algorithms": {label: config.algorithms[label]}})))
    return "\n".join(parts)


def _without_none(value: Any) -> Any:
    """The settings without those that are none, as TOML has no null."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


DEFAULT_VALIDATION = 0.2
Folder = TypeVar("Folder", bound=JobFolder)
Choice = TypeVar("Choice", Tuned, Explored)
Report = Callable[[int, float], None]
"""Hears the score after a number of rounds over all seeds; ends the trial by an exception."""


@dataclass
class TuneResult(Generic[Choice]):
    config: RunConfig  # with the chosen settings
    methods: list[Choice]
    file: Path  # best.toml


class TuningJob:
    """The methods of a configuration, on data with validation examples."""

    def __init__(
        self, config: RunConfig, where: Where, federation: Federation | None, model: Builder | None,
        should_stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        config.check(where)
        share = DEFAULT_VALIDATION if config.validation == "auto" else config.validation
        if not share:
            raise ConfigError(
                "tuning needs validation examples: settings are never chosen on test data; got validation = 0"
            )
        self.experiment = Experiment(replace(config, validation=share), federation, model, should_stop=should_stop)
        self.config = self.experiment.inputs.config
        for seed in self.config.seeds:
            if not int(self.experiment.inputs.federation(seed).val.count.sum()):
                raise DataError(
                    "no client has validation examples, so there is nothing to tune by; set validation = 0.2"
                )
        check_run(self.experiment.inputs)

    @property
    def audit_record(self) -> dict[str, Any]:
        """The content of audit.json."""
        return audit_record(self.experiment.inputs)

    @property
    def audit_notes(self) -> list[str]:
        """A sentence on every finding in the data of the first seed."""
        return [finding.sentence for finding in self.experiment.inputs.federation(self.config.seeds[0]).findings]

    @property
    def metric(self) -> str:
        """The headline metric, by which settings are compared."""
        task = self.experiment.inputs.task()
        assert task.problem is not None  # of every task that is built from a configuration
        return METRICS.headline(task.problem, task.metric).name

    def spaces(self, ranges: Mapping[str, Mapping[str, Range]] | None) -> dict[str, dict[str, Range]]:
        """Varied options of every method; `ranges` replaces ranges that the algorithms declare, by label and option."""
        spaces, config, methods, usual = ranges or {}, self.config, self.config.algorithms, self.config.optimizer
        if unknown := spaces.keys() - methods.keys():
            raise ConfigError(
                f"a range is given for {min(unknown)!r}, which is not tuned; tuned are {', '.join(methods)}"
            )
        return {
            label: space_of(one["method"], config.fixed_options(label), spaces.get(label), one.get("optimizer", usual))
            for label, one in methods.items()
        }

    def variant(self, label: str, settings: Mapping[str, Any]) -> AnyAlgorithm:
        """The method of that label with these options in place of its own."""
        method, options, _ = split_choice(self.config.algorithms[label])
        return make_algorithm(method, self.config.training, {**options, **settings})

    def score(self, algorithm: AnyAlgorithm, report: Report = lambda step, value: None) -> float:
        """Score of a trial: the mean of the headline metric over clients, of their personal models on
        validation examples after the last round, averaged over seeds. Test examples are never scored."""
        config, figure, scores = self.config, f"{self.metric}_mean", []
        for place, seed in enumerate(config.seeds):
            with self.experiment.make_loop(algorithm, seed) as loop:
                run = MethodRun(
                    type(algorithm).__name__, loop,
                    ClientTable.from_federation(self.experiment.inputs.federation(seed)), config.rounds,
                    eval_every=config.eval_every, split="val",
                    observer=_TrialObserver(place * config.rounds - config.warm_start, report, figure),
                    should_stop=self.experiment.should_stop,
                )  # fmt: skip
                score = run.execute().personal.get(figure)
            if score is None:
                raise ConfigError(
                    f"no client with validation examples took part in the {config.rounds} rounds of seed {seed}; "
                    "give more rounds or a larger participation"
                )
            scores.append(score)
        return sum(scores) / len(scores)

    def open(self, kind: type[Folder], out: Path | str, search: Mapping[str, Any], resume: bool) -> Folder:
        """The folder of the tuning; `search` is what it is besides a run."""
        contents = self.experiment.inputs.contents()
        identity = json.dumps([self.config.fingerprint(contents), search]).encode()
        fingerprint = hashlib.sha256(identity).hexdigest()[:16]
        return kind.open(out, {**self.config.dump(), **search}, fingerprint, contents=contents, resume=resume)

    def write_best(
        self, folder: Path, methods: list[Choice], heading: str, comments: Mapping[str, str]
    ) -> TuneResult[Choice]:
        algorithms = {one.label: {**self.config.algorithms[one.label], **one.settings} for one in methods}
        best, file = replace(self.config, algorithms=algorithms, preset=None), folder / "best.toml"
        storage.write_atomically(file, best_toml(best, heading, comments).encode())
        return TuneResult(best, methods, file)


@dataclass(frozen=True)
class _TrialObserver(NullObserver):
    """Hands the validation figure of evaluated rounds to the pruner, which may end the trial."""

    before: int  # steps before round 1
    report: Report
    figure: str

    def round(
        self, label: str, seed: int, report: RoundReport, personal: Metrics | None, server: Metrics | None
    ) -> None:
        if personal and self.figure in personal:
            self.report(self.before + report.round, personal[self.figure])


def space_of(
    method: str, fixed: Mapping[str, Any], changes: Mapping[str, Range] | None = None, optimizer: str = "sgd"
) -> dict[str, Range]:
    """The method's space without the options that the user has fixed, with ranges of the user's own."""
    space = tuning_space(method, optimizer)
    for option, range_ in (changes or {}).items():
        if option not in space:
            raise unknown_name(f"tuned option of {method}", option, space)
        if option in fixed:
            raise ConfigError(f"{method}.{option} is fixed at {fixed[option]!r} and has a range; keep one of the two")
        space[option] = range_
    return {option: range_ for option, range_ in space.items() if option not in fixed}


def parse_ranges(texts: Iterable[str], methods: Mapping[str, str]) -> dict[str, dict[str, Range]]:
    """Ranges by label and option from texts "label.option=low:high"; `methods` says what each label stands for.

    A range is of the same kind as the usual one: logarithmic (unless it begins at 0), whole numbers."""
    ranges: dict[str, dict[str, Range]] = {}
    for text in texts:
        key, _, ends = text.partition("=")
        label, _, option = key.strip().rpartition(".")
        low, _, high = ends.partition(":")
        try:
            numbers = float(low), float(high)
        except ValueError:
            raise ConfigError(f"--range takes label.option=low:high, such as ditto.lam=0.01:10; got {text!r}") from None
        if label not in methods:
            raise unknown_name("owner in --range", label, methods)
        space = tuning_space(methods[label])
        if option not in space:
            raise unknown_name(f"tuned option of {methods[label]}", option, space)
        usual = space[option]
        ranges.setdefault(label, {})[option] = Range(*numbers, log=usual.log and numbers[0] > 0, whole=usual.whole)
    return ranges
