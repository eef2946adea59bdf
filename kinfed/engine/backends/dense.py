"""Dense networks for many clients at once: forward and backward by hand on [n, ...] tensors.

A network is a chain of Flatten, Linear, ReLU and Tanh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.contract.aten_ops import relu_backward_
from kinfed.engine.contract.descent import Descent, LayerwiseDescent, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss, top_deltas
from kinfed.engine.contract.linear import ClientLinear, Dense, DenseStep, Params, write_gradient
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.rows.module_checks import chain_of, owns_its_parameters
from kinfed.errors import ModelError


@dataclass(frozen=True)
class FeedForwardNet:
    """`steps`: each a Dense layer followed by an activation ("", "relu" or "tanh"). Rows theta are [n, P]."""

    steps: tuple[tuple[Dense, str], ...]
    flattens: bool  # the first layer is Flatten; without it examples must be vectors
    objective: Objective = CROSS_ENTROPY

    # Numbers of parameters up to which clients train faster together, and faster still in compiled loops.
    stacks_up_to = compiles_up_to = inf

    @classmethod
    def from_module(cls, module: nn.Module, objective: Objective = CROSS_ENTROPY) -> FeedForwardNet | None:
        """The network of the module, or None if it is made of anything else."""
        chain = chain_of(module, (nn.Linear, ClientLinear, nn.ReLU, nn.Tanh, nn.Flatten, nn.Identity))
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
        return cls(tuple(steps), isinstance(chain[0], nn.Flatten), objective)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, C] for x [n, B, ...]."""
        return self._forward(self.layers_of(theta), x)[-1]

    @torch.no_grad()
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(features [n, B, d_f], logits [n, B, C]) of one forward pass."""
        values = self._forward(self.layers_of(theta), x)
        return values[-2], values[-1]

    def layers_of(self, theta: Tensor) -> list[Params]:
        """Views of theta."""
        return [dense.params_of(theta) for dense, _ in self.steps]

    def _forward(self, layers: list[Params], x: Tensor) -> list[Tensor]:
        """The input and the output of every step; the last one is the logits."""
        if not self.flattens and x.dim() != 3:
            raise ModelError(
                f"the model begins with Linear, so examples must be vectors; got shape {list(x.shape[2:])}; "
                "put nn.Flatten() first"
            )
        values = [x.flatten(2)]
        wanted, width = self.steps[0][0].inputs, values[0].shape[2]
        if width != wanted or not x.is_floating_point():
            kind = "numbers" if x.is_floating_point() else "tokens"
            raise ModelError(
                f"the model takes {wanted} numbers per example; got {width} {kind} (shape {list(x.shape[2:])})"
            )
        for layer, (_, activation) in zip(layers, self.steps, strict=True):
            below, w, b = values[-1], layer.weight_t, layer.bias_row
            h = torch.bmm(below, w) if b is None else torch.baddbmm(b, below, w)
            if activation == "relu":
                h = h.relu_()
            elif activation == "tanh":
                h = h.tanh_()
            values.append(h)
        return values

    def _outer_gradients(
        self, layers: list[Params], batch: Batch, feature_loss: FeatureLoss | None, step: DenseStep | None = None,
        lowest: int = 0,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:  # fmt: skip
        """Yield (number of the layer, delta at its output, its input) from the last layer to the `lowest`. The consumer
        may overwrite a layer's weights when it has it in hand: what lies below is already propagated."""
        values = self._forward(layers, batch.x)
        delta, at_features = top_deltas(self.objective, feature_loss, values[-2], values[-1], batch, step)
        for number in range(len(self.steps) - 1, lowest, -1):
            below = torch.bmm(delta, layers[number].weight)
            if at_features is not None and number == len(self.steps) - 1:
                below += at_features
            activation, output = self.steps[number - 1][1], values[number]
            if activation == "relu":
                relu_backward_(below, output)
            elif activation == "tanh":
                below = below.mul_(1 - output * output)
            yield number, delta, values[number]
            delta = below
        yield lowest, delta, values[lowest]

    @torch.no_grad()
    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        """[n, P] gradient of sum_b weight_b * loss_b for every row, with the deltas of the feature loss."""
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        slots = self.layers_of(out)
        for number, delta, x in self._outer_gradients(self.layers_of(theta), batch, feature_loss):
            write_gradient(slots[number], delta, x)
        return out

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place, without storing the gradient."""
        proximal = None if terms.proximal is None else (terms.proximal[0], self.layers_of(terms.proximal[1]))
        self.step_(self.layers_of(theta), batch, lr, proximal, terms.feature_loss)

    def descent(self, theta: Tensor, steps: int, terms: Terms, mask: Tensor | None) -> Descent | None:
        """A loop of up to `steps` such steps, of all columns or of mask [P]; None if that needs all gradients."""
        if mask is None:
            return LayerwiseDescent(self, theta, steps, terms)
        layers = self.layers_of(mask[None])
        trained = tuple(bool(layer.weight.any()) for layer in layers)
        for layer, is_trained in zip(layers, trained, strict=True):
            parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
            if any(bool((part != is_trained).any()) for part in parts):
                return None
        return LayerwiseDescent(self, theta, steps, terms, trained) if any(trained) else None

    @torch.no_grad()
    def step_(
        self, layers: list[Params], batch: Batch, lr: float | Tensor,
        proximal: tuple[float | Tensor, list[Params]] | None = None, feature_loss: FeatureLoss | None = None,
        trained: tuple[bool, ...] | None = None,
    ) -> None:  # fmt: skip
        """A step on layers, or on those that are trained."""
        lam, center = (None, None) if proximal is None else proximal
        step = DenseStep(lr, lam, layers[0].weight.dtype)
        lowest = 0 if trained is None else trained.index(True)
        for number, delta, x in self._outer_gradients(layers, batch, feature_loss, step, lowest):
            if trained is None or trained[number]:
                step.apply_(layers[number], delta, x, None if center is None else center[number])

    @torch.no_grad()
    def example_norms(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        """[n, B]: a dense layer's gradient is an outer product of delta and input, so its norm is the product of
        theirs (Goodfellow 2015) and the gradient itself is never formed."""
        ones = torch.ones(batch.y.shape, dtype=theta.dtype, device=theta.device)
        square, batch = torch.zeros_like(ones), replace(batch, weight=ones)
        for number, delta, x in self._outer_gradients(self.layers_of(theta), batch, feature_loss):
            below = x.square().sum(-1)
            square += delta.square().sum(-1) * (below if self.steps[number][0].bias is None else below + 1)
        return square.sqrt_()
