"""Shape of a method's updates before any client has sent one, and whether they change the server's models."""

from dataclasses import replace

import torch

from kinfed.algorithms.base import AnyAlgorithm, AveragingAlgorithm, RoundInfo
from kinfed.algorithms.common.averaging import mean_from_row
from kinfed.core import Tree
from kinfed.data import Cohort, Federation, Population
from kinfed.engine import Task


def sample_update(
    algorithm: AnyAlgorithm, task: Task, server: Tree, cohort: Cohort, population: Population | None = None
) -> Tree:
    """The update [1, ...] of a cohort of one client in a first round: which fields an update has depends on the
    method's options, and their shapes on the model. The round is planned for all clients of a `population`."""
    if population is not None:
        info = RoundInfo(1, population, task.trainable)
        server, _ = algorithm.plan(server, torch.arange(population.num_clients), info)
    start = algorithm.init_client(task, cohort)
    update: Tree = algorithm.client_update(task, start, algorithm.download(server, cohort.ids), cohort)[1]
    return update


def update_template(algorithm: AnyAlgorithm, task: Task, data: Federation, server: Tree) -> Tree:
    """An update [1, ...] of zeros with the fields, shapes and types of the method's: from one local step of one client
    of which nothing else is used."""
    brief = replace(algorithm, training=algorithm.training.with_steps(1))
    cohort = data.cohort(data.train.count.argmax()[None], 0, 1)
    return sample_update(brief, task, server, cohort).map(torch.zeros_like)


def averaged_changes(
    algorithm: AnyAlgorithm, task: Task, data: Federation, population: Population
) -> tuple[tuple[str, ...], str]:
    """The averaged fields of the method's updates, where these are changes of what the server sends: an update of zeros
    leaves that as it is, and the same update twice moves it twice. Otherwise none, and the reason, to follow the
    method's name."""
    if algorithm.single_updates or not isinstance(algorithm, AveragingAlgorithm):
        return (), algorithm.single_updates
    if not algorithm.fields:
        return (), ""
    ids, info = torch.tensor([0]), RoundInfo(1, population, task.trainable, task)
    start = algorithm.init_server(task, population)
    template = update_template(algorithm, task, data, start)

    def after(server: Tree, value: float) -> Tree:
        width = sum(getattr(template, name).numel() for name in algorithm.fields)
        mean = mean_from_row(template, algorithm.fields, torch.full((width,), value))
        moved: Tree = algorithm.step(server, mean, info)
        return moved

    def same(one: Tree, other: Tree) -> bool:
        sent = [algorithm.download(server, ids).named() for server in (one, other)]
        return all(torch.equal(tensor, sent[1][name]) for name, tensor in sent[0].items())

    once = after(start, 1e-3)
    if same(after(start, 0.0), start) and not same(after(once, 1e-3), once):
        return algorithm.fields, ""
    return (), "averages models or predictions, not changes of a model"
