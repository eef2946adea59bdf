"""A linear layer that works for one client or for many at once, with weights of any floating-point type.

A module whose trained parameters all belong to such layers can run *batched*: the examples of n clients, one client
after the other, go through it as one batch [n * B, ...], and `torch.func.functional_call` puts stacked parameters
[n, ...] in the place of the trained ones. What is frozen is multiplied once for all clients; only what is trained is
multiplied client by client.

    y = ClientLinear(3, 2)(x)                                        x [B, ..., 3]
    y = functional_call(layer, {"weight": w, "bias": b}, (x,))       w [n, 2, 3], b [n, 2], x [n * B, ..., 3]
"""

from __future__ import annotations

from math import prod
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kinfed.errors import ModelError


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
    """Whether the layers allow that the examples of many clients go through the module as one batch: every trained
    parameter belongs to a layer that knows stacked ones, no layer mixes the examples of a batch, and no layer drops
    values (clients draw for themselves). What a `forward` does beside calling layers cannot be seen from here: examples
    must stay on the first axis."""
    trained = [p for p in module.parameters() if p.requires_grad]
    stackable = {id(p) for child in module.modules() if isinstance(child, ClientLinear) for p in child.parameters()}
    return (
        bool(trained)
        and all(id(p) in stackable for p in trained)
        and not any(isinstance(child, nn.modules.batchnorm._NormBase) for child in module.modules())
        and not any(isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 for child in module.modules())
    )
