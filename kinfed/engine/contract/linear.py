"""Dense maps of many clients at once: their parameters as views of the rows, and one step of descent on them.

The gradient of a dense map is a sum of outer products of deltas (at its outputs) and inputs. A step writes
`W - lr * gradient` straight into the parameters (one `baddbmm`), without the gradient ever being stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Params:
    """The parameters of one dense map for n clients, and the views of them that a step needs: many steps make them
    once."""

    __slots__ = ("bias", "bias_row", "is_transposed", "weight", "weight_t")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [n, outputs, inputs]
        self.bias = bias  # [n, outputs]
        self.weight_t = weight.transpose(1, 2)  # [n, inputs, outputs]
        self.bias_row = None if bias is None else bias.unsqueeze(1)  # [n, 1, outputs]
        self.is_transposed = weight.stride(1) < weight.stride(2)  # outputs lie side by side in memory, not inputs

    def rows(self, rows: slice) -> Params:
        return Params(self.weight[rows], None if self.bias is None else self.bias[rows])


@dataclass(frozen=True)
class Dense:
    """Where a dense map lies in the flat row."""

    inputs: int
    outputs: int
    weight: int  # start of the weight [outputs, inputs] in the flat row
    bias: int | None  # start of the bias [outputs]

    def weight_of(self, theta: Tensor) -> Tensor:
        """[n, outputs, inputs], a view."""
        stop = self.weight + self.inputs * self.outputs
        return theta[:, self.weight : stop].view(-1, self.outputs, self.inputs)

    def bias_of(self, theta: Tensor) -> Tensor | None:
        return None if self.bias is None else theta[:, self.bias : self.bias + self.outputs]

    def params_of(self, theta: Tensor) -> Params:
        """Views of theta."""
        return Params(self.weight_of(theta), self.bias_of(theta))


class DenseStep:
    """One step theta <- theta - lr * (gradient + lam * (theta - center)), dense map by dense map and in place.

    The backward pass is linear in the delta of the output, so learning rates of the clients' own enter there (see
    `example_weight`); one for all enters where a gradient is added."""

    def __init__(self, lr: float | Tensor, lam: float | Tensor | None, dtype: torch.dtype) -> None:
        """`lr` and `lam` are numbers or one per client [n]; no lam: there is no center."""
        self._lr = lr
        self._scale = 1.0 if isinstance(lr, Tensor) else -lr
        amount = 0.0 if lam is None else lam * lr
        # lerp does not mix types, and methods decide in float64
        self._amount = amount.to(dtype)[:, None] if isinstance(amount, Tensor) else amount

    def example_weight(self, weight: Tensor) -> Tensor:
        """[n, B] the weights of the examples with which the backward pass is to begin."""
        return weight * -self._lr[:, None] if isinstance(self._lr, Tensor) else weight

    def scaled(self, delta: Tensor) -> Tensor:
        """A delta [n, B, outputs] that contains the examples' weights already, as the backward pass is to see it."""
        return delta * -self._lr[:, None, None].to(delta.dtype) if isinstance(self._lr, Tensor) else delta

    def apply_(self, params: Params, delta: Tensor, x: Tensor, center: Params | None) -> None:
        """The map's gradient is Σ_b delta_b x_b', of delta [n, B, outputs] and x [n, B, inputs]."""
        if center is not None:
            amount = self._amount
            params.weight.lerp_(center.weight, amount[..., None] if isinstance(amount, Tensor) else amount)
            if params.bias is not None and center.bias is not None:
                params.bias.lerp_(center.bias, amount)
        if params.is_transposed:
            params.weight_t.baddbmm_(x.transpose(1, 2), delta, alpha=self._scale)
        else:
            params.weight.baddbmm_(delta.transpose(1, 2), x, alpha=self._scale)
        if params.bias is not None:
            params.bias.add_(delta.sum(1), alpha=self._scale)


def write_gradient(params: Params, delta: Tensor, x: Tensor) -> None:
    """Overwrite `params` with the gradient Σ_b delta_b x_b'."""
    torch.bmm(delta.transpose(1, 2), x, out=params.weight)
    if params.bias is not None:
        torch.sum(delta, 1, out=params.bias)
