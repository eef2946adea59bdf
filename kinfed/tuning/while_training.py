"""Tuning while training (FedEx): one run of each method, in which clients try settings and validation losses choose.

    result = tune_while_training(make_config(None, {"algorithms": "fedavg,ditto"}), configurations=20, out="tuned")
    kinfed.run("tuned/best.toml")

A search of n trials costs n runs; this costs one, whatever the number of configurations, and chooses settings that are
good on the way, for clients that share one model (kinfed.algorithms.fedex). The first configuration is the method as
configured, the others are drawn from the declared ranges, in three digits. Only what changes a client's work is varied:
an option whose ends give the same updates and states is left as it is, with a note.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, FedEx, RoundInfo
from kinfed.config import RunConfig
from kinfed.core import Range, rng, storage
from kinfed.data import Federation
from kinfed.engine import METRICS, Builder
from kinfed.errors import ConfigError
from kinfed.records import RunFolder
from kinfed.runs import ClientTable, Experiment, MethodRun, NullObserver, Observer
from kinfed.tuning.tuning_job import Explored, TuneResult, TuningJob

PROBE_STEPS = 3  # of local training, after which an option that matters to clients shows


def tune_while_training(
    config: RunConfig, configurations: int, out: Path | str, *, resume: bool = False,
    ranges: Mapping[str, Mapping[str, Range]] | None = None, federation: Federation | None = None,
    model: Builder | None = None, observer: Observer | None = None, should_stop: Callable[[], bool] = lambda: False,
) -> TuneResult[Explored]:  # fmt: skip
    """Train every method of the configuration once, in several configurations of its local settings."""
    if configurations < 2:
        raise ConfigError(f"tuning while training chooses among two configurations at least; got {configurations}")
    job = TuningJob(config, "tuning while training", federation, model, should_stop)
    observer = observer or NullObserver()
    spaces = job.spaces(ranges)
    methods = {label: _variants(job, label, space, configurations, observer) for label, space in spaces.items()}
    search = {"while_training": configurations, "variants": {label: values for label, (values, _) in methods.items()}}
    with job.open(RunFolder, out, search, resume) as folder:
        results = [
            _explore(job, label, values, variants, folder, observer) for label, (values, variants) in methods.items()
        ]
        storage.write_json(folder.path / "tuning.json", {"methods": {one.label: one.to_json() for one in results}})
        heading = f"Chosen while training (FedEx) by validation losses: {configurations} configuration(s) per method"
        shown = METRICS.named(job.metric).shown
        comments = {one.label: f"{shown(one.value)} on validation data at the end" for one in results}
        return job.write_best(folder.path, results, heading, comments)


def _variants(
    job: TuningJob, label: str, space: Mapping[str, Range], count: int, observer: Observer
) -> tuple[list[dict[str, Any]], tuple[AnyAlgorithm, ...]]:
    """Settings of each configuration, and the method with them."""
    config, experiment = job.config, job.experiment
    first = experiment.inputs.algorithms[label]

    def is_local(name: str) -> bool:
        ends = [job.variant(label, {name: _value(space[name], share)}) for share in (0.0, 1.0)]
        return _changes_clients(experiment, first, ends)

    local = [name for name in space if is_local(name)]
    if others := [name for name in space if name not in local]:
        observer.note(f"{label}: {', '.join(others)} does not change what clients do, and stays as it is")
    values: list[dict[str, Any]] = [{}]
    for number in range(1, count if local else 1):
        key = rng.fold(rng.root(config.seeds[0], f"configurations-{label}"), number)
        draws = rng.uniform(key, len(local)).tolist()
        values.append({name: _value(space[name], u) for name, u in zip(local, draws, strict=True)})
    return values, tuple(job.variant(label, settings) for settings in values)


def _value(range_: Range, u: float) -> Any:
    """Value at the share u of a range, evenly on its scale; in three digits."""
    low, high = range_.low, range_.high
    number = low * (high / low) ** u if range_.log else low + u * (high - low)
    return min(max(round(number), int(low)), int(high)) if range_.whole else float(f"{number:.3g}")


def _changes_clients(experiment: Experiment, first: AnyAlgorithm, ends: list[AnyAlgorithm]) -> bool:
    """Whether an option at the ends of its range gives a client other updates or states, of the same shapes."""
    seed = experiment.inputs.config.seeds[0]
    task, data = experiment.inputs.training_parts(seed, first)
    population = data.population(seed)
    ids = data.train.count.argmax()[None]
    cohort = data.cohort(ids, seed, 1)
    results: list[dict[str, Tensor]] = []
    for algorithm in ends:
        brief = replace(algorithm, training=algorithm.training.with_steps(PROBE_STEPS))
        server = brief.init_server(task, population)
        server, _ = brief.plan(server, ids, RoundInfo(1, population, task.trainable, task))
        state, up = brief.client_update(task, brief.init_client(task, cohort), brief.download(server, ids), cohort)
        results.append({**state.named(), **{f"up.{name}": tensor for name, tensor in up.named().items()}})
    one, other = results
    shapes = [{name: tensor.shape for name, tensor in result.items()} for result in results]
    return shapes[0] == shapes[1] and not all(torch.equal(one[name], other[name]) for name in one)


def _explore(
    job: TuningJob, label: str, values: list[dict[str, Any]], variants: tuple[AnyAlgorithm, ...], folder: RunFolder,
    observer: Observer,
) -> Explored:  # fmt: skip
    """One method under every seed."""
    config, experiment, algorithm = job.config, job.experiment, FedEx.of(variants)
    figures, chances = [], []
    for seed in config.seeds:
        table = ClientTable.from_federation(experiment.inputs.federation(seed))
        with experiment.make_loop(algorithm, seed) as loop:
            run = MethodRun(
                label, loop, table, config.rounds, eval_every=config.eval_every, split="val", folder=folder,
                checkpoint_every=config.checkpoint_every, observer=observer, should_stop=experiment.should_stop,
            )  # fmt: skip
            figures.append(run.execute().personal.get(f"{job.metric}_mean", 0.0))
            chances.append(loop.server.named()["theta"])
    chance = tuple(float(f"{one:.6g}") for one in torch.stack(chances).mean(0).tolist())
    method, value = config.algorithms[label]["method"], sum(figures) / len(figures)
    return Explored(label, method, job.metric, value, tuple(values), chance)
