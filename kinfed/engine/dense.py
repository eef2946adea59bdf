"""Dense networks for many clients at once: forward and backward by hand on [n, ...] tensors.

A network is a chain of Flatten, Linear, ReLU and Tanh. A step writes `W - lr * gradient` straight into the parameters
(one `baddbmm`), without a gradient ever being stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kinfed.errors import ModelError


class Params:
    """The parameters of one layer for n clients, and the views of them that a step needs: many steps make them once."""

    __slots__ = ("across", "bias", "bias_row", "turned", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [n, outputs, inputs]
        self.bias = bias  # [n, outputs]
        self.across = weight.transpose(1, 2)  # [n, inputs, outputs]
        self.bias_row = None if bias is None else bias.unsqueeze(1)  # [n, 1, outputs]
        self.turned = weight.stride(1) < weight.stride(2)  # the outputs lie side by side in memory, not the inputs

    def rows(self, rows: slice) -> Params:
        return Params(self.weight[rows], None if self.bias is None else self.bias[rows])


@dataclass(frozen=True)
class Dense:
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


@dataclass(frozen=True)
class StackedNet:
    """`steps`: each a Dense layer followed by an activation ("", "relu" or "tanh")."""

    steps: tuple[tuple[Dense, str], ...]
    flattens: bool  # the first layer is Flatten; without it examples must be vectors

    @classmethod
    def compile(cls, module: nn.Module) -> StackedNet | None:
        """The network as a chain of dense layers, or None where it is anything else."""
        chain = chain_of(module, (nn.Linear, nn.ReLU, nn.Tanh, nn.Flatten, nn.Identity))
        if chain is None or not owns_its_parameters(module, chain):
            return None
        steps: list[tuple[Dense, str]] = []
        position = 0
        for index, layer in enumerate(chain):
            if isinstance(layer, nn.Linear):
                weight, position = position, position + layer.weight.numel()
                bias = None
                if layer.bias is not None:
                    bias, position = position, position + layer.bias.numel()
                steps.append((Dense(layer.in_features, layer.out_features, weight, bias), ""))
            elif isinstance(layer, nn.ReLU | nn.Tanh):
                if not steps or steps[-1][1]:
                    return None
                steps[-1] = (steps[-1][0], "relu" if isinstance(layer, nn.ReLU) else "tanh")
            elif isinstance(layer, nn.Flatten):
                if index != 0 or layer.start_dim != 1 or layer.end_dim != -1:
                    return None
            elif not isinstance(layer, nn.Identity):
                return None
        if not steps or steps[-1][1]:
            return None
        return cls(tuple(steps), isinstance(chain[0], nn.Flatten))

    def forward(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._forward(self.layers_of(theta), x)[-1]

    def layers_of(self, theta: Tensor) -> list[Params]:
        """Views of theta."""
        return [Params(dense.weight_of(theta), dense.bias_of(theta)) for dense, _ in self.steps]

    def _forward(self, layers: list[Params], x: Tensor) -> list[Tensor]:
        """The input and the output of every step; the last one is the logits."""
        if not self.flattens and x.dim() != 3:
            raise ModelError(
                f"the model begins with Linear, so examples must be vectors; got shape {list(x.shape[2:])}; "
                "put nn.Flatten() first"
            )
        values = [x.flatten(2)]
        wanted, got = self.steps[0][0].inputs, values[0].shape[2]
        if got != wanted or not x.is_floating_point():
            kind = "numbers" if x.is_floating_point() else "tokens"
            raise ModelError(
                f"the model takes {wanted} numbers per example; got {got} {kind} (shape {list(x.shape[2:])})"
            )
        for layer, (_, activation) in zip(layers, self.steps, strict=True):
            if layer.bias_row is None:
                h = torch.bmm(values[-1], layer.across)
            else:
                h = torch.baddbmm(layer.bias_row, values[-1], layer.across)
            if activation == "relu":
                h = h.relu_()
            elif activation == "tanh":
                h = h.tanh_()
            values.append(h)
        return values

    def _backward(self, layers: list[Params], values: list[Tensor], delta: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the layer, delta at its output) from the last layer to the first; its input is
        values[number].

        The consumer may overwrite the layer's weights when it has a layer in hand: what lies below is already
        propagated."""
        for number in range(len(self.steps) - 1, 0, -1):
            below = torch.bmm(delta, layers[number].weight)
            activation, output = self.steps[number - 1][1], values[number]
            if activation == "relu":
                torch.ops.aten.threshold_backward.grad_input(below, output, 0, grad_input=below)
            elif activation == "tanh":
                below = below.mul_(1 - output * output)
            yield number, delta
            delta = below
        yield 0, delta

    @torch.no_grad()
    def grad(self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        layers = self.layers_of(theta)
        values = self._forward(layers, x)
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        slots = self.layers_of(out)
        for number, delta in self._backward(layers, values, output_delta(values[-1], y, weight)):
            slot = slots[number]
            torch.bmm(delta.transpose(1, 2), values[number], out=slot.weight)
            if slot.bias is not None:
                torch.sum(delta, 1, out=slot.bias)
        return out

    def descend_(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        lr: float | Tensor,
        pull: tuple[float | Tensor, Tensor] | None = None,
    ) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place, without storing the gradient."""
        layers = self.layers_of(theta)
        self.step_(layers, x, y, weight, lr, None if pull is None else (pull[0], self.layers_of(pull[1])))

    @torch.no_grad()
    def step_(
        self,
        layers: list[Params],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        lr: float | Tensor,
        pull: tuple[float | Tensor, list[Params]] | None = None,
    ) -> None:
        """The same on layers.

        The backward pass is linear in the output delta, so learning rates of the clients' own enter there; one for
        all enters where a gradient is added."""
        values = self._forward(layers, x)
        scale = 1.0 if isinstance(lr, Tensor) else -lr
        delta = output_delta(values[-1], y, weight * -lr[:, None] if isinstance(lr, Tensor) else weight)
        if pull is not None:
            amount = pull[0] * lr
            if isinstance(amount, Tensor):
                amount = amount.to(delta.dtype)[:, None]  # lerp does not mix types, and methods decide in float64
        for number, d in self._backward(layers, values, delta):
            layer, below = layers[number], values[number]
            if pull is not None:
                center = pull[1][number]
                layer.weight.lerp_(center.weight, amount[..., None] if isinstance(amount, Tensor) else amount)
                if layer.bias is not None and center.bias is not None:
                    layer.bias.lerp_(center.bias, amount)
            if layer.turned:
                layer.across.baddbmm_(below.transpose(1, 2), d, alpha=scale)
            else:
                layer.weight.baddbmm_(d.transpose(1, 2), below, alpha=scale)
            if layer.bias is not None:
                layer.bias.add_(d.sum(1), alpha=scale)

    @torch.no_grad()
    def per_example_grad(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[n, B, P]: outer products of each example's delta and input."""
        layers = self.layers_of(theta)
        values = self._forward(layers, x)
        out = theta.new_empty(*y.shape, theta.shape[1])
        ones = torch.ones(y.shape, dtype=theta.dtype, device=theta.device)
        for number, delta in self._backward(layers, values, output_delta(values[-1], y, ones)):
            dense, below = self.steps[number][0], values[number]
            stop = dense.weight + dense.inputs * dense.outputs
            out[..., dense.weight : stop] = (delta[..., :, None] * below[..., None, :]).flatten(2)
            if dense.bias is not None:
                out[..., dense.bias : dense.bias + dense.outputs] = delta
        return out

    @torch.no_grad()
    def example_norms(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[n, B]: a dense layer's gradient is an outer product of delta and input, so its norm is the product of
        theirs (Goodfellow 2015) and the gradient itself is never formed."""
        layers = self.layers_of(theta)
        values = self._forward(layers, x)
        ones = torch.ones(y.shape, dtype=theta.dtype, device=theta.device)
        square = torch.zeros_like(ones)
        for number, delta in self._backward(layers, values, output_delta(values[-1], y, ones)):
            below = values[number].square().sum(-1)
            square += delta.square().sum(-1) * (below if self.steps[number][0].bias is None else below + 1)
        return square.sqrt_()


def output_delta(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """weight * (softmax(z) - onehot(y)): the gradient of the weighted cross-entropy. Overwrites the logits."""
    delta = _softmax_(logits)
    delta.scatter_add_(-1, y[..., None], delta.new_full((), -1.0).expand(*y.shape, 1))
    return delta.mul_(weight[..., None])


def _softmax_(z: Tensor) -> Tensor:
    """softmax(z, -1); may overwrite z."""
    if z.shape[-1] >= 16:
        return torch.softmax(z, -1)
    # torch's kernel works along the last axis with vectors of 16 and falls back to single numbers below that: for
    # ten classes these three passes over everything take a quarter of its time.
    z = z.sub_(z.amax(-1, keepdim=True)).exp_()
    return z.div_(z.sum(-1, keepdim=True))


def owns_its_parameters(module: nn.Module, chain: list[nn.Module]) -> bool:
    """Whether the module's parameters are those of the chain's layers, each once and in order: no tied weights,
    no reparametrized layer."""
    expected = [
        p
        for layer in chain
        if isinstance(layer, nn.Linear | nn.Conv2d)
        for p in (layer.weight, layer.bias)
        if p is not None
    ]
    found = list(module.parameters())
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


def chain_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module] | None:
    """The layers of nested nn.Sequential in order, or None where one is of no such kind.

    Exact types only: a subclass may compute something else, and so may a hook."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.Sequential:
        out: list[nn.Module] = []
        for child in module:
            inner = chain_of(child, kinds)
            if inner is None:
                return None
            out += inner
        return out
    return [module] if type(module) in kinds else None
