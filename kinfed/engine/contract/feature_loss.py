"""Losses of a method's own, as deltas at its features and logits: body → φ → last linear layer → z.

Backpropagation is linear in the deltas that enter it at the logits z and at the features φ. A method that changes the
loss there hands in dz = ∂loss/∂z, in place of that of the task's loss, and dφ = ∂loss/∂φ for what depends on φ other
than through z; every gradient path goes on from there as it always does, and the body is never differentiated twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kinfed.data import Batch
from kinfed.engine.contract.aten_ops import pull_back
from kinfed.engine.contract.linear import DenseStep
from kinfed.engine.contract.objective import Objective, output_delta
from kinfed.errors import ModelError

Deltas = tuple[Tensor | None, Tensor | None]  # (dz, dφ); None keeps the dz of the task's loss, or adds nothing at φ
KEEP: Deltas = (None, None)
RowFeatureLoss = Callable[[Tensor, Tensor], Deltas]  # the same for one row: φ [B, d_f], z [B, C]
ClientLoss = Callable[[Tensor, Tensor, Batch, Tensor], Tensor]  # (φ, z, batch, rows) to [n]


class FeatureLoss(Protocol):
    """The hook of a method in `task.grad`, `task.descend_`, `task.descent` and `sgd`, called once per step for every
    client that takes it: with all of them together, or with some at a time."""

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        """(dz [n, B, C] in place of weight * (softmax(z) - onehot(y)), or None to keep that;
        dphi [n, B, d_f] to add, or None).

        Both contain batch.weight, which holds 1/B and the zeros of padding; learning rates are the engine's. `rows`
        [n] int64 are the positions of these clients among the rows that the caller handed in, in whatever order they
        are trained: `centers[rows]` are their own, and `centers[rows] = ...` is the way to change tensors of the
        method's own. Read phi and z, never write to them, and clone them to keep them: the engine works
        in that memory. No gradient is recorded."""


def logit_delta(z: Tensor, batch: Batch) -> Tensor:
    """[n, B, C] weight * (softmax(z) - onehot(y)), the dz of the cross-entropy at any logits. z is left as it was."""
    return output_delta(z.clone(), batch.y, batch.weight)


def cross_entropy(z: Tensor, batch: Batch) -> Tensor:
    """[n] sum_b weight_b * cross-entropy, for losses that are differentiated by `by_autograd`."""
    loss = torch.logsumexp(z, -1) - z.gather(-1, batch.y[..., None]).squeeze(-1)
    return (loss * batch.weight).sum(1)


def by_autograd(loss: ClientLoss) -> FeatureLoss:
    """The feature loss of a loss(phi, z, batch, rows) -> [n] that takes the place of the whole loss of the task;
    autograd differentiates it in phi and z, which are independent of each other here. Convenient for a first version of
    a method; deltas written by hand are cheaper."""

    def feature_loss(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        with torch.enable_grad():
            leaves = phi.detach().requires_grad_(), z.detach().requires_grad_()
            total = loss(*leaves, batch, rows)
            if total.shape != (len(phi),):
                raise ModelError(
                    f"a feature loss is one number per client, [{len(phi)}]; got shape {list(total.shape)}"
                )
            dphi, dz = torch.autograd.grad(total.sum(), leaves, allow_unused=True, materialize_grads=True)
        return dz, dphi

    return feature_loss


@dataclass(frozen=True)
class _Wrapped:
    """A feature loss that says whether it is separable; perhaps for some of its rows: row i is row positions[i]."""

    feature_loss: FeatureLoss
    is_separable: bool
    positions: Tensor | None = None  # [n] int64

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        return self.feature_loss(phi, z, batch, rows if self.positions is None else self.positions[rows])


def separable(feature_loss: FeatureLoss) -> FeatureLoss:
    """Declare that the deltas of an example depend on no other example of the client, and that the loss changes
    nothing. Only such a loss can be clipped example by example: private training refuses others."""
    return _Wrapped(feature_loss, True)


def is_separable(feature_loss: FeatureLoss) -> bool:
    """Whether the loss was declared so, by `separable` or by `is_separable = True` in its class."""
    return bool(getattr(feature_loss, "is_separable", False))


def on_rows(feature_loss: FeatureLoss | None, positions: Tensor) -> FeatureLoss | None:
    """The feature loss for theta[positions], by a caller who hands in some of the rows, or all in another order."""
    return None if feature_loss is None else _Wrapped(feature_loss, is_separable(feature_loss), positions)


def answer(
    feature_loss: FeatureLoss | None, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor | None = None
) -> Deltas:
    """The deltas of the feature loss for these rows, or all in order. A wrong shape would be broadcast: an error."""
    if feature_loss is None:
        return None, None
    try:
        with torch.no_grad():
            dz, dphi = feature_loss(phi, z, batch, torch.arange(len(phi)) if rows is None else rows)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # or it would be taken for one of the model
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"the feature loss fails on features {list(phi.shape)} and logits {list(z.shape)}: {reason}"
        ) from error
    return _like(z, dz, "dz"), _like(phi, dphi, "dphi")


def _like(value: Tensor, delta: Tensor | None, name: str) -> Tensor | None:
    if delta is None:
        return None
    if delta.shape != value.shape:
        raise ModelError(f"{name} of a feature loss must have the shape {list(value.shape)}; got {list(delta.shape)}")
    return delta.detach().to(value.dtype)


def of_row(feature_loss: FeatureLoss, batch: Batch, row: int, x: Tensor, y: Tensor, weight: Tensor) -> RowFeatureLoss:
    """The feature loss for one row of the batch, with its examples x [B, ...], y and weight [B], perhaps unpadded."""
    one = replace(batch.rows(slice(row, row + 1)), x=x[None], y=y[None], weight=weight[None])

    def row_loss(phi: Tensor, z: Tensor) -> Deltas:
        dz, dphi = answer(feature_loss, phi[None], z[None], one, torch.tensor([row]))
        return None if dz is None else dz[0], None if dphi is None else dphi[0]

    return row_loss


def top_deltas(
    objective: Objective, feature_loss: FeatureLoss | None, phi: Tensor, z: Tensor, batch: Batch,
    step: DenseStep | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(delta at the logits, delta to add at the features) with which a backward pass by hand begins. Overwrites z."""
    dz, dphi = answer(feature_loss, phi, z, batch)
    if step is None:
        return objective.delta(z, batch.y, batch.weight) if dz is None else dz, dphi
    top = objective.delta(z, batch.y, step.example_weight(batch.weight)) if dz is None else step.scaled(dz)
    return top, None if dphi is None else step.scaled(dphi)


def pulled_back(
    losses: Tensor, weight: Tensor, phi: Tensor, z: Tensor, deltas: Deltas, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of the parameters by autograd from phi, z and the task's losses of examples, which count (by `weight`)
    only if no dz is given. Weights enter here and not in the graph: a product and a sum less, each way."""
    dz, dphi = deltas
    outputs = [(losses, weight) if dz is None else (z, dz)]
    if dphi is not None and phi.requires_grad:  # the input of a network of one layer does not
        outputs.append((phi, dphi))
    tops, below = zip(*outputs, strict=True)
    return pull_back(tops, below, parameters)


def weighing_ones(feature_loss: FeatureLoss) -> FeatureLoss:
    """The same feature loss, called with weights of one and multiplied with the true ones afterwards: its deltas are
    then proportional to each example's weight, whatever the method does with weights."""

    def weighted(phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        dz, dphi = feature_loss(phi, z, replace(batch, weight=torch.ones_like(batch.weight)), rows)
        weight = batch.weight[..., None]
        return None if dz is None else dz * weight, None if dphi is None else dphi * weight

    return weighted


def refuse_feature_loss(feature_loss: FeatureLoss | None, kind: str) -> None:
    """Refuse a feature loss, for tasks that have no single last linear layer."""
    if feature_loss is not None:
        raise ModelError(f"a loss at features or logits needs a network that ends in one nn.Linear; this is {kind}")
