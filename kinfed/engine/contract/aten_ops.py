"""Backward operations of torch that have no public name, in one place.

torch promises nothing about `torch.ops.aten` and its engine of autograd: schemas may change with any minor version.
These are the calls of kinfed's own networks and backends, as torch 2.13 has them; the tests compare their results with
public autograd, so a version that changes a schema or a meaning fails there and is repaired here.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_aten = torch.ops.aten
_engine = torch.autograd.Variable._execution_engine
Pair = tuple[int, int]


# (delta at the output, output) to the delta at the input.
tanh_backward: Callable[[Tensor, Tensor], Tensor] = _aten.tanh_backward
# (x, kernel, stride, padding, dilation, ceil_mode) to the output and where each maximum lay; backward takes the delta,
# the same, and these places.
max_pool2d: Callable[..., tuple[Tensor, Tensor]] = _aten.max_pool2d_with_indices
max_pool2d_backward: Callable[..., Tensor] = _aten.max_pool2d_with_indices_backward


def relu_backward(delta: Tensor, output: Tensor) -> Tensor:
    """The delta below a ReLU, from the delta at its output and that output."""
    below: Tensor = _aten.threshold_backward(delta, output, 0)
    return below


def relu_backward_(delta: Tensor, output: Tensor) -> Tensor:
    """The same in place."""
    _aten.threshold_backward.grad_input(delta, output, 0, grad_input=delta)
    return delta


def convolution_backward(
    delta: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, *, below: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(delta at the input, where `below` asks for it; gradient of the weight, where `of_weight` does)."""
    transposed, output_padding, bias_sizes = False, (0, 0), None
    at_input, gradient, _ = _aten.convolution_backward(
        delta, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
        (below, of_weight, False),
    )  # fmt: skip
    return at_input, gradient


def pull_back(outputs: Sequence[Tensor], deltas: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`torch.autograd.grad(outputs, inputs, deltas, allow_unused=True, materialize_grads=True)` without its checks of
    arguments, which take 57 µs of processor time: half as long as the whole backward pass of a small network."""
    gradients = _engine.run_backward(
        tuple(outputs), tuple(deltas), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
