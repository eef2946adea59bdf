"""Which network and which loss a kernel is compiled for: the types of its arguments say so.

    network.layers   a table (dense layers), or Unrolled (LSTM layers)
    work.y            int64 (classes), or float32 (numbers)

One text of a kernel serves all; each combination has machine code of its own.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from kinfed.engine.compiled.fused_recurrent import recurrent_backward, recurrent_forward
from kinfed.engine.compiled.fused_steps import (
    add_cross_entropies,
    add_residual_losses,
    delta_of_cross_entropy,
    delta_of_residuals,
    dense_backward,
    dense_forward,
)

_OPTIONS = {"nogil": True, "error_model": "numpy"}


def forward(network, row, x, work, batch):
    """The address of the outputs for x [T, B, D], with T = 1 for dense layers; `work` keeps what `backward` needs."""
    raise NotImplementedError


def backward(network, row, target, scale, x, work, batch, terms):
    """Add scale * gradient to `target`, from the delta at the outputs; where that is the row itself, its columns make
    the rest of the step before."""
    raise NotImplementedError


def delta_of_loss(network, outputs, work, batch):
    """weight * ∂loss/∂z [B, C]."""
    raise NotImplementedError


def add_losses(network, outputs, work, batch, scores, i):
    """Add the losses of a batch, and how many predictions are right, to entry i."""
    raise NotImplementedError


def _type_of(kind: Any, name: str) -> Any:
    """The type of a named tuple's entry."""
    return kind.types[kind.fields.index(name)]


def _is_dense(network: Any) -> bool:
    return isinstance(_type_of(network, "layers"), types.Array)


def _has_classes(work: Any) -> bool:
    return isinstance(_type_of(work, "y").dtype, types.Integer)


@overload(forward, jit_options=_OPTIONS)
def _forward(network, row, x, work, batch):
    return dense_forward if _is_dense(network) else recurrent_forward


@overload(backward, jit_options=_OPTIONS)
def _backward(network, row, target, scale, x, work, batch, terms):
    return dense_backward if _is_dense(network) else recurrent_backward


@overload(delta_of_loss, jit_options=_OPTIONS)
def _delta_of_loss(network, outputs, work, batch):
    return delta_of_cross_entropy if _has_classes(work) else delta_of_residuals


@overload(add_losses, jit_options=_OPTIONS)
def _add_losses(network, outputs, work, batch, scores, i):
    return add_cross_entropies if _has_classes(work) else add_residual_losses
