"""Tuning: the best settings of each method by validation accuracy, every method with the same budget.

    result = tune(make_config(None, {"algorithms": "fedavg,ditto"}), trials=20, out="tuned")
    kinfed.run("tuned/best.toml")

A trial trains a method for the run's rounds under each seed and scores the personal models on the clients' *validation*
examples; the objective is the mean over clients, then over seeds. Test examples are never scored. The first trial is
the method as configured, so tuning cannot choose worse than that by its own measure; the others come from Optuna's TPE
sampler over the declared ranges, in three digits. The sampler of trial i is seeded by (seed, method, i) alone, so a
study that was stopped and resumed, or extended by more trials, is the one that was not stopped.

    out/config.json     what is tuned, as in a run folder
    out/study.jsonl     Optuna's journal: one study per method
    out/tuning.json     all trials, and the choice of each method
    out/best.toml       the chosen settings, for `kinfed run`
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kinfed.algorithms import AnyAlgorithm
from kinfed.config import DEFAULTS, RunConfig, make_config
from kinfed.core import Range, rng, storage
from kinfed.data import Federation
from kinfed.engine import METRICS, Builder
from kinfed.errors import ConfigError, StorageError
from kinfed.records import JobFiles, JobFolder
from kinfed.runs import NullObserver, Observer, left_out_notes
from kinfed.tuning.tuning_job import Tuned, TuneResult, TuningJob, TuningTrial

try:
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
    from optuna.storages import BaseStorage, JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise ConfigError("tuning needs the package optuna, which is not installed: pip install 'kinfed[tune]'") from error

STARTUP_TRIALS = 8  # drawn at random before the sampler has something to go by
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


def tune(
    config: RunConfig, trials: int, out: Path | str, *, resume: bool = False,
    ranges: Mapping[str, Mapping[str, Range]] | None = None, prune: bool = False, federation: Federation | None = None,
    model: Builder | None = None, observer: Observer | None = None, should_stop: Callable[[], bool] = lambda: False,
) -> TuneResult[Tuned]:  # fmt: skip
    """Tune every method of the configuration with `trials` trials each, the first of them as configured.

    `ranges` replaces ranges that the algorithms declare, by label and option. Options that the configuration sets for a
    method stay as they are, but for those of a preset, where the first trial starts. `prune` stops trials early that
    fall below the median of earlier ones. The observer hears of every method that starts, with its trials as rounds,
    and a note about every trial."""
    if trials < 1:
        raise ConfigError(f"trials must be at least 1; got {trials}")
    job = TuningJob(config, "tuning", federation, model, should_stop)
    config, spaces = job.config, job.spaces(ranges)
    varied = {label: {option: asdict(range_) for option, range_ in space.items()} for label, space in spaces.items()}
    with job.open(JobFolder, out, {"search": varied, "prune": prune}, resume) as folder:
        presets = [] if config.preset is None else config.preset.notes()
        storage.write_json(folder.path / "audit.json", job.audit_record)
        for note in (*left_out_notes(job.experiment.inputs), *presets, folder.version_change, *job.audit_notes):
            if observer is not None and note:
                observer.note(note)
        trial_runs = _Tuning(job, folder.path, trials, prune, observer or NullObserver())
        with _quiet_optuna():
            methods = [trial_runs.tune(label, space) for label, space in spaces.items()]
    shown = METRICS.named(job.metric).shown
    budget = f"{trials} trial(s) of {config.rounds} rounds per method"
    heading = f"Chosen by mean client {job.metric} on validation data: {budget}"
    comments = {
        tuned.label: f"{shown(tuned.best.value or 0)} on validation data; {shown(tuned.default)} as configured"
        for tuned in methods
    }
    return job.write_best(folder.path, methods, heading, comments)


@dataclass(frozen=True)
class Started:
    """Settings that a folder of `tune` was started with."""

    config: RunConfig
    trials: int
    ranges: dict[str, dict[str, Range]]
    prune: bool


def read_tuning(folder: Path) -> Started:
    settings = JobFiles(folder).settings
    if "while_training" in settings:
        raise ConfigError(
            f"{folder} was tuned while training; repeat its whole command, including --while-training, with --resume"
        )
    if "search" not in settings:
        raise ConfigError(f"{folder} holds a run, not a tuning; give the --out of kinfed tune")
    trusted = JobFiles(folder).trusted_settings
    config = make_config(None, {name: value for name, value in trusted.items() if name in DEFAULTS})
    ranges = {label: {o: Range(**r) for o, r in space.items()} for label, space in settings["search"].items()}
    return Started(config, storage.read_json(folder / "tuning.json")["trials_each"], ranges, settings["prune"])


@dataclass
class _Tuning:
    job: TuningJob
    folder: Path
    trials: int
    prune: bool
    observer: Observer
    record: dict[str, Any] = field(default_factory=dict)  # of tuning.json, by label

    def __post_init__(self) -> None:
        self._write_record()
        self._storage = _open_journal(self.folder / "study.jsonl")

    def _write_record(self) -> None:
        storage.write_json(self.folder / "tuning.json", {"trials_each": self.trials, "methods": self.record})

    def tune(self, label: str, space: dict[str, Range]) -> Tuned:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=4) if self.prune else optuna.pruners.NopPruner()
        study = optuna.create_study(
            study_name=label, storage=self._storage, pruner=pruner, load_if_exists=True,
            direction="maximize" if METRICS.named(self.job.metric).higher_is_better else "minimize",
        )  # fmt: skip
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)  # was at work when the process ended: done again
        wanted = self.trials if space else 1
        tuned = self._tuned(study, label, space)
        self.observer.started(label, self.job.config.seeds[0], len(tuned.trials), wanted)
        while len(tuned.trials) < wanted:
            if not tuned.trials:
                self._default(study, label, space)
            else:
                self._trial(study, label, space, len(tuned.trials))
            tuned = self._tuned(study, label, space)
            self.observer.note(tuned.last_trial_sentence(wanted))
        return tuned

    def _tuned(self, study: optuna.Study, label: str, space: dict[str, Range]) -> Tuned:
        """Result of the study so far, which is written down."""
        method = self.job.config.algorithms[label]["method"]
        tuned = Tuned(label, method, space, _finished(study, space), self.job.metric)
        self.record[label] = tuned.to_json() if tuned.trials else None
        self._write_record()
        return tuned

    def _default(self, study: optuna.Study, label: str, space: dict[str, Range]) -> None:
        """The method as configured. Part of the study where its values lie in their ranges."""
        algorithm = self.job.experiment.inputs.algorithms[label]
        value = self.job.score(algorithm)
        values = {name: algorithm.training.lr if name == "lr" else getattr(algorithm, name) for name in space}
        if space and all(values[name] in range_ for name, range_ in space.items()):
            study.add_trial(
                optuna.create_trial(
                    params=values, distributions=_distributions(space), value=value, user_attrs={"default": True}
                )
            )
        else:
            study.set_user_attr("default", value)

    def _trial(self, study: optuna.Study, label: str, space: dict[str, Range], number: int) -> None:
        key = rng.fold(rng.root(self.job.config.seeds[0], f"tune-{label}"), number)
        study.sampler = optuna.samplers.TPESampler(seed=rng.numpy_seed(key), n_startup_trials=STARTUP_TRIALS)
        trial = study.ask(_distributions(space))

        def report(step: int, value: float) -> None:
            trial.report(value, step)
            if self.prune and trial.should_prune():
                raise optuna.TrialPruned("below the median of earlier trials")

        try:
            algorithm = self._algorithm(label, _rounded(trial.params))
            value = self.job.score(algorithm, report)
        except (ConfigError, optuna.TrialPruned) as reason:
            trial.set_user_attr("reason", str(reason))
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, value)

    def _algorithm(self, label: str, settings: Mapping[str, Any]) -> AnyAlgorithm:
        """The method with these settings; ConfigError if they do not go together."""
        config, algorithm = self.job.config, self.job.variant(label, settings)
        for seed in config.seeds:
            clients = self.job.experiment.inputs.federation(seed).population(seed, config.participation)
            algorithm.check(self.job.experiment.inputs.task(), clients)
        return algorithm


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna tells of every trial on stderr; the observer hears of them here."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _open_journal(path: Path) -> BaseStorage:
    # The folder's own lock is held, so a lock of Optuna's is one that a killed process left, and a last line without an
    # end is one that it did not finish. Optuna resolves the path from elsewhere, hence the absolute one.
    path = path.resolve()
    Path(f"{path}.lock").unlink(missing_ok=True)
    if path.exists():
        text = path.read_bytes()
        if not text.endswith(b"\n"):
            storage.write_atomically(path, text[: text.rfind(b"\n") + 1])
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except Exception as error:  # whatever Optuna stumbles over in a line that is not its own
        raise StorageError(f"{path} is damaged: {error!r}; restore it, or tune in another folder (--out)") from None


def _distributions(space: Mapping[str, Range]) -> dict[str, BaseDistribution]:
    return {
        name: IntDistribution(int(r.low), int(r.high), log=r.log)
        if r.whole
        else FloatDistribution(r.low, r.high, log=r.log)
        for name, r in space.items()
    }


def _finished(study: optuna.Study, space: Mapping[str, Range]) -> tuple[TuningTrial, ...]:
    """All trials that have ended, the default first."""
    trials = study.get_trials(deepcopy=False, states=FINISHED)
    outside = study.user_attrs.get("default")
    for trial in trials:
        if trial.params and not all(name in trial.params and trial.params[name] in space[name] for name in space):
            raise StorageError(
                f"study.jsonl holds a trial of {study.study_name} with settings that no trial can have, "
                f"{trial.params}; restore the file, or tune in another folder (--out)"
            )
    first = [] if outside is None else [TuningTrial({}, outside)]
    return (*first, *(_trial_of(trial) for trial in trials))


def _trial_of(trial: FrozenTrial) -> TuningTrial:
    if trial.user_attrs.get("default"):
        return TuningTrial({}, trial.value)
    if trial.state == TrialState.COMPLETE:
        return TuningTrial(_rounded(trial.params), trial.value)
    return TuningTrial(_rounded(trial.params), None, trial.user_attrs.get("reason", ""))


def _rounded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Three digits say all that a tuned number can say."""
    return {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in settings.items()}
