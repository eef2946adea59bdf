"""A run: several algorithms on the same clients, batches and starts, over several seeds, with a journal on disk.

    result = kinfed.run(algorithms="local,fedavg,ditto", rounds=30, out="runs/first")
    result.personal_model("3", "ditto").predict(rows)

Per seed the federation, the starting model and the sampling are made once and shared by all algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kinfed.algorithms import AnyAlgorithm
from kinfed.config import RunConfig, make_config
from kinfed.data import Federation
from kinfed.engine import METRICS, Builder, GradientCount, Score, begin_compiling, named_loss
from kinfed.errors import ConfigError
from kinfed.records import Baseline, Checkpoints, RunFiles, RunFolder, evaluated_curves
from kinfed.runs.baseline import baseline_score, make_baseline
from kinfed.runs.early_stopping import EarlyStopping
from kinfed.runs.growth import grown_config, refuse_changes
from kinfed.runs.loop_factory import CommonStart, LoopFactory, StartMaker
from kinfed.runs.method_run import MethodRun
from kinfed.runs.observer import NullObserver, Observer, RunInfo
from kinfed.runs.results import ClientTable, MethodResult, RunOutcome
from kinfed.runs.run_checks import (
    COMPILING,
    audit_record,
    check_privacy,
    check_run,
    description,
    leave_out_what_cannot_run,
    run_notes,
)
from kinfed.runs.run_inputs import RunInputs
from kinfed.server import Loop
from kinfed.serving import save_layout


def run(
    config: RunConfig | Path | str | None = None, *, out: Path | str | None = None, resume: bool = False,
    extend: bool = False, federation: Federation | None = None, model: str | Mapping[str, Any] | Builder | None = None,
    observer: Observer | None = None, should_stop: Callable[[], bool] = lambda: False, **settings: Any,
) -> RunOutcome:  # fmt: skip
    """Run a configuration (a RunConfig, a TOML file, or settings by name). `kinfed.run` is this with a display, and
    gives its results as tables, figures and pages (kinfed.api).

    `federation` replaces the data set and its partition; `model` is a name, with options {"name": ..., ...}, or a
    function that makes an nn.Module: without arguments, or from the shape of an example and the number of classes.
    With `out` the run writes its folder and can be resumed, or extended by more rounds, seeds and methods, where
    `settings` says what the folder's run is to have besides (kinfed.runs.growth); without, all stays in memory."""
    if extend and out is None:
        raise ConfigError("a run in a folder can be extended; say which one with out (--out)")
    grown = Path(out) if extend and out is not None else None
    config, build = chosen_config(config, model, settings, grown)
    before = None if grown is None else RunFiles(grown).config
    from kinfed.runs.cross_validation import CrossValidation  # it is made of experiments

    kind = Experiment if config.folds is None else CrossValidation
    experiment = kind(config, federation, build, observer or NullObserver(), should_stop)
    with ExitStack() as stack:
        stack.enter_context(closing(experiment))
        if out is None:
            experiment.check()
            stack.callback(experiment.observer.ended)
            experiment.observer.begun(RunInfo(experiment.config.dump(), None, None))
            return experiment.execute(None)
        contents = experiment.contents()
        experiment.check()  # before a folder exists: a refused configuration leaves nothing behind
        if before is not None:
            refuse_changes(before, RunFiles(grown or "").envelope.get("contents", {}), experiment.inputs, contents)
        identity, values = experiment.config.fingerprint(contents), experiment.config.dump()
        folder = stack.enter_context(
            RunFolder.open(out, values, identity, contents=contents, resume=resume, extend=extend)
        )
        stack.callback(experiment.observer.ended)
        first_identity = (*RunFiles(folder.path).earlier_fingerprints, identity)[0]
        experiment.observer.begun(RunInfo(values, folder.path, first_identity))
        if folder.version_change:
            experiment.observer.note(folder.version_change)
        return experiment.execute(folder)


def chosen_config(
    config: RunConfig | Path | str | None,
    model: str | Mapping[str, Any] | Builder | None,
    settings: Mapping[str, Any],
    grown: Path | None = None,
) -> tuple[RunConfig, Builder | None]:
    """The configuration that a caller means, and what makes the module where it is the caller's own. `grown` is the
    folder of a run that gets more rounds, seeds or methods."""
    if isinstance(model, str | Mapping):
        settings, model = {**settings, "model": model}, None
    if callable(settings.get("loss")):
        settings = {**settings, "loss": named_loss(settings["loss"])}
    if grown is not None:
        if isinstance(config, RunConfig):
            settings, config = config.dump() | dict(settings), None
        return grown_config(grown, None if config is None else Path(config), settings), model
    if not isinstance(config, RunConfig):
        return make_config(None if config is None else Path(config), settings), model
    if settings:
        raise ConfigError("give either a RunConfig or settings by name, not both")
    return config, model


def read_config(folder: Path) -> RunConfig:
    """The configuration that a run folder holds."""
    return RunFiles(folder).config


class Experiment:
    """All methods and seeds of one configuration; of a cross-validation, in one `fold`."""

    def __init__(
        self, config: RunConfig, federation: Federation | None = None, model: Builder | None = None,
        observer: Observer | None = None, should_stop: Callable[[], bool] = lambda: False, *, fold: int = 0,
    ) -> None:  # fmt: skip
        self.inputs = RunInputs(config, federation, model, fold)
        leave_out_what_cannot_run(self.inputs)
        self.observer = observer or NullObserver()
        self.should_stop = should_stop
        self._loops = LoopFactory(self.inputs, self.observer.note)
        self._start_maker = StartMaker(self._loops, self.observer, should_stop)
        self._starts: dict[int, CommonStart] = {}
        self._alone: Score | None = None  # of the seed that is being run
        self.folds: list[Experiment] = [self]

    @property
    def config(self) -> RunConfig:
        return self.inputs.config

    def contents(self) -> dict[str, str]:
        """Digests as of `RunInputs.contents`, of all folds."""
        return {name: digest for fold in self.folds for name, digest in fold.inputs.contents().items()}

    def check(self) -> None:
        for fold in self.folds:
            check_run(fold.inputs)

    def execute(self, folder: RunFolder | None) -> RunOutcome:
        """Run everything; what the folder holds already is taken up where it ends."""
        inputs, results, baselines = self.inputs, [], []
        if begin_compiling(inputs.task()):
            self.observer.note(COMPILING)
        for fold in self.folds:
            for label in fold.inputs.algorithms:
                check_privacy(fold.inputs, label)
        if folder is not None:
            save_layout(folder.path, inputs.model_name, inputs.models())
            folder.write_audit(audit_record(inputs))
        for note in run_notes(inputs):
            self.observer.note(note)
        for seed in inputs.config.seeds:
            if folder is not None:
                folder.write_federation(seed, description(inputs, seed).to_json())
            baselines.append(self.baseline(seed))
            if folder is not None:
                folder.write_baseline(seed, baselines[-1].to_json())
            by_label = {}
            for label in inputs.order:
                by_label[label] = self.trial(label, seed, folder)
                self.observer.finished(by_label[label])
            results += [by_label[label] for label in inputs.algorithms]
            if folder is not None and self._alone is not None:
                self._alone.drop_draws()  # all lines of clients are written
        if folder is not None:
            if folder.has_grown:
                folder.sort_rounds(inputs.order, inputs.config.seeds)
            folder.write_summary({"results": [result.to_json() for result in results]})
        path, own = None if folder is None else folder.path, inputs.own_model_name
        describe = partial(description, inputs)
        return RunOutcome(inputs.config, results, inputs.federations, inputs.models(), path, own, baselines, describe)

    def trial(self, label: str, seed: int, folder: RunFolder | None) -> MethodResult:
        """One method with one seed; of a cross-validation, in all folds."""
        return self.run_method(label, seed, folder)

    def baseline_score(self, seed: int) -> Score:
        """Score of the baseline without a model."""
        data = self.inputs.federation(seed)
        task, shape = self.inputs.task(), None
        if data.problem.kind == "dense":
            example = data.features.gather(torch.zeros(1, 1, dtype=torch.int64)).to(task.device)
            shape = tuple(task.logits(task.init(seed)[None], example).shape[2:])
        return baseline_score(data, self.inputs.evaluated_ids(seed), task.objective, self.config.metric, shape)

    def baseline(self, seed: int) -> Baseline:
        data, ids = self.inputs.federation(seed), self.inputs.evaluated_ids(seed)
        clients, score = ClientTable.from_federation(data), self.baseline_score(seed)
        return make_baseline(seed, score, ids, clients, data.problem, self.config.metric)

    def run_method(self, label: str, seed: int, folder: RunFolder | None) -> MethodResult:
        """One method with one seed in this fold, from the seed's common start, in the order `RunInputs.order`."""
        config = self.inputs.config
        if label == self.inputs.order[0]:
            self._alone = None
        self._start(seed, None if folder is None else folder.checkpoints)
        states = folder.path / "states" if folder is not None and config.state != "memory" else None
        with self.make_loop(self.inputs.algorithms[label], seed, states) as loop:
            if loop.privacy is not None and config.dp_epsilon is not None:
                noise = f"noise {loop.privacy.noise:.4g} for epsilon {config.dp_epsilon:g}"
                self.observer.note(f"{label} seed {seed}: {noise}")
            if loop.user_level is not None and config.user_epsilon is not None and loop.algorithm.sends:
                noise = f"noise {loop.user_level.noise:.4g} for user-level epsilon {config.user_epsilon:g}"
                self.observer.note(f"{label} seed {seed}: {noise}")
            result = MethodRun(
                label, loop, ClientTable.from_federation(self.inputs.federation(seed)), config.rounds,
                eval_every=config.eval_every, checkpoint_every=config.checkpoint_every, keep_models=config.save_models,
                client_rounds=config.client_rounds, folder=folder, observer=self.observer, should_stop=self.should_stop,
                fold=None if config.folds is None else self.inputs.fold, alone=self._alone,
                stopping=self._stopping(seed),
            ).execute()  # fmt: skip
        self._alone = result.alone
        return self._with_curves(result, folder)

    def _stopping(self, seed: int) -> EarlyStopping | None:
        config = self.inputs.config
        if not config.early_stopping:
            return None
        headline = METRICS.headline(self.inputs.federation(seed).problem, config.metric)
        return EarlyStopping(config.early_stopping, headline, config.stopped_models)

    def _with_curves(self, result: MethodResult, folder: RunFolder | None) -> MethodResult:
        """ROC and calibration of the clients' models; of a fold they are written with all others."""
        data = self.inputs.federation(result.seed)
        curves = evaluated_curves(self.inputs.models(), data, result.evaluation)
        if folder is not None and curves is not None and self.config.folds is None:
            folder.write_curves(result.label, result.seed, curves.to_json())
        return replace(result, curves=curves)

    def make_loop(
        self, algorithm: AnyAlgorithm, seed: int, state_folder: Path | None = None, count: GradientCount | None = None
    ) -> Loop:
        """An algorithm before its first round, on the data, the common start and the schedule of this configuration.
        Clients' states are kept in `state_folder` if given, otherwise in memory; gradients go into `count`."""
        return self._loops.make(algorithm, seed, self.config.round_numbers, self._start(seed), state_folder, count)

    def _start(self, seed: int, checkpoints: Checkpoints | None = None) -> CommonStart:
        if seed not in self._starts:
            self._starts[seed] = self._start_maker.make(seed, checkpoints)
        return self._starts[seed]

    def share_workers(self, other: Experiment) -> None:
        """Let clients live in the other experiment's processes, if it has any; it is to be closed last."""
        self._loops.share_workers(other._loops)

    def close(self) -> None:
        """End the workers in other processes, if there are any."""
        for fold in self.folds:
            fold._loops.close()
