"""Types of personal models: a plain model, a mixture of several, or a model with an extension.

A type says which task and module belong to its rows and how the numbers of a row are called. Rows travel and are stored
without it: `type_of_rows` and `module_from` read it again, from the width and the mark of a row and from the names of a
file's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from kinfed.core import registry_of
from kinfed.data import LocalTraining
from kinfed.engine.personal.extended import ExtendedModule, ExtendedTask, Extension
from kinfed.engine.personal.mixture import MixtureModule, MixtureTask, num_components
from kinfed.engine.task_factory import ModuleTask, Task
from kinfed.errors import ModelError

_Names: TypeAlias = Callable[[Tensor], dict[str, Tensor]]  # of the parameters of a plain model's row


@dataclass(frozen=True)
class Plain:
    """One model: rows [n, P]."""

    def task(self, task: Task) -> Task:
        return task

    def named(self, row: Tensor, plain: _Names) -> dict[str, Tensor]:
        return plain(row)


@dataclass(frozen=True)
class Mixture:
    """Several models and their weights: rows [n, K (P + 1)]."""

    components: int

    def task(self, task: Task) -> MixtureTask:
        return MixtureTask(task, self.components)

    def named(self, row: Tensor, plain: _Names) -> dict[str, Tensor]:
        models, pi = row[: -self.components].chunk(self.components), row[-self.components :]
        parts = {f"components.{k}.{name}": t for k, model in enumerate(models) for name, t in plain(model).items()}
        return {"pi": pi.clone()} | parts


@dataclass(frozen=True)
class Extended:
    """A model, `width` further numbers that work at its features, and the mark of their kind: rows [n, P + E + 1]."""

    extension: Extension
    width: int

    def task(self, task: Task) -> ExtendedTask:
        return ExtendedTask(task, self.extension, self.width)

    def named(self, row: Tensor, plain: _Names) -> dict[str, Tensor]:
        P = len(row) - self.width - 1
        return {f"model.{name}": tensor for name, tensor in plain(row[:P]).items()} | {"extra": row[P:].clone()}


PersonalModel: TypeAlias = Plain | Mixture | Extended


def type_of_rows(theta: Tensor, num_params: int) -> PersonalModel:
    """The type of rows [n, width], where plain models have `num_params` numbers."""
    width = theta.shape[-1]
    if width == num_params:
        return Plain()
    extension = _extension_of(theta[0]) if len(theta) else None
    if extension is not None:
        return Extended(extension, width - num_params - 1)
    return Mixture(num_components(width, num_params))


def _extension_of(row: Tensor) -> Extension | None:
    """The extension whose mark ends a row; None where there is no mark."""
    mark = float(row[-1])
    if not mark < 0:
        return None
    extensions: dict[str, type[Extension]] = {name: entry.target for name, entry in registry_of("extension").items()}
    for extension in extensions.values():
        if extension.mark == mark:
            return extension()
    raise ModelError(
        f"a row ends in the mark {mark:g} of an extension; those known here are {', '.join(extensions)}: load the "
        "plugin that registers it"
    )


def task_for(task: Task, theta: Tensor) -> Task:
    """The task that rows [n, width] belong to."""
    return type_of_rows(theta, task.num_params).task(task)


def module_for(task: ModuleTask, row: Tensor) -> nn.Module:
    """A ready module for one row."""
    own = task_for(task, row[None])
    assert isinstance(own, ModuleTask | MixtureTask | ExtendedTask)  # what task_for gives for the task of a module
    return own.module_of(row)


def trained_columns(task: Task, training: LocalTraining) -> Tensor | None:
    """bool [width]: the columns that fine-tuning confines itself to; None where it may move all."""
    return task.mask(training) if isinstance(task, MixtureTask | ExtendedTask) else None


def module_from(make: Callable[[], nn.Module], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module for the state dict of a personal model; `make` builds a plain one."""
    components = len({name.split(".")[1] for name in tensors if name.startswith("components.")})
    if components:
        return MixtureModule([make() for _ in range(components)], tensors["pi"])
    if "extra" in tensors and all(name == "extra" or name.startswith("model.") for name in tensors):
        extension = _extension_of(tensors["extra"])
        if extension is not None:
            return ExtendedModule(make(), tensors["extra"], extension)
    return make()


def named_parameters(row: Tensor, num_params: int, plain: _Names) -> dict[str, Tensor]:
    """The state dict of a row of a personal model, where `plain` names the parameters of a row [P] of a plain one."""
    return type_of_rows(row[None], num_params).named(row, plain)
