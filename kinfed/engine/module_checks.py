"""What a torch module is made of: whether it can train in a federation, and whether it is a plain chain of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed.errors import ModelError


def check_module(module: nn.Module) -> None:
    """Refuse modules whose training cannot be right in a federation, with the replacement."""
    for name, child in module.named_modules():
        # Without running statistics an InstanceNorm treats every example by itself, which is fine.
        instance = isinstance(child, nn.modules.instancenorm._InstanceNorm)
        if isinstance(child, nn.modules.batchnorm._NormBase) and (child.track_running_stats or not instance):
            raise ModelError(
                f"layer {name!r} is {type(child).__name__}: its running statistics mix clients' data outside the "
                "messages and fail on a batch of one; replace it by nn.GroupNorm"
            )
        if _dropout_rate(child) > 0:
            raise ModelError(
                f"layer {name!r} is {type(child).__name__} with dropout: it draws from torch's global generator, so "
                "runs would not repeat or resume; remove it or set p=0, and use weight_decay instead"
            )
    parameters = list(module.named_parameters())
    if not parameters:
        raise ModelError("the model has no parameters to train")
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} belongs to a lazy layer without a size yet; give its size when building"
            )
        if not parameter.requires_grad:
            raise ModelError(f"parameter {name!r} is frozen (requires_grad=False); register it as a buffer instead")
        if parameter.dtype != torch.float32:
            raise ModelError(f"parameter {name!r} is {parameter.dtype}; kinfed trains float32 models")


def _dropout_rate(layer: nn.Module) -> float:
    """The chance with which a layer of torch drops values in training."""
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else 0.0


class NoGlobalDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types here
    """Inside, an operation of this thread that draws from torch's global generator is an error.

    Operations are judged one by one instead of by the generator's state before and after: other threads may draw
    from it meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise ModelError(
                "the model draws from torch's global generator when it runs (dropout?), so runs would not repeat "
                "or resume; remove that, and use weight_decay instead"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw does: one with a generator of its own, with no chance to drop anything, or
    not in training, leaves the global one alone."""
    values = {argument.name: argument.default_value for argument in func._schema.arguments}
    values |= dict(zip(values, args, strict=False)) | kwargs
    if values.get("generator") is not None or values.get("training") is False:
        return False
    return values.get("dropout_p") != 0


def owns_its_parameters(module: nn.Module, chain: list[nn.Module]) -> bool:
    """Whether the module's parameters are those of the chain's layers, each once and in order: no tied weights,
    no reparametrized layer."""
    expected: list[Tensor] = []
    for layer in chain:
        if isinstance(layer, nn.LSTM):
            expected += [p for weights in layer.all_weights for p in weights]
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            expected += [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    parameters = list(module.parameters())
    return len(parameters) == len(expected) and all(a is b for a, b in zip(parameters, expected, strict=True))


def chain_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module] | None:
    """The layers of nested nn.Sequential in order, or None where one is of no such kind.

    Exact types only: a subclass may compute something else, and so may a hook."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Sequential:
        chain: list[nn.Module] = []
        for child in module:
            inner = chain_of(child, kinds)
            if inner is None:
                return None
            chain += inner
        return chain
    return [module] if type(module) in kinds else None
