"""The part of a module below everything that is trained, computed once per example.

A module whose first stages are frozen gives the same activations for an example in every step of every client. They
are computed once and take the place of the examples, and a task trains what lies above:

    prefix = frozen_prefix(task, example)                    None if there is none, or if it would not be exact
    activations = prefix.activations(features)               of all examples of a data set
    above = prefix.upper_task()                              rows, starts and exported models are those of `task`

It is exact only where the prefix is a function of the example alone: no dropout, no running statistics that move, the
same in training and in evaluation; and where training changes no examples (augmentation).

The stages of a module are the children of an nn.Sequential, or its attribute `stages`: modules whose composition is the
forward pass. Any other module can be cut before its last linear layer, where that is all that trains.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MethodType

import numpy as np
import torch
from torch import Tensor, nn

from kinfed.data import Features
from kinfed.engine.rows.keyed_random import KeyedDraws
from kinfed.engine.rows.model_calls import call_plainly
from kinfed.engine.rows.model_trial import failures_as_model_errors
from kinfed.engine.task_factory import ModuleTask, upper_task
from kinfed.errors import ModelError

MEMORY_BYTES = 1 << 30  # activations of a data set that take more live in a file
EXAMPLES_AT_ONCE = 128


@dataclass(frozen=True)
class AfterStages:
    """A cut after the first `count` stages."""

    count: int

    def lower(self, module: nn.Module, x: Tensor) -> Tensor:
        """The activations [B, ...] of examples x."""
        return _chained(stages_of(module)[: self.count], x)

    def upper_layers(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose composition makes the output of activations."""
        return stages_of(module)[self.count :]


@dataclass(frozen=True)
class BeforeHead:
    """A cut before the linear layer of this name, with which the forward pass ends."""

    head: str

    def lower(self, module: nn.Module, x: Tensor) -> Tensor:
        inputs: list[Tensor] = []
        hook = module.get_submodule(self.head).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            module(x)
        finally:
            hook.remove()
        if len(inputs) != 1:
            raise ModelError(f"layer {self.head} should be called once; it was called {len(inputs)} times")
        return inputs[0]

    def upper_layers(self, module: nn.Module) -> list[nn.Module]:
        return [module.get_submodule(self.head)]


@dataclass(frozen=True)
class FrozenPrefix:
    task: ModuleTask  # of the whole module
    cut: AfterStages | BeforeHead

    @torch.no_grad()
    def activations(self, features: Features, folder: Path | None = None) -> Features:
        """The activations of all examples, as features of their own. Above MEMORY_BYTES they live in a file in `folder`
        (the system's folder for temporary files, if none is given), which vanishes with the last use of it."""
        module = self.task.layout.working_copy(self.task.module).eval()
        examples, raw = features.on(self.task.device), torch.empty(0)
        for index in torch.split(torch.arange(len(features)), EXAMPLES_AT_ONCE):
            h = self.cut.lower(module, examples.gather(index)).cpu()
            if not raw.numel():
                raw = _memory((len(features), *h.shape[1:]), folder)
            raw[index[0] : index[-1] + 1] = h
        return Features(raw, device=features.device)

    def upper_task(self, activations: Features, *, backend: str = "auto", batch: int | None = None) -> ModuleTask:
        """The task of what lies above, on `activations` in the place of examples, `batch` of them in a step."""
        layers, example = self.cut.upper_layers(self.task.module), activations.raw[:2]
        return upper_task(self.task, self._above, layers, backend=backend, example=example, batch=batch)

    def _upper(self, module: nn.Module, h: Tensor) -> Tensor:
        """The output for activations h."""
        return _chained(self.cut.upper_layers(module), h)

    def _above(self, module: nn.Module) -> nn.Module:
        """`module`, with a forward pass that begins at the activations."""
        call_plainly(module)
        module.forward = MethodType(self._upper, module)  # of this one module
        return module

    def is_exact(self, example: Tensor) -> bool:
        """Whether the prefix gives the same in training and evaluation, without draws, and with the rest the output."""
        module = self.task.layout.working_copy(self.task.module)
        activations = []
        try:
            with failures_as_model_errors(module, example), torch.no_grad():
                for training in (True, False):
                    self.task.layout.set_mode(module, training=training)
                    with KeyedDraws(None):
                        activations.append(self.cut.lower(module, example))
                outputs = [module(example), self._upper(module, activations[1])]
        except ModelError:  # what is called `stages` may be something else, and not take examples
            return False
        same = all(torch.equal(*pair) for pair in (activations, outputs))
        return same and activations[0].dtype == torch.float32 and len(activations[0]) == len(example)


def frozen_prefix(task: ModuleTask, example: Tensor) -> FrozenPrefix | None:
    """The largest part of the task's module that can be computed once per example; tried on a batch [B, ...]."""
    prefixes = [FrozenPrefix(task, cut) for cut in _cut_points(task)]
    return next((prefix for prefix in prefixes if prefix.is_exact(example.to(task.device))), None)


def _cut_points(task: ModuleTask) -> Iterator[AfterStages | BeforeHead]:
    """Places where the module may be cut, the best first."""
    module = task.module
    in_row = {slot.name for slot in task.slots}
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    stages, count, constants = stages_of(module), 0, 0
    for stage in stages[:-1]:
        state = [names[id(tensor)] for tensor in (*stage.parameters(), *stage.buffers())]
        if any(name in in_row for name in state):
            break
        count, constants = count + 1, constants + len(state)
    if constants:
        yield AfterStages(count)
    trained = {slot.layer for slot in task.slots}
    head = trained.pop() if len(trained) == 1 else ""
    if head and type(module) is not nn.Sequential and isinstance(module.get_submodule(head), nn.Linear):
        yield BeforeHead(head)


def stages_of(module: nn.Module) -> list[nn.Module]:
    """Modules whose composition is the forward pass of `module`; [] if none are declared."""
    if type(module) is nn.Sequential and not module._forward_hooks and not module._forward_pre_hooks:
        return list(module)
    stages = getattr(module, "stages", None)
    is_list = isinstance(stages, list | tuple | nn.ModuleList) and all(isinstance(s, nn.Module) for s in stages)
    return list(stages) if is_list and stages is not None else []


def _chained(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _memory(shape: tuple[int, ...], folder: Path | None) -> Tensor:
    """float32 of this shape, in memory or, where it is large, in a file without a name."""
    if 4 * prod(shape) <= MEMORY_BYTES:
        return torch.empty(shape)
    with tempfile.TemporaryFile(dir=folder) as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))
