"""Which network and which loss a kernel is compiled for: the types of its arguments say so.

    net    a table (dense layers), or (table, length) (LSTM layers)
    y      int64 (classes), or float32 (numbers)

One text of a kernel serves all; each combination has machine code of its own.
"""

from __future__ import annotations

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


def forward(net, row, x, hidden, spare, batch):
    """The address of the outputs for x [T, B, D], with T = 1 for dense layers; `hidden` keeps what `backward` needs."""
    raise NotImplementedError


def backward(net, trains, row, target, scale, x, hidden, delta, spare, batch, rate, lam, center, drift, decay):
    """Add scale * gradient to `target`, from the delta at the outputs; where that is the row itself, its columns make
    the rest of the step before."""
    raise NotImplementedError


def delta_of_loss(outputs, delta, y, weight, batch, classes, loss):
    """weight * ∂loss/∂z [B, C]."""
    raise NotImplementedError


def add_losses(outputs, y, batch, classes, rule, correct, loss, i):
    """Add the losses of a batch, and how many predictions are right, to entry i."""
    raise NotImplementedError


@overload(forward, jit_options=_OPTIONS)
def _forward(net, row, x, hidden, spare, batch):
    if isinstance(net, types.Array):
        return lambda net, row, x, hidden, spare, batch: dense_forward(net, row, x, hidden, batch)
    return lambda net, row, x, hidden, spare, batch: recurrent_forward(net, row, x, hidden, spare, batch)


@overload(backward, jit_options=_OPTIONS)
def _backward(
    net, trains, row, target, scale, x, hidden, delta, spare, batch,
    rate, lam, center, drift, decay,
):  # fmt: skip
    walk = dense_backward if isinstance(net, types.Array) else recurrent_backward

    def body(net, trains, row, target, scale, x, hidden, delta, spare, batch, rate, lam, center, drift, decay):
        walk(net, trains, row, target, scale, x, hidden, delta, spare, batch, rate, lam, center, drift, decay)

    return body


@overload(delta_of_loss, jit_options=_OPTIONS)
def _delta_of_loss(outputs, delta, y, weight, batch, classes, loss):
    if isinstance(y.dtype, types.Integer):
        return lambda outputs, delta, y, weight, batch, classes, loss: delta_of_cross_entropy(
            outputs, delta, y, weight, batch, classes
        )
    return lambda outputs, delta, y, weight, batch, classes, loss: delta_of_residuals(
        outputs, delta, y, weight, batch, loss
    )


@overload(add_losses, jit_options=_OPTIONS)
def _add_losses(outputs, y, batch, classes, rule, correct, loss, i):
    if isinstance(y.dtype, types.Integer):
        return lambda outputs, y, batch, classes, rule, correct, loss, i: add_cross_entropies(
            outputs, y, batch, classes, correct, loss, i
        )
    return lambda outputs, y, batch, classes, rule, correct, loss, i: add_residual_losses(
        outputs, y, batch, rule, loss, i
    )
