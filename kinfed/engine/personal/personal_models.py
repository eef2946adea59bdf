"""What the row of a personal model is: a plain model, a mixture of several, or a model with an extension.

Rows tell by themselves. Whoever scores, saves, exports or fine-tunes personal models asks here for the task or module
that belongs to them, and needs no case of its own for any of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from kinfed.data import LocalTraining
from kinfed.engine.personal.extended import ExtendedModule, ExtendedTask, Extension
from kinfed.engine.personal.feature_gate import FeatureGate
from kinfed.engine.personal.feature_valve import FeatureValve
from kinfed.engine.personal.mixture import MixtureModule, MixtureTask, num_components
from kinfed.engine.personal.neighbours import Neighbours
from kinfed.engine.task_factory import ModuleTask, Task
from kinfed.errors import ModelError

# By mark. The method of a plugin adds its own, in the process that reads its models as well.
EXTENSIONS: dict[int, Extension] = {one.mark: one for one in (FeatureGate(), FeatureValve(), Neighbours())}


def extension_of(row: Tensor) -> Extension | None:
    """The extension of a row [width] that is wider than a model; None for a mixture."""
    mark = float(row[-1])
    if not mark < 0:
        return None
    try:
        return EXTENSIONS[int(mark)]
    except KeyError:
        known = ", ".join(map(str, EXTENSIONS))
        raise ModelError(f"a row ends in the mark {mark:g} of an extension; those known here are {known}") from None


def task_for(task: Task, theta: Tensor) -> Task:
    """The task that rows [n, width] belong to."""
    width, P = theta.shape[-1], task.num_params
    if width == P:
        return task
    extension = extension_of(theta[0]) if len(theta) else None
    if extension is not None:
        return ExtendedTask(task, extension, width - P - 1)
    return MixtureTask(task, num_components(width, P))


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
        extension = extension_of(tensors["extra"])
        if extension is not None:
            return ExtendedModule(make(), tensors["extra"], extension)
    return make()


def named_parameters(row: Tensor, num_params: int, plain: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state dict of a row of a personal model, where `plain` names the parameters of a row [P] of a plain one."""
    if len(row) == num_params:
        return plain(row)
    if extension_of(row) is not None:
        model = {f"model.{name}": tensor for name, tensor in plain(row[:num_params]).items()}
        return model | {"extra": row[num_params:].clone()}
    components = num_components(len(row), num_params)
    out = {"pi": row[components * num_params :].clone()}
    for k in range(components):
        one = plain(row[k * num_params : (k + 1) * num_params])
        out |= {f"components.{k}.{name}": tensor for name, tensor in one.items()}
    return out
