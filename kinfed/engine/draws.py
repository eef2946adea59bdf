"""Random operations inside models (dropout, noise layers, sampled attention): drawn from counter-based keys.

Every draw of a training forward is a function of (seed, stream of batches, round, client, step, number of the draw),
so it does not depend on threads, chunks, pools or resumed runs, and two methods that train on the same batch draw the
same. Two passes over one batch draw the same, too: a finite difference of gradients compares like with like.

`nn.Dropout` layers of working copies ask for their draws themselves, at no cost. All other operations that draw are
caught where torch dispatches them, also inside LSTM and attention.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed.core import rng
from kinfed.data.batches import Batch
from kinfed.errors import ModelError


class Draws:
    """The draws of one working copy, which one thread uses at a time."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._step: tuple[Batch, int] | None = None
        self._key: int | None = None  # of the step, once it was drawn from
        self._count = 0

    def begin(self, batch: Batch, row: int) -> None:
        """The draws that follow are those of a training step on this row of the batch."""
        self._step, self._key, self._count = (batch, row), None, 0

    def next(self) -> torch.Generator:
        """A generator at the start of the next draw."""
        if self._key is None:
            self._key = self._key_of_step()
        self._generator.manual_seed(rng.fold_number(self._key, self._count))
        self._count += 1
        return self._generator

    def _key_of_step(self) -> int:
        if self._step is None:
            raise RuntimeError("a model draws outside of a training step")
        batch, row = self._step
        return rng.fold_number(_purpose(batch.seed, batch.stream), batch.round, int(batch.ids[row]), batch.step)


@lru_cache(maxsize=64)
def _purpose(seed: int, stream: str) -> int:
    return int(rng.root(seed, f"draws-{stream}"))


def prepare_dropout(module: nn.Module, draws: Draws) -> None:
    """Let the `nn.Dropout` layers of a working copy draw from `draws`: the same as `nn.functional.dropout` does."""

    def forward(layer: nn.Dropout, x: Tensor) -> Tensor:
        if not layer.training or layer.p == 0:
            return x
        if layer.p == 1:
            return x * 0.0
        mask = torch.empty_like(x).bernoulli_(1 - layer.p, generator=draws.next()).div_(1 - layer.p)
        return x.mul_(mask) if layer.inplace else x * mask

    for layer in module.modules():
        if type(layer) is nn.Dropout:
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # of this one copy


def drops(module: nn.Module) -> bool:
    """Whether a layer of torch in it drops values at random in training."""
    return any(_dropout_rate(layer) > 0 for layer in module.modules())


def _dropout_rate(layer: nn.Module) -> float:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else 0.0


class KeyedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types here
    """Inside, operations of this thread that would draw from torch's global generator draw from `draws`.

    Where that is not possible, or where `draws` is None, they are an error. Operations are judged one by one instead
    of by the generator's state before and after: other threads may draw from it meanwhile."""

    def __init__(self, draws: Draws | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self.operations: set[str] = set()  # names of those that drew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _may_draw(func) or not _draws_globally(func, args, kwargs):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if self._draws is None:
            raise ModelError(
                f"the model draws random numbers by torch.{name} where none may be drawn: on the way back (by "
                "torch.utils.checkpoint?), where they cannot be repeated; leave that out"
            )
        keyed = _overload_with_generator(func)
        if keyed is None:
            raise ModelError(
                f"the model draws random numbers by torch.{name}, which takes no generator, so runs would not repeat "
                "or resume; draw with torch.bernoulli, torch.rand or torch.randn instead"
            )
        self.operations.add(name)
        return keyed(*args, **{**kwargs, "generator": self._draws.next()})


@cache  # every operation of a forward pass is asked, and torch makes a new list of tags each time
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _draws_globally(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw does: one with a generator of its own, with no chance to drop anything, or
    not in training, leaves the global one alone."""
    values = {argument.name: argument.default_value for argument in func._schema.arguments}
    values |= dict(zip(values, args, strict=False)) | kwargs
    if values.get("generator") is not None or values.get("training") is False:
        return False
    return values.get("dropout_p") != 0


def _overload_with_generator(func: Any) -> Any:
    """The operation itself, or its overload with the same other arguments that takes a generator; None without one."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func.overloadpacket
    for overload in map(packet.__getattr__, packet.overloads()):
        if sorted(argument.name for argument in overload._schema.arguments) == sorted([*names, "generator"]):
            return overload
    return None
