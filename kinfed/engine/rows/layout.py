"""The state of a torch module as a flat row, and a copy of the module that one thread calls with the values of rows.

    row        all trainable parameters in the module's order, then all running statistics: [P] float32
    constants  frozen parameters (requires_grad=False) and all other buffers: of any type, one copy for all clients

Running statistics are the module's float32 buffers that `state_dict` holds, except those that never move
(kinfed.engine.rows.model_trial). Constants never travel and are in no checkpoint; their digest identifies them. A
normalization layer all of whose parameters are frozen is frozen as a whole: it normalizes by its running statistics, in
training too, and keeps them.

BatchNorm and InstanceNorm normalize by the batch in training and move the running statistics. Where a channel has a
single value in the batch (one example, and one pixel left) there is no variance to normalize by: such a layer then
normalizes by its running statistics and leaves them as they are. torch refuses such batches; others drop them, and
clients with few examples then never train.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType

import torch
from torch import Tensor, nn

from kinfed.engine.contract.columns import ParameterSlot, matches
from kinfed.engine.rows.keyed_random import Draws, prepare_dropout
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
    """Freeze parameters that the patterns name (kinfed.engine.contract.columns); each must name some."""
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
    marked = ((layer, own) for layer, child in module.named_modules() for own in sorted(getattr(child, STILL, ())))
    return [f"{layer}.{own}" if layer else own for layer, own in marked]


class WorkingCopy:
    """Constants are shared with the task's module; what is in the row is this copy's own until rows are bound to it."""

    def __init__(self, layout: RowLayout, module: nn.Module, device: torch.device, *, training: bool) -> None:
        self.module = layout.working_copy(module)
        self.draws = Draws(device)
        prepare_norms(self.module)
        prepare_dropout(self.module, self.draws)
        layout.set_mode(self.module, training=training)
        named = dict(self.module.named_parameters())
        self.leaves = [named[slot.name] for slot in layout.slots if slot.trainable]
        self._statistics = [self._place_of(slot.name) for slot in layout.slots if not slot.trainable]
        self._still = [(*self._place_of(name), self.module.get_buffer(name)) for name in still_buffers(self.module)]
        self._versions = [value._version for *_, value in self._still]
        self._row: Tensor | None = None  # to which parameters are bound
        self._values: list[Tensor] = []  # views of it, one for each leaf
        self._places: list[Tensor] = []  # views of it, one for each running statistic
        self._shapes = [slot.shape for slot in layout.slots]
        self._sizes = [slot.stop - slot.start for slot in layout.slots]

    def _place_of(self, name: str) -> tuple[dict[str, Tensor | None], str]:
        owner, _, own = name.rpartition(".")
        return self.module.get_submodule(owner)._buffers, own

    def bind(self, row: Tensor, *, moving: bool) -> None:
        """Let the module compute with the values of `row` [P], not copied: many times as fast as
        torch.func.functional_call. The row's running statistics move only if `moving`; otherwise they are copied."""
        if not self._is_bound_to(row):
            views = self._views(row)
            self._row, self._values, self._places = row, views[: len(self.leaves)], views[len(self.leaves) :]
            for leaf, value in zip(self.leaves, self._values, strict=True):
                leaf.data = value
        for (buffers, name), place in zip(self._statistics, self._places, strict=True):
            buffers[name] = place if moving else place.clone()

    def parameters_of(self, row: Tensor) -> list[Tensor]:
        """Views of the trained parameters of `row` [P], in the order of `leaves`, to change them in place."""
        return self._values if self._is_bound_to(row) else self._views(row)[: len(self.leaves)]

    def _is_bound_to(self, row: Tensor) -> bool:
        # By memory: a loop over steps makes a new view of the row in each. The row that is bound keeps its memory in
        # use, so that no other one can lie there.
        bound = self._row
        return bound is not None and bound.data_ptr() == row.data_ptr() and row.is_contiguous()

    def _views(self, row: Tensor) -> list[Tensor]:
        # Of `.data`: rows of one theta share a version counter, and threads that train them would mark each other's
        # values as stale.
        pieces = torch.split(row.data, self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def store_statistics(self, row: Tensor) -> None:
        """Put running statistics where `row` [P] has them, if they are not there: a forward pass may replace them
        instead of changing them in place, and the row it was bound to may be a copy."""
        places = self._places if self._is_bound_to(row) else self._views(row)[len(self.leaves) :]
        for (buffers, name), place in zip(self._statistics, places, strict=True):
            value = buffers[name]
            if value is not place and value is not None:
                place.copy_(value.detach().reshape(place.shape))

    def check_still(self) -> None:
        """Refuse a model that has moved a buffer which is a constant of all clients."""
        for (buffers, name, value), version in zip(self._still, self._versions, strict=True):
            if buffers[name] is not value or value._version != version:
                raise ModelError(
                    f"training has moved the buffer {name!r}, which did not move when the model was tried and is "
                    "shared by all clients; move it in every training pass, from the first on"
                )


def prepare_norms(module: nn.Module) -> None:
    """Let the normalization layers of a working copy take batches with a single value per channel."""
    for layer in module.modules():
        if not isinstance(layer, Norm) or not layer.track_running_stats:
            continue
        layer.num_batches_tracked = None  # only read where momentum is None, which is refused
        if isinstance(layer, BatchNorm | InstanceNorm):
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]  # of this one copy


def _forward(layer: Norm, x: Tensor) -> Tensor:
    values = x.numel() // (x.shape[1] if isinstance(layer, BatchNorm) else x.shape[0] * x.shape[1])
    if layer.training and values == 1:
        return nn.functional.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps
        )
    out: Tensor = type(layer).forward(layer, x)
    return out
