"""A module that one thread calls with the values of rows, in training or in evaluation.

BatchNorm and InstanceNorm normalize by the batch in training and move the running statistics. Where a channel has a
single value in the batch (one example, and one pixel left) there is no variance to normalize by: such a layer then
normalizes by its running statistics and leaves them as they are. torch refuses such batches; others drop them, and
clients with few examples then never train.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn

from kinfed.engine.rows.keyed_dropout import Draws, prepare_dropout
from kinfed.engine.rows.layout import BatchNorm, InstanceNorm, Norm, RowLayout, still_buffers
from kinfed.errors import ModelError


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
        """Let the module compute with the values of `row` [P], without copying them: many times as fast as
        torch.func.functional_call. A forward pass changes the row's running statistics only if `moving`; otherwise it
        gets copies of them."""
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
