"""A client that joins after a run: it gets what the federation has learned, fitted to its own data.

    adoption = adopt("runs/first", newcomer_from_table("runs/first", "new.csv", label_column="y"), "cgpfl")
    adoption.adopted.accuracy, adoption.model                its own held-out examples; [P]

A newcomer is a client that was never called. Wherever the server keeps something by client, its final state gets one
more row, as `init_server` makes it; methods with several models then find the newcomer's place by its training loss
(`Algorithm.place_newcomer`). From there the newcomer does what every client of the method does when it is called: it
receives its message, trains by the method's rule and keeps its state, for as many rounds as clients of the run took
part in. What it would send is dropped: no other client is needed, and the server's models stay what they are. What
`personalize` gives is its model.

Beside it stand the server's model as it is, and the control: training alone, from a random start, on the same batches.
Inputs are scaled and classes numbered as the run wrote them down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor

from kinfed.algorithms import AnyAlgorithm, Local, RoundInfo, changes_data, deployed_models
from kinfed.core import Nothing, Tree, storage, threads
from kinfed.data import Cohort, Federation, LoopMemory, Moments, Split, example_weights, with_memory
from kinfed.engine import METRICS, Architectures, Builder, Metric, Task, module_for, task_for
from kinfed.errors import ConfigError, DataError
from kinfed.newcomers.finished import NAME, EndedRun, opened
from kinfed.records import RunFiles, pick
from kinfed.runs import example_batch
from kinfed.serving import ModelInputs, ModelPipeline, about_model, state_dict


@dataclass(frozen=True)
class HeldOutMetrics:
    """A model on the newcomer's held-out examples."""

    accuracy: float  # 0 where a number is predicted
    loss: float
    value: float  # of the run's metric; NaN where it is undefined, such as AUROC of one class

    @classmethod
    def of_model(cls, task: Task, theta: Tensor, test: Split, metric: Metric) -> HeldOutMetrics | None:
        """Metrics of theta [1, P] on `test`; None if no example was held out."""
        score = task_for(task, theta).evaluate(theta, test)
        n = int(score.count[0])
        value = float(score.metric(metric.name)[0])
        return cls(float(score.correct[0]) / n, float(score.loss[0]) / n, value) if n else None


@dataclass(frozen=True)
class Adoption:
    algorithm: str
    seed: int
    rounds: int  # of local training, alone as well as adopted
    n_train: int
    n_test: int
    alone: HeldOutMetrics | None  # None: no example was held out
    server: HeldOutMetrics | None  # the server's model as it is; None if the method has none
    adopted: HeldOutMetrics | None
    place: str  # the context or cluster joined, "" if none
    model: Tensor  # [P]
    alone_model: Tensor  # [P] what it learns by itself
    metric: str = "accuracy"  # of the run, by which the models are shown

    def __rich__(self) -> Table:
        steps = "round" if self.rounds == 1 else "rounds"
        joined = f", in {self.place}" if self.place else ""
        title = (
            f"{self.algorithm}, seed {self.seed}{joined}: {self.n_train} training examples, {self.rounds} {steps} of "
            f"local training; judged on {self.n_test} held-out examples"
        )
        table = Table(title=title, title_justify="left", box=SIMPLE)
        table.add_column("model")
        metric = METRICS.named(self.metric)
        table.add_column("accuracy" if self.metric == "accuracy" else metric.title, justify="right")
        table.add_column("loss", justify="right")
        for name, metrics in (("alone", self.alone), ("server's model", self.server), ("adopted", self.adopted)):
            known = metrics is not None and not isnan(metrics.value)
            value = metric.shown(metrics.value) if metrics is not None and known else "-"
            table.add_row(name, value, "-" if metrics is None else f"{metrics.loss:.4f}")
        return table

    def save(self, folder: Path | str, path: Path | str) -> None:
        """The adopted model, as `kinfed export` writes one."""
        self._save(folder, path, self.model, self.algorithm)

    def save_alone(self, folder: Path | str, path: Path | str) -> None:
        """The same of what the newcomer learns alone, with the same inputs (`kinfed insure`, `kinfed watch`)."""
        self._save(folder, path, self.alone_model, "local")

    def _save(self, folder: Path | str, path: Path | str, theta: Tensor, algorithm: str) -> None:
        run = RunFiles(folder)
        about = {"client": NAME, "algorithm": algorithm, "seed": str(self.seed)} | about_model(run, self.seed, theta)
        storage.write_tensors(Path(path), state_dict(run, theta), about)


@threads.one_thread()
def adopt(
    ended: EndedRun | Path | str, newcomer: Federation, algorithm: str | None = None, *, seed: int | None = None,
    rounds: int | None = None, group: str | None = None, model: Builder | None = None,
) -> Adoption:  # fmt: skip
    """A model for the newcomer (a federation of one client) by a method of a finished run, in a folder or in memory.

    `rounds` of local training; as many as a client of the run took part in by default. `group` is needed
    where the method tells clients apart by group. `model` builds the module where the run was given one."""
    run = opened(ended, seed)
    label = run.label(algorithm)
    method = run.algorithm(label)
    if changes_data(method):
        raise ConfigError(
            f"{label} trains on examples that clients have shared, which a run does not keep; adopt from another method"
        )
    if "needs public data" in method.traits:
        raise ConfigError(
            f"{label} uses public examples, which a client that joins after the run does not have; adopt from another "
            "method, or run again with that client"
        )
    _check_fits(run, newcomer)
    task = run.task(model, example_batch(newcomer), group)
    whole = newcomer
    if "needs validation" in method.traits and not int(newcomer.val.count.sum()):
        newcomer = newcomer.with_validation(0.2, run.seed)
    newcomer, whole = _weighted(run, newcomer), _weighted(run, whole)
    rounds = _rounds(run, rounds)
    random_start, task = task, task.starting_at(run.start())
    server = with_newcomer(run, label, method, task, group)
    cohort = _cohort(run, newcomer, 1)
    if not _download(method, task, server, run).named():
        raise ConfigError(f"{label} sends its clients nothing, so there is nothing for a newcomer to take over")
    server = method.place_newcomer(task, server, cohort)
    models = method.server_models(server)
    server_model = None if models is None else models.rows(cohort.ids)
    metric = METRICS.headline(run.description.problem, run.config.metric)
    theta = _trained(method, task, server, run, newcomer, rounds)
    alone = _trained(Local(method.training), random_start, Nothing(), run, whole, rounds)
    models_of_run = run.models(model)
    whole_row = partial(_row_of_run, run, models_of_run, group)
    server_metrics = None
    if server_model is not None:
        server_metrics = HeldOutMetrics.of_model(task.server_task, server_model, cohort.test, metric)
    return Adoption(
        algorithm=label, seed=run.seed, rounds=rounds, n_train=int(cohort.train.count[0]),
        n_test=int(cohort.test.count[0]), alone=HeldOutMetrics.of_model(task, alone, cohort.test, metric),
        server=server_metrics,
        adopted=HeldOutMetrics.of_model(task, theta, cohort.test, metric), place=_place(method, server),
        model=whole_row(theta), alone_model=whole_row(alone), metric=metric.name,
    )  # fmt: skip


@threads.one_thread()
def learn_alone(run: EndedRun, newcomer: Federation, label: str) -> Tensor:
    """[P] what the newcomer learns by a method that sends its clients nothing: as they did, from its own examples."""
    _check_fits(run, newcomer)
    method, task = run.algorithm(label), run.task(None, example_batch(newcomer))
    return _trained(method, task, Nothing(), run, _weighted(run, newcomer), _rounds(run, None))[0]


def as_pipeline(run: EndedRun, theta: Tensor, label: str, name: str = NAME) -> ModelPipeline:
    """A newcomer's model [P], ready to use: raw rows in, classes or numbers out."""
    models = run.models()
    own = models.name_of(theta) if isinstance(models, Architectures) else None
    model = run.config.model_of(own)
    about = {"client": name, "algorithm": label, "seed": str(run.seed), "model": model.name}
    inputs = ModelInputs.of_description(run.description, model.options)
    return ModelPipeline(module_for(models, theta).eval(), inputs, about)


def _row_of_run(run: EndedRun, models: Task, group: str | None, theta: Tensor) -> Tensor:
    """A newcomer's model [1, P] as the run keeps those of its clients."""
    if not isinstance(models, Architectures):
        return theta[0]
    return models.side_by_side(run.architecture(models, group), theta)[0]


def _rounds(run: EndedRun, rounds: int | None) -> int:
    if rounds is None:
        return max(1, round(run.config.participation * run.config.rounds))
    if rounds < 1:
        raise ConfigError(f"a newcomer trains for at least one round; got {rounds}")
    return rounds


def with_newcomer(run: EndedRun, label: str, method: AnyAlgorithm, task: Task, group: str | None) -> Tree:
    """The run's server with one more client, who was never called: wherever it keeps something by client, the row of
    `init_server` stands at the end."""
    if group is not None and not run.groups:
        raise ConfigError(f"the clients of {run.name} have no groups; leave out the newcomer's")
    number = 0 if group is None else run.groups.index(pick("group", group, run.groups))
    before = method.init_server(task, run.population()).named()
    after = method.init_server(task, run.population(1, number)).named()
    if group is None and len(run.groups) > 1:
        other = method.init_server(task, run.population(1, len(run.groups) - 1)).named()
        if any(not torch.equal(tensor, other[name]) for name, tensor in after.items()):
            raise ConfigError(
                f"{label} tells clients apart by group; say which group the newcomer is in: {', '.join(run.groups)}"
            )
    server = run.server(label, method, task)
    return server.like({name: _grown(name, old, before[name], after[name]) for name, old in server.named().items()})


def _grown(name: str, tensor: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """`tensor`, longer by one along every axis along which `after` is longer than `before`: the axes of clients."""
    grows = [new - old for new, old in zip(after.shape, before.shape, strict=True)]
    if not set(grows) <= {0, 1}:
        raise ConfigError(
            f"the method's {name} does not have one row per client, so a newcomer cannot be added; adopt from another "
            "method"
        )
    for axis in [axis for axis, more in enumerate(grows) if more]:
        row = after.narrow(axis, after.shape[axis] - 1, 1)
        for other in range(tensor.dim()):
            if other != axis:
                row = row.narrow(other, 0, tensor.shape[other])
        tensor = torch.cat([tensor, row.to(tensor)], axis)
    return tensor


def _trained(
    method: AnyAlgorithm, task: Task, server: Tree, run: EndedRun, newcomer: Federation, rounds: int
) -> Tensor:
    """The newcomer's model [1, P] after some rounds with a server that stays as it is."""
    down = _download(method, task, server, run)
    client, moments = method.init_client(task, _cohort(run, newcomer, 0)), Moments()
    for number in range(1, rounds + 1):
        memory = LoopMemory(1, moments) if method.training.optimizer_state == "kept" else None
        client, _ = method.client_update(task, client, down, with_memory(_cohort(run, newcomer, number), memory))
        moments = moments if memory is None else memory.moments
    theta = next(iter(deployed_models(method, task, client, down, _cohort(run, newcomer, rounds)).values()))
    if not bool(torch.isfinite(theta).all()):
        raise DataError("the newcomer's training diverged to NaN or infinity; check the scale of its features")
    return theta


def _download(method: AnyAlgorithm, task: Task, server: Tree, run: EndedRun) -> Tree:
    """The message that the newcomer gets when everybody takes part."""
    info = RoundInfo(run.config.rounds + 1, run.population(1), task.trainable)
    planned, _ = method.plan(server, _everyone(run), info)
    down: Tree = method.download(planned, _everyone(run)[-1:])
    return down


def _everyone(run: EndedRun) -> Tensor:
    """Ids of the run's clients, and the newcomer's."""
    return torch.arange(run.num_clients + 1)


def _cohort(run: EndedRun, newcomer: Federation, round: int) -> Cohort:
    """The newcomer under its number among the run's clients, which is one above theirs."""
    data = newcomer.cohort(torch.tensor([0]), run.seed, round)
    ids = _everyone(run)[-1:]
    train, val, test = (replace(part, ids=ids) for part in (data.train, data.val, data.test))
    return Cohort(ids, train, val, test, run.seed, round)


def _check_fits(run: EndedRun, newcomer: Federation) -> None:
    if len(newcomer) != 1:
        raise ConfigError(f"one client joins at a time; got a federation of {len(newcomer)}")
    problem, own = run.description.problem, newcomer.problem
    other_inputs = newcomer.features.packing != run.inputs.packing
    if other_inputs or newcomer.features.shape != run.shape or own.num_classes != problem.num_classes:
        raise ConfigError(
            f"the models of {run.name} take examples of {run.inputs.shape_in_words} for {problem.in_words()}; "
            f"the newcomer has {newcomer.features.shape_in_words} for {own.in_words()}"
        )


def _weighted(run: EndedRun, newcomer: Federation) -> Federation:
    """Classes count for the newcomer as they do for the run's clients."""
    rule = run.config.class_weights
    if rule == example_weights.NONE:
        return newcomer
    values = run.description.description.get("class_weight_values")
    if values is None:
        return newcomer.with_class_weights(rule)
    return replace(newcomer, class_weights=torch.tensor([values], dtype=torch.float32))


def _place(method: AnyAlgorithm, server: Tree) -> str:
    models = method.server_models(server)
    return "" if models is None or models.assignment is None else f"server model {int(models.assignment[-1])}"
