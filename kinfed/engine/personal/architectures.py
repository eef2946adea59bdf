"""Models of several architectures in one federation: every client has one of them, chosen by its group.

    rows in training    [n, P_g] of the clients of one architecture g, by its own task; methods see nothing else
    rows side by side   [n, max P_g + 1]: the numbers of a client's model, zeros, and the number g of its architecture

Rows side by side are for evaluations, files and curves, where models of all clients lie together. They are not trained.
The first architecture is that of the server, where a method's server has a model (`Task.server_task`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.feature_loss import FeatureLoss
from kinfed.engine.contract.task import Task
from kinfed.engine.rows.module_task import ModuleTask
from kinfed.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from kinfed.data import Federation, Problem


class Architectures(Task):
    """The tasks of several architectures by name, and the task of their rows side by side."""

    backend = "several architectures"

    def __init__(self, tasks: Mapping[str, ModuleTask]) -> None:
        if not tasks:
            raise ModelError("name at least one architecture")
        first = next(iter(tasks.values()))
        self.names = tuple(tasks)
        self.tasks = tuple(copy.copy(task) for task in tasks.values())
        for task in self.tasks[1:]:
            task.of_server = self.tasks[0]
        self.device, self.objective, self.classifies = first.device, first.objective, first.classifies
        self.problem, self.metric = first.problem, first.metric
        self.num_params = max(task.num_params for task in self.tasks) + 1
        self.slots = (ParameterSlot("model", (self.num_params,), 0, self.num_params),)

    @property
    def server_task(self) -> ModuleTask:
        return self.tasks[0]

    def of_problem(self, problem: Problem) -> Architectures:
        """The same architectures, scored by the metrics of a problem."""
        same = Architectures(dict(zip(self.names, self.tasks, strict=True)))
        for task in (same, *same.tasks):
            task.problem = problem
        return same

    def of_clients(self, groups: Tensor | None, group_names: Sequence[str] | None, count: int) -> Tensor:
        """[K] the number of every client's architecture: that of its group's name, or where clients have no groups the
        architectures in turn."""
        if groups is None:
            return torch.arange(count) % len(self.tasks)
        labels = group_names or [str(number) for number in range(int(groups.max()) + 1)]
        if lacking := [label for label in labels if label not in self.names]:
            raise ConfigError(
                f"models names the architecture of every group of clients; the groups are {', '.join(labels)}, and "
                f"models names {', '.join(self.names)}: add {lacking[0]}, or give other groups (--group-column, "
                "Federation.with_groups)"
            )
        number = torch.tensor([self.names.index(label) for label in labels])
        return number[groups]

    def of_federation(self, data: Federation) -> Tensor:
        """[K] the number of every client's architecture."""
        return self.of_clients(data.groups, data.group_names, data.num_clients)

    def side_by_side(self, number: int, rows: Tensor) -> Tensor:
        """[n, max P_g + 1] of models [n, P_g] of one architecture."""
        if rows.shape[1] != self.tasks[number].num_params:
            raise ModelError(
                f"models of several architectures are plain rows; those of {self.names[number]} have "
                f"{self.tasks[number].num_params} numbers, and these {rows.shape[1]}"
            )
        wide = rows.new_zeros(len(rows), self.num_params)
        wide[:, : rows.shape[1]] = rows
        wide[:, -1] = number
        return wide

    def name_of(self, row: Tensor) -> str:
        """The name of the architecture that a row side by side is of."""
        return self.names[self.tasks.index(self.own_task(row)[0])]

    def own_task(self, row: Tensor) -> tuple[ModuleTask, Tensor]:
        """The task of one row side by side, and its model [P_g]."""
        number = int(row[-1])
        if not 0 <= number < len(self.tasks) or number != float(row[-1]):
            raise ModelError(f"a row ends in the number of its architecture, 0 to {len(self.tasks) - 1}; got {row[-1]}")
        task = self.tasks[number]
        return task, row[: task.num_params]

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        parts: list[Tensor | None] = [None] * len(theta)
        for number, task in enumerate(self.tasks):
            rows = (theta[:, -1] == number).nonzero().squeeze(1)
            if len(rows):
                outputs = task.logits(theta[rows, : task.num_params], x[rows])
                for row, output in zip(rows.tolist(), outputs, strict=True):
                    parts[row] = output
        return torch.stack([part for part in parts if part is not None])

    def module_of(self, row: Tensor) -> nn.Module:
        """A ready module with the parameters of one row."""
        task, own = self.own_task(row)
        return task.module_of(own)

    def init(self, seed: int, number: int = 0) -> Tensor:
        """[max P_g + 1] the start of the server's architecture."""
        return self.side_by_side(0, self.tasks[0].init(seed, number)[None])[0]

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> NoReturn:
        raise ModelError("models of several architectures are trained by the task of each, not side by side")

    def constants_digest(self) -> str:
        """A digest of all that is in no row, of all architectures; "" if nothing is."""
        return "".join(task.constants_digest() for task in self.tasks)
