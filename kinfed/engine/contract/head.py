"""The head of a model: its last linear layer, whose input are the features φ and whose output are the logits z.

The head follows from the order in which a module declares its layers, or from a name; every pass that reads features
sees whether the model's output is in fact that layer's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kinfed.data import Split
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.linear import ClientLinear, Dense
from kinfed.errors import ModelError

LINEAR = (nn.Linear, ClientLinear)  # exact types only: a subclass may compute something else


@dataclass(frozen=True)
class Head:
    """The last linear layer and its columns of a row: z = φ W' + b."""

    name: str  # of the module; "" if the model is that layer
    dense: Dense  # where W and b lie
    width: int  # P

    @property
    def inputs(self) -> int:
        """d_f, the number of features."""
        return self.dense.inputs

    @property
    def outputs(self) -> int:
        """C, the number of classes."""
        return self.dense.outputs

    @property
    def mask(self) -> Tensor:
        """bool [P]: the head's columns."""
        mask = torch.zeros(self.width, dtype=torch.bool)
        mask[self.dense.weight : self.dense.weight + self.inputs * self.outputs] = True
        if self.dense.bias is not None:
            mask[self.dense.bias : self.dense.bias + self.outputs] = True
        return mask

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        """W [n, C, d_f] and b [n, C], or None without a bias: views of theta [n, P]."""
        return self.dense.weight_of(theta), self.dense.bias_of(theta)

    def join(self, theta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, P], a new tensor: theta with the head W [n, C, d_f] (or [C, d_f] for all) and b [n, C] (or [C])."""
        if (bias is None) != (self.dense.bias is None):
            wanted = "no bias" if self.dense.bias is None else "a bias"
            raise ModelError(f"the head {self.name!r} has {wanted}; got {'none' if bias is None else 'one'}")
        joined = theta.clone(memory_format=torch.contiguous_format)
        w, b = self.split(joined)
        w.copy_(weight)
        if b is not None and bias is not None:
            b.copy_(bias)
        return joined

    def logits(self, theta: Tensor, phi: Tensor) -> Tensor:
        """z [n, B, C] of φ [n, B, d_f]."""
        return self.dense.apply(theta, phi)


def find_head(module: nn.Module, slots: Sequence[ParameterSlot], name: str | None = None) -> Head:
    """The module of that name, or else the last nn.Linear as declared."""
    every = module.named_modules(remove_duplicate=False)  # a layer that is used in two places is named for the last
    linears = {name: child for name, child in every if isinstance(child, nn.Linear) and type(child) in LINEAR}
    if name is None:
        if not linears:
            raise ModelError(
                "the model has no nn.Linear to take features from: end it in one (a 1x1 convolution as the last layer "
                "becomes nn.Flatten and nn.Linear)"
            )
        name = list(linears)[-1]
    elif name not in linears:
        raise ModelError(f"the head {name!r} is no nn.Linear of the model; those are {', '.join(linears) or 'none'}")
    layer = linears[name]
    weight = _slot_of(module, slots, layer.weight)
    bias = None if layer.bias is None else _slot_of(module, slots, layer.bias)
    if weight is None or (bias is None and layer.bias is not None):
        raise ModelError(
            f"the head {name!r} is not made of trainable parameters of its own (frozen, or computed from others); "
            "name another layer with make_task(..., head=...), or make it a plain nn.Linear"
        )
    dense = Dense(layer.in_features, layer.out_features, weight.start, None if bias is None else bias.start)
    return Head(name, dense, slots[-1].stop)


def _slot_of(module: nn.Module, slots: Sequence[ParameterSlot], parameter: Tensor) -> ParameterSlot | None:
    """A tied parameter lies where its first name says."""
    names = {id(p): name for name, p in module.named_parameters()}
    return next((slot for slot in slots if slot.trainable and slot.name == names.get(id(parameter))), None)


class HeadProbe:
    """Sees the linear layers of a module work while it is entered, and hands out what the head was given. Hooks change
    the module, so every thread needs one of its own, as `functional_call` does."""

    def __init__(self, module: nn.Module, head: str) -> None:
        self._module = module
        self._head = head
        self._hooks: list[RemovableHandle] = []
        self._last: tuple[nn.Module, Any, Tensor] | None = None  # the last layer that ran, its input and its output

    def __enter__(self) -> Self:
        linears = [child for child in self._module.modules() if type(child) in LINEAR]
        self._hooks = [layer.register_forward_hook(self._see, with_kwargs=True) for layer in linears]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        self._last = layer, inputs[0] if inputs else named["input"], output

    def features(self, z: Tensor) -> Tensor:
        """φ [B, d_f] of the pass that gave the output z, which must be the head's."""
        layer, phi, output = self._last or (None, z, None)
        if output is not z:
            raise ModelError(
                f"the model's output is not that of {self._head!r} or of another nn.Linear, so it has no features: let "
                "its forward return what the last nn.Linear gives (cross-entropy needs no softmax before it)"
            )
        if layer is not self._module.get_submodule(self._head):
            last = next(name for name, child in self._module.named_modules() if child is layer)
            raise ModelError(
                f"the model's output is that of layer {last!r}, not of {self._head!r}: make_task(..., head={last!r})"
            )
        if phi.dim() != 2:
            raise ModelError(
                f"the head {self._head!r} reads features of shape {list(phi.shape[1:])} per example; features are one "
                "vector: flatten or pool them before the head"
            )
        features: Tensor = phi
        return features


FeatureMap = Callable[[Tensor, Tensor], Tensor]  # (theta [n, P], x [n, B, ...]) to φ [n, B, d_f]


@dataclass
class ClassSums:
    """Sums of φ over a client's examples of each class (all are of one where the target is a number). Means are
    total / count, and the scatter within classes is
    scatter − Σ_c total_c total_c' / count_c over the classes that a client has."""

    count: Tensor  # [n, C] int64
    total: Tensor  # [n, C, d_f] float64, Σ φ
    square: Tensor  # [n, C] float64, Σ |φ|²
    scatter: Tensor | None  # [n, d_f, d_f] float64, Σ φ φ' over all classes


@torch.no_grad()
def class_sums(
    features: FeatureMap, theta: Tensor, split: Split, inputs: int, outputs: int, with_scatter: bool
) -> ClassSums:
    """The sums for d_f = `inputs` features and C = `outputs` classes. Padding counts for nothing."""
    n = len(split.count)
    zeros = torch.zeros(n, outputs, inputs, dtype=torch.float64, device=theta.device)
    sums = ClassSums(
        torch.zeros(n, outputs, dtype=torch.int64, device=theta.device), zeros, torch.zeros_like(zeros[..., 0]),
        zeros.new_zeros(n, inputs, inputs) if with_scatter else None,
    )  # fmt: skip
    for rows, batch in split.in_order():
        valid = batch.weight > 0
        phi = features(theta[rows], batch.x)
        y = torch.zeros_like(batch.y, dtype=torch.int64) if batch.y.is_floating_point() else batch.y
        if bool((y >= outputs).any()):
            raise ModelError(f"the model has {outputs} outputs; got the label {int(y.max())}")
        # Examples are added one by one: in a product with one-hot rows, one that is not finite would reach all classes.
        row = torch.arange(len(batch), device=batch.y.device)[:, None]
        place, each = (row * outputs + y)[valid], phi[valid].to(torch.float64)
        size = len(batch) * outputs
        sums.count[rows] += torch.bincount(place, minlength=size).view(-1, outputs)
        sums.total[rows] += each.new_zeros(size, inputs).index_add_(0, place, each).view(-1, outputs, inputs)
        squares = each.square().sum(-1)
        sums.square[rows] += each.new_zeros(size).index_add_(0, place, squares).view(-1, outputs)
        if sums.scatter is not None:
            real = torch.where(valid[..., None], phi, 0.0).to(torch.float64)
            sums.scatter[rows] += torch.bmm(real.mT, real)
    return sums
