"""Networks at the server that generate clients' models: a trunk of ReLU layers, and a linear head to all parameters."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kinfed.core import rng

Sizes = Sequence[tuple[int, int]]  # (inputs, outputs) of layers
ROWS_AT_ONCE = 4096  # of a head, drawn in float64


def trunk_sizes(inputs: int, hidden: int, hidden_layers: int) -> Sizes:
    return [(inputs, hidden)] + [(hidden, hidden)] * hidden_layers


def trunk_outputs(x: Tensor, trunk: Tensor, sizes: Sizes) -> Tensor:
    """[..., H] of inputs [..., E], by layers of `trunk` [R]: weights [outputs, inputs] before biases."""
    position = 0
    for number, (inputs, outputs) in enumerate(sizes):
        stop = position + inputs * outputs
        weight, bias = trunk[position:stop].view(outputs, inputs), trunk[stop : stop + outputs]
        x = torch.addmm(bias, torch.relu(x) if number else x, weight.T)
        position = stop + outputs
    return x


def trunk_start(key: Tensor, sizes: Sizes) -> Tensor:
    layers = enumerate(sizes)
    return torch.cat([uniform(rng.fold(key, k), (inputs + 1) * outputs, inputs) for k, (inputs, outputs) in layers])


def head_start(key: Tensor, bias: Tensor, hidden: int) -> Tensor:
    """[T, H] of a head whose bias is [T]."""
    head = bias.new_empty(len(bias), hidden)
    for rows in torch.split(torch.arange(len(bias)), ROWS_AT_ONCE):
        head[rows] = uniform(rng.fold(key, rows), hidden, hidden).to(bias)
    return head


def uniform(key: Tensor, count: int, inputs: int) -> Tensor:
    """Start of a linear layer with `inputs` inputs, as torch draws it: uniform on ±1/√inputs."""
    return (2 * rng.uniform(key, count) - 1) / math.sqrt(inputs)
