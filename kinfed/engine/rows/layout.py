"""The state of a torch module as a flat row: what is trained, what forward passes move, what is constant.

    row        all trainable parameters in the module's order, then all running statistics: [P] float32
    constants  frozen parameters (requires_grad=False) and all other buffers: of any type, one copy for all clients

Running statistics are the module's float32 buffers that `state_dict` holds, except those that never move
(kinfed.engine.rows.model_trial). Constants never travel and are in no
checkpoint; their digest identifies them. A normalization layer all of whose parameters are frozen is frozen as a whole:
it normalizes by its running statistics, in training too, and keeps them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfed.engine.contract.columns import ParameterSlot, matches
from kinfed.errors import ModelError

Norm = nn.modules.batchnorm._NormBase  # all of BatchNorm and InstanceNorm
BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm
STILL = "_kinfed_still_buffers"  # attribute of a layer: names of its own buffers that never move
NORM_KINDS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, Norm)


@dataclass(frozen=True)
class RowLayout:
    slots: tuple[ParameterSlot, ...]
    frozen_norms: tuple[str, ...]  # layers that stay in evaluation mode

    @classmethod
    def of(cls, module: nn.Module) -> RowLayout:
        frozen_norms = tuple(name for name, child in module.named_modules() if _is_frozen_norm(child))
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        moving = [(name, t) for name, t in statistics(module) if name.rpartition(".")[0] not in frozen_norms]
        slots, position = [], 0
        for trainable, tensors in ((True, trained), (False, moving)):
            for name, tensor in tensors:
                kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
                stop = position + tensor.numel()
                slots.append(ParameterSlot(name, tuple(tensor.shape), position, stop, trainable, kind))
                position = stop
        return cls(tuple(slots), frozen_norms)

    @property
    def num_params(self) -> int:
        return self.slots[-1].stop

    @property
    def has_statistics(self) -> bool:
        return not self.slots[-1].trainable

    def is_plain(self, module: nn.Module) -> bool:
        """Whether the row is all of the module's state: its parameters, and nothing frozen or running."""
        return not self.has_statistics and not self.constants(module)

    def constants(self, module: nn.Module) -> dict[str, Tensor]:
        """Frozen parameters and constant buffers by name; a tied one once."""
        in_row = {slot.name for slot in self.slots}
        tensors = (*module.named_parameters(), *module.named_buffers())
        return {name: tensor for name, tensor in tensors if name not in in_row}

    def working_copy(self, module: nn.Module) -> nn.Module:
        """A copy to call with the values of rows; constants are shared with `module`, not copied."""
        shared = {id(tensor): tensor for tensor in self.constants(module).values()}
        return copy.deepcopy(module, shared)

    def set_mode(self, module: nn.Module, *, training: bool) -> None:
        """Training or evaluation; frozen normalization layers stay in evaluation."""
        module.train(training)
        for name in self.frozen_norms:
            module.get_submodule(name).eval()


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters that the patterns name (kinfed.engine.contract.columns) are not trained; every pattern must name
    some."""
    for pattern in patterns:
        named = [parameter for name, parameter in module.named_parameters() if matches(name, pattern)]
        if not named:
            layers = dict.fromkeys(name.rpartition(".")[0] or name for name, _ in module.named_parameters())
            raise ModelError(f"nothing to freeze matches {pattern!r}; the model's layers are {', '.join(layers)}")
        for parameter in named:
            parameter.requires_grad_(False)


def _is_frozen_norm(layer: nn.Module) -> bool:
    own = list(layer.parameters(recurse=False))
    return isinstance(layer, Norm) and bool(own) and not any(p.requires_grad for p in own)


def statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Float32 buffers that `state_dict` holds, without those that were seen never to move."""
    lasting, still = module.state_dict(keep_vars=True), set(still_buffers(module))
    for name, buffer in module.named_buffers():
        if buffer.dtype == torch.float32 and name in lasting and name not in still:
            yield name, buffer


def still_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that kinfed.engine.rows.model_trial marked."""
    return [
        f"{layer}.{own}" if layer else own
        for layer, child in module.named_modules()
        for own in sorted(getattr(child, STILL, ()))
    ]
