"""Models as they come: called with several inputs, and models of Hugging Face, which answer with logits among others.

    model = lambda: AutoModelForSequenceClassification.from_config(config)      # no module around it

Examples are one tensor. If it packs several inputs (kinfed.data.examples.packing), the module is called with these: by
name, or in order. Otherwise a model whose `forward` takes an `attention_mask` is given one that leaves out the tokens
of its configuration's `pad_token_id`. Of an output that is an object or a dict the `logits` are taken. Labels stay with
kinfed, whose loss is a value per example; generation's cache is turned off. All this is done by hooks of the module
itself, so that names of parameters, exports and copies are those of the model; called with its own inputs, it takes
them as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kinfed.data import Packing
from kinfed.errors import ModelError

_OF_TRANSFORMERS = frozenset({"input_ids", "attention_mask", "pixel_values", "input_values"})


def make_prepared(make: Callable[[], nn.Module], packing: Packing | None) -> nn.Module:
    """A module of `make`, ready to be called with examples alone."""
    refuse_module(make)
    module = make()
    if isinstance(module, nn.Module):
        prepare_call(module, packing)
    return module


def refuse_module(make: object) -> None:
    if isinstance(make, nn.Module):
        raise ModelError(
            f"a model is given as a function that makes it, since methods need several starts; got a "
            f"{type(make).__name__}: write model=lambda: {type(make).__name__}(...)"
        )


def prepare_call(module: nn.Module, packing: Packing | None = None) -> None:
    """Let a module be called with examples alone: one of several inputs, and one that speaks as those of Hugging Face
    do, which then answers with logits. A module that is prepared stays as it is."""
    if any(isinstance(hook, CallArguments) for hook in module._forward_pre_hooks.values()):
        return
    names = inspect.signature(type(module).forward).parameters.keys()
    of_transformers = bool(names & _OF_TRANSFORMERS)
    pad = getattr(getattr(module, "config", None), "pad_token_id", None)
    masks = of_transformers and packing is None and "attention_mask" in names
    if of_transformers or packing is not None:
        arguments = CallArguments(pad if masks else None, of_transformers and "use_cache" in names, packing)
        module.register_forward_pre_hook(arguments, with_kwargs=True)
    if of_transformers:
        module.register_forward_hook(logits_alone)


def call_plainly(module: nn.Module) -> None:
    """Take the preparation away: a forward pass that begins at activations takes them alone."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, CallArguments):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def packing_of(module: nn.Module) -> Packing | None:
    """How the examples that a module is called with hold several inputs; None if they are one."""
    hooks = (hook for child in module.modules() for hook in child._forward_pre_hooks.values())
    return next((hook.packing for hook in hooks if isinstance(hook, CallArguments)), None)


@dataclass(frozen=True)
class CallArguments:
    """What is passed beside the examples."""

    pad: int | None  # the token that a mask leaves out; None: no mask
    caches: bool  # whether the model would keep what generation goes on from
    packing: Packing | None = None  # of several inputs

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        more: dict[str, Any] = {"use_cache": False} if self.caches else {}
        if self.packing is not None and self._is_packed(args, kwargs):
            inputs = self.packing.unpack(args[0])
            return (inputs, more | kwargs) if isinstance(inputs, tuple) else ((), more | inputs | kwargs)
        if self.pad is not None and args and not args[0].is_floating_point():
            more["attention_mask"] = (args[0] != self.pad).to(args[0].dtype)
        return args, more | kwargs

    def _is_packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether examples come packed, and not as the inputs of the module itself."""
        assert self.packing is not None
        if len(args) != 1 or kwargs.keys() & set(self.packing.names):
            return False
        return isinstance(args[0], Tensor) and args[0].dim() == 2 and args[0].shape[1] == self.packing.numbers


def logits_alone(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The logits of an output that has others beside them; any other output as it is."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if logits is None else logits
