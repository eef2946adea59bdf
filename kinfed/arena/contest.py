"""One method on the federations of a suite, with as much work as every other.

Work is what the engine counts: gradients of single examples at a model, of all clients together. The budget of a run is
what FedAvg's rounds take, and one round of local training more, for what a method does at the end. A method that takes
more in a round has fewer rounds; none has more rounds than the suite says, but for those of kinfed's own that take no
gradients (sums, trees), which end by themselves and are told by their 0 gradients, rounds and processor time.

A method is tuned on the validation rows of the first seed: as configured, and with settings from its own ranges, every
one within the same budget. The draws are the same for all methods. Test rows judge once, at the end.

New clients are judged on their own test rows after as many rounds of local training as they would have had in the run,
from what the server would send them. Without anything to send they train alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import tuning_space
from kinfed.arena.entries import CellScores, FederationScores, TriedSetting
from kinfed.arena.suites import Budget, SuiteFederation
from kinfed.config import RunConfig
from kinfed.core import Range, rng
from kinfed.data import Federation, describe
from kinfed.engine import METRICS, GradientCount, task_for
from kinfed.errors import ConfigError, KinfedError
from kinfed.newcomers import RunInMemory, adopt, learn_alone
from kinfed.runs import ClientTable, Experiment, MethodResult, MethodRun, check_run

DIVERGED = "diverged"
PROBE = 2  # rounds, from which the number that a budget allows is first computed
UNLIMITED = 1 << 30
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class GradientWork:
    """Gradients of single examples."""

    by_round: tuple[int, ...]  # the last one with what is done at the end
    total: int

    def rounds_within(self, budget: int) -> int:
        """How many rounds fit, if further ones take what the newest took that was not the last."""
        price = self.by_round[-2] if len(self.by_round) > 1 else self.by_round[-1]
        if not price:
            return UNLIMITED if self.total <= budget else 1
        return max(1, len(self.by_round) + (budget - self.total) // price)


@dataclass(frozen=True)
class SeededFederation:
    """A federation under one seed: everything that a method needs to be run in it."""

    spec: SuiteFederation
    seed: int

    @cached_property
    def whole(self) -> Federation:
        return self.spec.federation(self.seed)

    @cached_property
    def data(self) -> Federation:
        """The clients that take part."""
        first = self.whole.num_clients - self.spec.newcomers
        return self.whole.take(torch.arange(first)) if self.spec.newcomers else self.whole

    @cached_property
    def budget(self) -> int:
        """Gradients that a method may take: those of FedAvg's rounds, and of one round more of all clients."""
        config = self.spec.config(self.seed, with_data=False)
        count, training = self.data.train.count, config.training
        a_round = int((training.num_steps(count) * count.clamp_max(training.batch)).sum())
        return round(a_round * config.participation * config.rounds) + a_round

    def config(self, method: str, settings: Settings, rounds: int) -> RunConfig:
        algorithms = {method: {"method": method, **settings}}
        config = self.spec.config(self.seed, with_data=False)
        return replace(config, algorithms=algorithms, rounds=rounds, save_models=bool(self.spec.newcomers))

    def run(
        self, method: str, settings: Settings, rounds: int, split: str
    ) -> tuple[MethodResult, GradientWork, RunConfig]:
        """Train for `rounds` and judge on a split."""
        config, count = self.config(method, settings, rounds), GradientCount()
        by_round: list[int] = []
        experiment = Experiment(config, self.data)
        check_run(experiment.inputs)
        config = experiment.config
        with experiment.make_loop(experiment.inputs.algorithms[method], self.seed, count=count) as loop:
            table = ClientTable.from_federation(self.data)
            trial = MethodRun(method, loop, table, rounds, split=split, keep_models=config.save_models)
            for _ in trial.rounds():
                by_round.append(count.examples - sum(by_round))
            result = trial.finish()
        return result, GradientWork(tuple(by_round), count.examples), config

    def run_within(self, method: str, settings: Settings, split: str) -> tuple[MethodResult, GradientWork, RunConfig]:
        """Train for the rounds that the budget allows, within a tenth of them, and judge on a split."""
        _, probe, _ = self.run(method, settings, min(PROBE, self.spec.rounds), split)
        best: tuple[MethodResult, GradientWork, RunConfig] | None = None
        fits, too_many = 0, self.spec.rounds + 1
        rounds = min(probe.rounds_within(self.budget), self.spec.rounds)
        while True:
            outcome = self.run(method, settings, rounds, split)
            if outcome[1].total <= self.budget or rounds == 1:
                best, fits = outcome, rounds
            else:
                too_many = rounds
            rounds = min(outcome[1].rounds_within(self.budget), too_many - 1)
            if best is not None and rounds <= fits + fits // 10:
                return best

    def validated(self, method: str, settings: Settings) -> TriedSetting:
        """Mean over clients on validation rows; no value if the method refuses the settings, or diverges."""
        try:
            result, work, _ = self.run_within(method, settings, "val")
        except KinfedError as error:
            return TriedSetting(dict(settings), None, 0, 0, str(error))
        value = result.personal.get(f"{self.spec.metric}_mean", math.nan)
        lost = result.diverged or not math.isfinite(value)
        return TriedSetting(
            dict(settings), None if lost else value, result.rounds, work.total, DIVERGED if lost else ""
        )

    def judged(self, method: str, settings: Settings) -> CellScores:
        """The test scores of all clients, or of those that joined afterwards."""
        result, work, config = self.run_within(method, settings, "test")
        assert result.evaluation.personal is not None  # of the arena's metrics
        scores = result.evaluation.personal.metric(self.spec.metric)
        if self.spec.newcomers and not result.diverged:
            scores = torch.tensor([self._adopted(method, result, config, k) for k in self._newcomers])
        lost = result.diverged or not bool(torch.isfinite(scores[~scores.isnan()]).all())
        values = [None if value != value else value for value in scores.tolist()]
        return CellScores(result.rounds, work.total, None if lost else tuple(values))

    @property
    def _newcomers(self) -> range:
        return range(self.data.num_clients, self.whole.num_clients)

    def _adopted(self, method: str, result: MethodResult, config: RunConfig, number: int) -> float:
        newcomer = self.whole.take(torch.tensor([number]))
        run = RunInMemory(config, self.seed, describe(self.data), {method: result.server_state or {}})
        try:
            adopted = adopt(run, newcomer, method).adopted
        except ConfigError:  # it has nothing for a client that was not in the run
            return self._alone(config, newcomer)
        return math.nan if adopted is None else adopted.value

    def _alone(self, config: RunConfig, newcomer: Federation) -> float:
        config = replace(config, algorithms={"local": {"method": "local"}})
        run = RunInMemory(config, self.seed, describe(self.data), {"local": {}})
        theta: Tensor = learn_alone(run, newcomer, "local")[None]
        cohort = newcomer.cohort(torch.tensor([0]), self.seed, 0)
        task = run.task()
        task.problem = newcomer.problem
        return float(task_for(task, theta).evaluate(theta, cohort.test).metric(self.spec.metric)[0])


def enter(method: str, spec: SuiteFederation, budget: Budget) -> FederationScores:
    """Tune and judge a method in one federation; why not, where it cannot run there."""
    start = time.process_time()
    trials = tried(method, spec, budget)
    if reason := refusal(trials):
        return FederationScores(refused=reason)
    chosen = best_trial(trials, spec.metric)
    cells = {seed: SeededFederation(spec, seed).judged(method, chosen.settings) for seed in budget.seeds}
    return FederationScores(trials, cells, processor_seconds=time.process_time() - start)


def tried(method: str, spec: SuiteFederation, budget: Budget) -> tuple[TriedSetting, ...]:
    """All settings on the validation rows of the first seed."""
    first = SeededFederation(spec, budget.seeds[0])
    return tuple(first.validated(method, settings) for settings in drawn_settings(method, spec, budget))


def refusal(trials: tuple[TriedSetting, ...]) -> str:
    """Why a method runs with none of the settings; "" if it does with any."""
    refused = all(trial.value is None and trial.reason != DIVERGED for trial in trials)
    return trials[0].reason if refused else ""


def drawn_settings(method: str, spec: SuiteFederation, budget: Budget) -> Iterator[dict[str, Any]]:
    """The settings that are tried: none of one's own, and then draws from the method's ranges. Each range is cut into
    as many parts as there are draws, and every draw has a part of its own. Draws know the federation, the option's
    place (the learning rate is the first) and their number, not the method: all methods try the same shares of their
    ranges, so that neither luck nor a name makes one of them better."""
    ranges = sorted(tuning_space(method, "sgd").items(), key=lambda entry: entry[0] != "lr")
    yield {}
    count = budget.trials - 1 if ranges else 0
    shares = [_shares(rng.root(place, f"arena {spec.name}"), count) for place in range(len(ranges))]
    for number in range(count):
        yield {name: _drawn(range_, own[number]) for (name, range_), own in zip(ranges, shares, strict=True)}


def _shares(key: Tensor, count: int) -> list[float]:
    """[count] shares of a range, one in each of its equal parts, in random order."""
    part = rng.permutation(rng.fold(key, 0), count)
    return ((part + rng.uniform(rng.fold(key, 1), count)) / count).tolist()


def _drawn(range_: Range, draw: float) -> float | int:
    if range_.log:
        value = range_.low * (range_.high / range_.low) ** draw
    else:
        value = range_.low + (range_.high - range_.low) * draw
    return round(value) if range_.whole else float(f"{value:.3g}")


def best_trial(trials: tuple[TriedSetting, ...], metric: str) -> TriedSetting:
    """The best on validation rows; of equals the first."""
    sign = 1.0 if METRICS.named(metric).higher_is_better else -1.0
    return max(trials, key=lambda trial: -math.inf if trial.value is None else sign * trial.value)
