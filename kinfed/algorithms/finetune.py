"""Fine-tuning: any method, plus k local steps before a model is used.

    θ_m ← the method's personal model, after k SGD steps on the client's training data

An option of every method: `finetune = 5` (or --set ditto.finetune=5). Training is untouched: the steps are taken on a
copy whenever a personal model is asked for, on batches of their own ("finetune" stream) of the round just completed,
and nothing extra is sent. The method's own model, without the steps, is reported beside it as "without_finetuning".
k = 0 is the method itself.

Where the method's model is a mixture (FedEM), the steps follow the gradient of the mixture's loss and leave its
proportions as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kinfed.algorithms.base import Algorithm
from kinfed.data.federation import Cohort
from kinfed.engine.mixture import MixtureTask, task_for
from kinfed.engine.sgd import sgd
from kinfed.engine.task import Task
from kinfed.errors import ConfigError

Method = Algorithm[Any, Any, Any, Any]


@dataclass(frozen=True)
class Finetuned(Method):
    """Stands before a method among the bases of a class, which `finetuned` makes."""

    finetune: int = 0
    """k: local steps on the personal model before it is used; 0 is the method itself."""
    finetune_lr: float | None = None
    """Learning rate of those steps; the local one where none is given."""

    def __post_init__(self) -> None:
        check: Callable[[], None] | None = getattr(super(), "__post_init__", None)
        if check is not None:
            check()
        if self.finetune < 0:
            raise ConfigError(f"finetune is a number of steps, 0 or more; got {self.finetune}")
        if self.finetune_lr is not None and not 0 < self.finetune_lr < float("inf"):
            raise ConfigError(f"finetune_lr must be positive; got {self.finetune_lr}")
        if self.finetune_lr is not None and not self.finetune:
            raise ConfigError("finetune_lr is the rate of fine-tuning steps, of which there are none; set finetune too")

    def personalize(self, task: Task, client: Any, down: Any, data: Cohort) -> Tensor:
        theta = super().personalize(task, client, down, data)
        if not self.finetune:
            return theta
        model = task_for(task, theta)
        training = self.training.with_steps(self.finetune)
        if self.finetune_lr is not None:
            training = replace(training, lr=self.finetune_lr, lr_decay=1.0, lr_floor=0.0)
        mask = model.mask(training) if isinstance(model, MixtureTask) else None
        return sgd(model, theta, data.train.batches(training, stream="finetune"), mask=mask)

    def alternatives(self, task: Task, client: Any, down: Any, data: Cohort) -> dict[str, Tensor]:
        others = super().alternatives(task, client, down, data)
        if not self.finetune:
            return others
        return others | {"without_finetuning": super().personalize(task, client, down, data)}

    def personal_gradients(self, count: Tensor) -> dict[int, Tensor]:
        own = super().personal_gradients(count)
        return own | {1: own.get(1, torch.zeros_like(count)) + self.finetune} if self.finetune else own

    def __reduce__(self) -> tuple[Any, ...]:
        """Classes made at run time have no name to be found by; the method that they are made from has."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuilt, (type(self).__mro__[2], values)


_made: dict[type[Method], type[Method]] = {}


def finetuned(method: type[Method]) -> type[Method]:
    """The method with the options of `Finetuned`; in everything else the method itself."""
    if method not in _made:  # one class per method, so that equal settings are equal objects
        told = {"__module__": method.__module__, "__doc__": method.__doc__}
        _made[method] = dataclass(frozen=True)(type(method.__name__, (Finetuned, method), told))
    return _made[method]


def _rebuilt(method: type[Method], values: dict[str, Any]) -> Method:
    return finetuned(method)(**values)
