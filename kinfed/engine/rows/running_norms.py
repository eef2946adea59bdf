"""BatchNorm and InstanceNorm in local training.

A training forward normalizes by the batch and moves the running statistics; evaluation normalizes by these. Where a
channel has a single value in the batch (one example, and one pixel left) there is no variance to normalize by: such a
layer then normalizes by its running statistics and leaves them as they are. torch refuses such batches; others drop
them, and clients with few examples then never train.
"""

from __future__ import annotations

from types import MethodType

from torch import Tensor, nn

from kinfed.engine.rows.layout import BatchNorm, InstanceNorm, Norm


def prepare_norms(module: nn.Module) -> None:
    """Let the normalization layers of a working copy follow this module's rule."""
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
