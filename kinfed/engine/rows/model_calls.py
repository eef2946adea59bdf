"""Models of Hugging Face, as they come: called with tokens or pixels and a mask, answering with logits among others.

    model = lambda: AutoModelForSequenceClassification.from_config(config)      # no module around it

Examples are one tensor. A model whose `forward` takes an `attention_mask` is given one that leaves out the tokens of
its configuration's `pad_token_id`, and of its output, an object or a dict, the `logits` are taken. Labels stay with
kinfed, whose loss is a value per example; generation's cache is turned off. All this is done by hooks of the module
itself, so that names of parameters, exports and copies are those of the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_OF_TRANSFORMERS = frozenset({"input_ids", "attention_mask", "pixel_values", "input_values"})


def prepare_call(module: nn.Module) -> None:
    """Let a module that speaks as those of Hugging Face do be called with examples alone, and answer with logits."""
    names = inspect.signature(type(module).forward).parameters.keys()
    if not names & _OF_TRANSFORMERS:
        return
    pad = getattr(getattr(module, "config", None), "pad_token_id", None)
    arguments = CallArguments(pad if "attention_mask" in names else None, "use_cache" in names)
    module.register_forward_pre_hook(arguments, with_kwargs=True)
    module.register_forward_hook(logits_alone)


@dataclass(frozen=True)
class CallArguments:
    """What is passed beside the examples."""

    pad: int | None  # the token that a mask leaves out; None: no mask
    caches: bool  # whether the model would keep what generation goes on from

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        more: dict[str, Any] = {"use_cache": False} if self.caches else {}
        if self.pad is not None and not args[0].is_floating_point():
            more["attention_mask"] = (args[0] != self.pad).to(args[0].dtype)
        return args, more | kwargs


def logits_alone(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The logits of an output that has others beside them; any other output as it is."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return output if logits is None else logits
