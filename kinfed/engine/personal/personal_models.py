"""Types of personal models: a plain model, a mixture of several, or a model with an extension.

The type says which task and module belong to rows and how the numbers of a row are called. Rows travel and are stored
without it: it is read from the width and the mark of a row, and from the names of a file's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor, nn

from kinfed.core import registry_of
from kinfed.data import LocalTraining
from kinfed.engine.personal.extended import ExtendedModule, ExtendedTask, Extension
from kinfed.engine.personal.mixture import MixtureModule, MixtureTask, num_components
from kinfed.engine.task_factory import ModuleTask, Task
from kinfed.errors import ModelError

_Names: TypeAlias = Callable[[Tensor], dict[str, Tensor]]  # of the parameters of a plain model's row


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


def _form(row: Tensor, num_params: int) -> Extension | int | None:
    """The extension of a row [width], or the number of components of a mixture; None of a plain model, which has
    `num_params` numbers."""
    return None if len(row) == num_params else _extension_of(row) or num_components(len(row), num_params)


def task_for(task: Task, theta: Tensor) -> Task:
    """The task that rows [n, width] belong to."""
    P, width = task.num_params, theta.shape[-1]
    if width == P:
        return task
    form = _form(theta[0], P) if len(theta) else num_components(width, P)
    if isinstance(form, int):
        return MixtureTask(task, form)
    assert form is not None  # a row of another width
    return ExtendedTask(task, form, width - P - 1)


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
    form = _form(row, num_params)
    if form is None:
        return plain(row)
    if isinstance(form, int):
        models, pi = row[:-form].chunk(form), row[-form:]
        parts = {f"components.{k}.{name}": t for k, model in enumerate(models) for name, t in plain(model).items()}
        return {"pi": pi.clone()} | parts
    model = {f"model.{name}": tensor for name, tensor in plain(row[:num_params]).items()}
    return model | {"extra": row[num_params:].clone()}
