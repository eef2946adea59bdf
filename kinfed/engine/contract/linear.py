"""Dense maps of many clients at once.

The gradient of a dense map is a sum of outer products of deltas (at its outputs) and inputs. A step writes
`W - lr * gradient` straight into the parameters (one `baddbmm`), without the gradient ever being stored.

A module whose trained parameters all belong to `ClientLinear` can run *batched*: the examples of n clients, one client
after the other, go through it as one batch [n * B, ...], and `torch.func.functional_call` puts stacked parameters
[n, ...] in the place of the trained ones. What is frozen is multiplied once for all clients; only what is trained is
multiplied client by client.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kinfed.errors import ModelError


class Params:
    """The parameters of one dense map for n clients, and views of them, which many steps make once."""

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
    """The place of a dense map in the flat row."""

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

    def apply(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, outputs] of x [n, B, inputs]."""
        w, b = self.weight_of(theta).mT, self.bias_of(theta)
        return torch.bmm(x, w) if b is None else torch.baddbmm(b.unsqueeze(1), x, w)

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

    def apply_to_table_(
        self, table: Tensor, places: tuple[Tensor, Tensor], delta: Tensor, center: Tensor | None
    ) -> None:
        """The same for tables [n, V, D], whose gradient is a sum of deltas [n, m, D] at places (client, row) [n, m]."""
        if center is not None:
            amount = self._amount
            table.lerp_(center, amount[..., None] if isinstance(amount, Tensor) else amount)
        table.index_put_(places, delta * self._scale, accumulate=True)


def write_gradient(params: Params, delta: Tensor, x: Tensor) -> None:
    """Overwrite `params` with the gradient Σ_b delta_b x_b'."""
    torch.bmm(delta.transpose(1, 2), x, out=params.weight)
    if params.bias is not None:
        torch.sum(delta, 1, out=params.bias)


class ClientLinear(nn.Linear):
    """nn.Linear, also for stacked weights. A weight of 16 bits is widened to the type of the input where it is used:
    half the memory, and on processors without arithmetic of 16 bits many times as fast as computing with it."""

    @classmethod
    def from_linear(cls, layer: nn.Linear) -> Self:
        """The same layer with the same parameters, not copies of them."""
        own = cls.__new__(cls)
        nn.Linear.__init__(own, layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        own.weight, own.bias = layer.weight, layer.bias
        return own.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, weight, bias) if weight.dim() == 2 else stacked_linear(x, weight, bias)


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n * B, ..., in] times each client's own weight [n, out, in], plus its bias [n, out] -> [n * B, ..., out]."""
    clients = len(weight)
    if len(x) % clients:
        raise ModelError(f"a batch of {len(x)} examples cannot be {clients} batches of equal size, one per client")
    rows = x.reshape(clients, prod(x.shape[:-1]) // clients, x.shape[-1])
    columns = weight.transpose(1, 2)
    y = torch.bmm(rows, columns) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, columns)
    return y.view(*x.shape[:-1], weight.shape[1])


def runs_batched(module: nn.Module) -> bool:
    """Whether the examples of many clients may go through the module as one batch: every trained parameter belongs to a
    layer that knows stacked ones, and no layer mixes examples or drops values. What a `forward` does beside calling
    layers cannot be seen from here: examples must stay on the first axis."""
    trained = [p for p in module.parameters() if p.requires_grad]
    stackable = {id(p) for child in module.modules() if isinstance(child, ClientLinear) for p in child.parameters()}
    return (
        bool(trained)
        and all(id(p) in stackable for p in trained)
        and not any(isinstance(child, nn.modules.batchnorm._NormBase) for child in module.modules())
        and not any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 for child in module.modules())
    )
