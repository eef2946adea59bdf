"""Every method with the same settings tried, in every fold, within a time that may be bounded.

The search goes in rounds of tries: try 0 of all methods, then try 1 of all methods, ... A bound of time ends it between
two of these. What a choice rests on is then the same number of tries for every method, and that number is on
record: the same table, settings and number of tries give the same result, bit for bit, on a machine of any speed. Where
time is up within the first try already, methods without it are left out by name.

Validation is nested: the training rows of every site are in folds, each of which is validated by models that the others
train; what columns become, and mean and scale of a number to predict, are learnt anew in every fold. Test rows are in
none of them, so nothing that is chosen here has seen one.

Every finished fold of every try is a file (or stays in memory, without a folder), so that a search that was killed goes
on where it was.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kinfed.config import RunConfig, make_config
from kinfed.core import rng, storage
from kinfed.data import Federation, Problem, Split, findings, fold_numbers, make_federation, name_keys
from kinfed.data.sources import Source, take_rows
from kinfed.engine import Task, task_for
from kinfed.errors import ConfigError, DataError
from kinfed.runs import Interrupted, RunOutcome, run
from kinfed.tabular.fit_settings import FitSettings
from kinfed.tabular.portfolio import LOCAL, Contender, Try, contenders_of, is_tried, make_try

RESERVE = 1.5  # times what the methods took in a fold: kept back for fitting the chosen ones on all training rows
NEVER = -1  # the fold of a row that always trains
PAGE_SECONDS = 5.0  # kept back for what comes after that


@dataclass
class WorkClock:
    """A clock on which a second passes for a second of this process's processor time, and never faster than time
    itself: other work on a busy machine takes nothing of a bound. Several threads at work count once."""

    seconds: float = 0.0
    _wall: float = field(default_factory=lambda: time.monotonic())
    _worked: float = field(default_factory=lambda: time.process_time())

    def __call__(self) -> float:
        wall, worked = time.monotonic(), time.process_time()
        self.seconds += min(wall - self._wall, worked - self._worked)
        self._wall, self._worked = wall, worked
        return self.seconds


now = WorkClock()


class FitObserver(Protocol):
    """An observer of a fit."""

    def begin(self, steps: int) -> None:
        """The number of steps is known; they are done if time allows."""

    def step(self, text: str) -> None:
        """A step begins."""

    def note(self, text: str) -> None:
        """A sentence that a reader should see."""


class Unobserved:
    """An observer that keeps silent."""

    def begin(self, steps: int) -> None: ...
    def step(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass
class TimeBudget:
    """Seconds of work for a whole fit (WorkClock), those of earlier processes included; None: without bound."""

    seconds: float | None
    used: float = 0.0
    reserve: float = 0.0
    _began: float = field(default_factory=lambda: now())

    @property
    def spent(self) -> float:
        return self.used + now() - self._began

    @property
    def left(self) -> float:
        return float("inf") if self.seconds is None else self.seconds - self.spent

    def search_is_over(self) -> bool:
        return self.left <= self.reserve

    def is_over(self) -> bool:
        return self.left <= 0


def assign_folds(data: Federation, folds: int, seed: int) -> Tensor:
    """[T] the fold in which each entry of `data.train.rows` is validated; the only row of a site always trains, and so
    do the first ones where rows have an order."""
    strata, _ = data.problem.strata(data.labels)
    numbers = fold_numbers if data.ties is None else data.ties.fold_numbers
    fold = numbers(data.train, folds, strata, name_keys(rng.root(seed, "fit-folds"), data.names))
    if not bool((fold >= 0).any()):
        raise DataError(
            f"none of the {data.num_clients} sites has two training rows, so methods cannot be compared; give more "
            "rows, or another client_column if this one identifies rows rather than sites"
        )
    return fold


def trains_in(data: Federation, fold_of: Tensor, fold: int) -> Tensor:
    """[T] bool: rows by which models of a fold are trained."""
    return fold_of != fold if data.ties is None else data.ties.trains(fold_of, fold)


def fold_federation(source: Source, data: Federation, fold_of: Tensor, fold: int, seed: int) -> Federation:
    """The sites with the training rows of a fold, and those inside it in the place of test rows."""
    marked, inside = torch.zeros(len(source), dtype=torch.bool), fold_of == fold
    marked[data.train.rows[inside]] = True
    rows = data.train.rows[inside | trains_in(data, fold_of, fold)].sort().values
    part = replace(take_rows(source, rows), is_test=marked[rows], is_val=None)
    federation = make_federation(part, "column", None, None, seed, audit=False)
    if data.problem.kind in ("counts", "survival"):  # outputs are ratios to what all training rows have: to the same
        return replace(federation, problem=data.problem)
    return federation


def fold_rows(data: Federation, fold_of: Tensor, fold: int) -> Tensor:
    """[T_f] places in `data.train.rows` of a fold's test rows, in the order of `fold_federation(...).test.rows`."""
    inside = (fold_of == fold).nonzero().squeeze(1)
    owner, row = data.train.owner[inside], data.train.rows[inside]
    return inside[torch.from_numpy(np.lexsort((row.numpy(), owner.numpy())))]


@dataclass(frozen=True)
class FoldResult:
    """Outputs of the models of one method on the rows of one fold; none, with a reason, where it was refused."""

    outputs: dict[str, Tensor]  # [T_f, C] by the model that a contender deploys (personal, server)
    seconds: float
    refusal: str = ""


class FoldStore:
    """Results of folds by try, method and fold, in a folder or in memory."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[tuple[int, str, int], FoldResult] = {}
        if folder is not None:
            storage.make_folder(folder)
            storage.remove_drafts(folder)
            for path in sorted(folder.glob("*.safetensors")):
                about = storage.read_metadata(path)
                outputs = {name: tensor for name, tensor in storage.read_tensors(path).items() if name != "refused"}
                key = int(about["try"]), about["method"], int(about["fold"])
                self._memory[key] = FoldResult(outputs, float(about["seconds"]), about["refusal"])

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self._memory.values())

    def get(self, key: tuple[int, str, int]) -> FoldResult | None:
        return self._memory.get(key)

    def put(self, key: tuple[int, str, int], result: FoldResult) -> None:
        self._memory[key] = result
        if self._folder is not None:
            number, method, fold = key
            about = {"try": str(number), "method": method, "fold": str(fold), "seconds": f"{result.seconds:.3f}"}
            tensors = result.outputs or {"refused": torch.ones(1)}
            path = self._folder / f"{method}-{number}-{fold}.safetensors"
            storage.write_tensors(path, tensors, about | {"refusal": result.refusal})

    def slowest(self, method: str) -> float:
        return max((r.seconds for (_, name, _), r in self._memory.items() if name == method), default=0.0)


@dataclass(frozen=True)
class Tries:
    """A finished search."""

    methods: tuple[str, ...]
    trials: int  # of every method
    left_out: dict[str, str]  # methods without a finished try, and why
    outputs: dict[tuple[str, int], Tensor]  # [T, C] of all training rows, by contender and try

    @property
    def contenders(self) -> list[Contender]:
        names = {name for name, _ in self.outputs}
        return [one for method in self.methods for one in contenders_of(method) if one.name in names]


@dataclass
class Search:
    source: Source
    data: Federation  # training rows, and test rows that are not touched here
    settings: FitSettings
    methods: tuple[str, ...]
    metric: str
    store: FoldStore
    budget: TimeBudget
    observer: FitObserver
    should_stop: Callable[[], bool]
    _folds: dict[int, Federation] = field(default_factory=dict)

    @cached_property
    def fold_of(self) -> Tensor:
        """[T] the fold of each entry of data.train.rows."""
        return assign_folds(self.data, self.settings.folds, self.settings.seed)

    def run(self, tell: Callable[[Tries], None] = lambda so_far: None) -> Tries:
        """The tries; those so far are told as soon as learning alone can be compared with another method."""
        finished: list[tuple[int, str]] = []
        trials = 0
        for number in range(self.settings.trials):
            for method in self.methods:
                if not self._try(number, method):
                    return self._result(finished, trials, number)
                finished.append((number, method))
                if number == 0 and len(finished) > 1:
                    tell(self._result(finished, trials, 0))
            trials = number + 1
            if number:
                tell(self._result(finished, trials, trials))
        return self._result(finished, trials, trials)

    def make_try(self, number: int, method: str) -> Try:
        return make_try(number, method, self.settings.model_names, self.data.num_clients, self.settings.seed)

    def _try(self, number: int, method: str) -> bool:
        """Try a method in all folds; False where time was up before the last."""
        if not is_tried(number, method):
            return True
        for fold in range(self.settings.folds):
            self.observer.step(f"{method}, try {number + 1} of {self.settings.trials}, fold {fold + 1}")
            if self.store.get((number, method, fold)) is None:
                fits = sum(len(contenders_of(one)) * self.store.slowest(one) for one in self.methods)
                self.budget.reserve = RESERVE * fits + PAGE_SECONDS
                if self.budget.search_is_over():
                    return False
                try:
                    self.store.put((number, method, fold), self._fit(number, method, fold))
                except Interrupted:
                    if self.should_stop():
                        raise
                    return False
        return True

    def _fit(self, number: int, method: str, fold: int) -> FoldResult:
        began = now()
        if fold not in self._folds:
            self._folds[fold] = fold_federation(self.source, self.data, self.fold_of, fold, self.settings.seed)
        setting, data = self.make_try(number, method), self._folds[fold]
        algorithms = {method: {"method": method, **setting.options}}
        config = method_config(self.settings, self.metric, setting.model, algorithms)
        try:
            result = run(
                config, federation=data, should_stop=lambda: self.should_stop() or self.budget.search_is_over()
            )
        except ConfigError as error:
            return FoldResult({}, now() - began, str(error))
        outputs: dict[str, Tensor] = {one.model: outputs_on_test(result, method, one) for one in contenders_of(method)}
        return FoldResult(outputs, now() - began)

    def _result(self, finished: list[tuple[int, str]], trials: int, stopped_in: int) -> Tries:
        if (0, LOCAL) not in finished:
            raise ConfigError(
                "time was up before learning alone was tried once in every fold; give more minutes, or fewer rounds, "
                "folds or models. What is done is kept for --resume"
            )
        methods, left_out = self.methods, {}
        if stopped_in == 0:  # time was up within the first try
            trials, methods = 1, tuple(method for _, method in finished)
            left_out = {method: "time was up before it was tried" for method in self.methods if method not in methods}
        outputs: dict[tuple[str, int], Tensor] = {}
        for method in methods:
            refusals = []
            for number in (number for number in range(trials) if is_tried(number, method)):
                parts = [self.store.get((number, method, fold)) for fold in range(self.settings.folds)]
                results = [part for part in parts if part is not None]
                refusals += [part.refusal for part in results if part.refusal]
                if not any(part.refusal for part in results):
                    outputs |= self._joined(method, number, results)
            if all((one.name, number) not in outputs for one in contenders_of(method) for number in range(trials)):
                left_out[method] = refusals[0] if refusals else "its models give no numbers"
        return Tries(methods, trials, left_out, outputs)

    def _joined(self, method: str, number: int, folds: list[FoldResult]) -> dict[tuple[str, int], Tensor]:
        """Outputs of a try on all training rows; none if some are not finite."""
        joined = {}
        for one in contenders_of(method):
            whole = torch.zeros(len(self.fold_of), self.data.problem.outputs, dtype=torch.float64)
            for fold, result in enumerate(folds):
                whole[fold_rows(self.data, self.fold_of, fold)] = result.outputs[one.model]
            if bool(torch.isfinite(whole).all()):
                joined[one.name, number] = whole
        return joined


def method_config(
    settings: FitSettings, metric: str, model: str, algorithms: dict[str, dict[str, object]], **more: object
) -> RunConfig:
    """A run of these algorithms in which every site takes part in every round."""
    return make_config(None, {
        "algorithms": algorithms, "model": model, "rounds": settings.rounds, "steps": settings.steps,
        "participation": 1.0, "seeds": (settings.seed,), "eval_every": 0, "metric": metric,
        "class_weights": settings.class_weights, "accept": findings.EVERYTHING, **more,
    })  # fmt: skip


def outputs_on_test(result: RunOutcome, label: str, contender: Contender) -> Tensor:
    """[T, C] float64 logits, or [T, 1] numbers in the target's own unit, of the rows `federation.test.rows`."""
    method = result.result(label)
    data = result.federations[method.seed]
    ids = torch.arange(data.num_clients)
    theta, server = method.evaluation.models if contender.model == "personal" else None, method.server_models
    if contender.model == "server" and server is not None:
        theta = server.models[torch.zeros_like(ids) if server.assignment is None else server.assignment.clamp_min(0)]
    if theta is None:
        raise ConfigError(f"{label} has no {contender.model} model to judge")
    return outputs_of_rows(result.task, theta, data.cohort(ids, method.seed, 0).test, data.problem)


def outputs_of_rows(task: Task, theta: Tensor, test: Split, problem: Problem) -> Tensor:
    """[T, C] outputs of models [n, P] on the rows of n clients, one client after the other, as `outputs_on_test`."""
    out = torch.empty(int(test.count.sum()), problem.outputs, dtype=torch.float64)
    start, task = test.count.cumsum(0) - test.count, task_for(task, theta)
    offset = torch.zeros_like(start)
    with torch.no_grad():
        for rows, batch in test.in_order():
            z, valid = task.logits(theta[rows], batch.x).to("cpu", torch.float64), batch.weight.cpu() > 0
            place = (start + offset)[rows][:, None] + torch.arange(valid.shape[1])
            out[place[valid]] = z[valid]
            offset[rows] += valid.sum(1)
    return problem.restored(out) if problem.is_regression else out
