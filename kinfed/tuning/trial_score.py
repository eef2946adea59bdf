"""What a trial is judged by: personal models on their clients' validation examples, never on test examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kinfed.algorithms import AnyAlgorithm
from kinfed.config import RunConfig, Where
from kinfed.data import Federation
from kinfed.engine import Builder, headline_measure
from kinfed.errors import ConfigError, DataError
from kinfed.runs import ClientTable, Experiment, MethodRun, Metrics, NullObserver
from kinfed.server import RoundReport

DEFAULT_VALIDATION = 0.2
Report = Callable[[int, float], None]
"""Hears of the score after so many rounds over all seeds; ends the trial by an exception."""


def metric_of_trials(experiment: Experiment) -> str:
    """The headline metric, by which trials are compared."""
    task = experiment.inputs.task()
    assert task.problem is not None  # of every task that is built from a configuration
    return headline_measure(task.problem, task.metric).name


def validation_score(
    experiment: Experiment, algorithm: AnyAlgorithm, report: Report = lambda step, value: None
) -> float:
    """The mean of the headline metric over clients, on validation examples after the last round, averaged over seeds
    of the experiment."""
    config, metric, scores = experiment.config, metric_of_trials(experiment), []
    for place, seed in enumerate(config.seeds):
        with experiment.make_loop(algorithm, seed) as loop:
            run = MethodRun(
                type(algorithm).__name__,
                loop,
                ClientTable.from_federation(experiment.inputs.federation(seed)),
                config.rounds,
                eval_every=config.eval_every,
                split="val",
                observer=_TrialObserver(place * config.rounds - config.warm_start, report, f"{metric}_mean"),
                should_stop=experiment.should_stop,
            )
            score = run.execute().personal.get(f"{metric}_mean")
            if score is None:
                raise ConfigError(
                    f"no client with validation examples took part in the {config.rounds} rounds of seed {seed}; "
                    "give more rounds or a larger participation"
                )
            scores.append(score)
    return sum(scores) / len(scores)


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


def tuning_experiment(
    config: RunConfig,
    where: Where,
    federation: Federation | None,
    model: Builder | None,
    should_stop: Callable[[], bool],
) -> Experiment:
    """The experiment whose methods are tuned, with validation examples to choose settings by."""
    config.check(where)
    share = DEFAULT_VALIDATION if config.validation == "auto" else config.validation
    if not share:
        raise ConfigError(
            "tuning needs validation examples: settings are never chosen on test data; got validation = 0"
        )
    experiment = Experiment(replace(config, validation=share), federation, model, should_stop=should_stop)
    for seed in config.seeds:
        if not int(experiment.inputs.federation(seed).val.count.sum()):
            raise DataError("no client has validation examples, so there is nothing to tune by; set validation = 0.2")
    return experiment
