"""Checks of torch modules: whether one can train in a federation, and whether it is a plain chain of layers."""

import torch
from torch import Tensor, nn

from kinfed.errors import ModelError


def check_module(module: nn.Module) -> None:
    """Refuse modules whose training cannot be right in a federation, with the replacement."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule) or hasattr(child, "_orig_mod"):  # the latter by torch.compile
            what = f"layer {name!r}" if name else "the model"
            raise ModelError(
                f"{what} is compiled (torch.compile, torch.jit), and its parameters cannot be exchanged for those of "
                "clients; hand over the module as it was before"
            )
        if isinstance(child, nn.modules.batchnorm._NormBase):
            _check_norm(name, child)
        _check_attributes(name, child, {id(parameter) for parameter in module.parameters()})
    parameters = list(module.named_parameters())
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} belongs to a lazy layer without a size yet; give its size when building"
            )
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not trained:
        frozen = " (all are frozen: requires_grad=False)" if parameters else ""
        raise ModelError(f"the model has no parameters to train{frozen}")
    for name, parameter in trained:
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}; kinfed trains float32 parameters: convert it with "
                ".float(), or freeze it (requires_grad=False), which allows any type"
            )


def check_values(module: nn.Module) -> None:
    """Refuse a module that is an outline only."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ModelError(
                f'parameter {name!r} is on the device meta, without values; build the model without device="meta"'
            )


def _check_norm(name: str, layer: nn.modules.batchnorm._NormBase) -> None:
    kind = type(layer).__name__
    if isinstance(layer, nn.SyncBatchNorm):
        raise ModelError(
            f"layer {name!r} is {kind}: it normalizes over processes, where kinfed trains a client in one; use "
            "nn.BatchNorm2d"
        )
    # Without running statistics an InstanceNorm treats every example by itself, which is fine.
    if not layer.track_running_stats and not isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        raise ModelError(
            f"layer {name!r} is {kind} without running statistics: a prediction would depend on the other examples "
            "of its batch; set track_running_stats=True or use nn.GroupNorm"
        )
    if layer.track_running_stats and layer.momentum is None:
        raise ModelError(
            f"layer {name!r} is {kind} with momentum=None, an average over all batches ever seen, which loses its "
            "meaning when models are averaged; give it a momentum such as 0.1"
        )


def _check_attributes(name: str, layer: nn.Module, known: set[int]) -> None:
    """Refuse what torch would neither train nor copy."""
    where = f"layer {name!r}" if name else "the model"
    for attribute, value in vars(layer).items():
        if isinstance(value, Tensor) and not value.is_leaf:
            raise ModelError(
                f"{where} computes its {attribute!r} from parameters once, when it is built, so that it cannot be "
                "copied for clients; compute it in forward, or use weight_norm of torch.nn.utils.parametrizations"
            )
        if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
            continue
        parts = value.values() if isinstance(value, dict) else value
        layers = [part for part in parts if isinstance(part, nn.Module)]
        if any(id(parameter) not in known for part in layers for parameter in part.parameters()):
            raise ModelError(
                f"{where} keeps layers in a {type(value).__name__}, {attribute!r}, where torch does not find them to "
                "train them; use nn.ModuleList or nn.ModuleDict"
            )


def owns_its_parameters(module: nn.Module, chain: list[nn.Module]) -> bool:
    """Whether the module's parameters are those of the chain's layers, in order: none is tied or reparametrized."""
    expected: list[Tensor] = []
    for layer in chain:
        if isinstance(layer, nn.LSTM | nn.GRU):
            expected += [p for weights in layer.all_weights for p in weights]
        elif isinstance(layer, nn.Embedding):
            expected.append(layer.weight)
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            expected += [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    parameters = list(module.parameters())
    return len(parameters) == len(expected) and all(a is b for a, b in zip(parameters, expected, strict=True))


def chain_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module] | None:
    """The layers of nested nn.Sequential in order, or None if one is of no such kind.

    Exact types only: a subclass may compute something else, and so may a hook or a forward of one module's own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
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
