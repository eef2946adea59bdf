"""Models that are more than their row: a plain model, and further numbers that work at its features.

Some methods predict with a second network between features and logits, or beside the head (FedCP's gate, GPFL's valve,
the neighbours of kNN-Per). Such a personal model is a row like any other, only wider: [P + E + 1], the plain model's
columns, E numbers of its `Extension`, and a mark that says which extension it is. An extension is registered
(`kinfed.register("extension", ...)`), so that files with its mark are read (kinfed.engine.personal.personal_models).

An `ExtendedTask` also trains: the gradient of a loss in features, head and extension comes from autograd there, that of
the body from the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from kinfed.data import Batch, LocalTraining
from kinfed.engine.contract.columns import ParameterSlot
from kinfed.engine.contract.feature_loss import Deltas, cross_entropy
from kinfed.engine.contract.head import Head, HeadProbe, find_head
from kinfed.engine.contract.task import Task
from kinfed.engine.personal.mixture import WiderTask
from kinfed.engine.rows.layout import RowLayout


class Extension(Protocol):
    """The work of the further numbers of a row. Its class is registered, and made without arguments."""

    mark: int  # negative, and nobody else's: the weights of a mixture, which rows may end in too, are not

    def logits(self, phi: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor) -> Tensor:
        """z [n, B, C] of features [n, B, d_f], the head W [n, C, d_f] and b [n, C], and `extra` [n, E]; differentiable
        in all of them where a method trains it."""


# (φ [n, B, d_f], W, b, extra [n, E], batch, rows [n]) to the loss of every client, [n]
TopLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor, Batch, Tensor], Tensor]


class ExtendedTask(WiderTask):
    """Rows [n, P + E + 1]. `loss` takes the place of the cross-entropy in training."""

    backend = "extended"
    kind = "a model with a network of its own between features and logits"

    def __init__(self, task: Task, extension: Extension, width: int, loss: TopLoss | None = None) -> None:
        """`width` is E."""
        super().__init__(task)
        self.extension, self.loss = extension, loss
        P = task.num_params
        self.num_params = P + width + 1
        parts = [replace(slot, name=f"model.{slot.name}") for slot in task.slots]
        self.slots = (*parts, ParameterSlot("extra", (width + 1,), P, self.num_params))

    @property
    def head(self) -> Head:
        return replace(self.task.head, width=self.num_params)

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Views: the plain models [n, P], and their extensions [n, E]."""
        P = self.task.num_params
        return theta[:, :P], theta[:, P:-1]

    def init(self, seed: int, number: int = 0) -> Tensor:
        extra = torch.zeros(1, self.num_params - self.task.num_params - 1, device=self.device)
        return extended_rows(self.task.init(seed, number)[None], extra, self.extension)[0]

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        model, extra = self.split(theta)
        return self.extension.logits(self.task.features(model, x), *self.task.head.split(model), extra)

    def _joined(self, grad: Callable[..., Tensor], theta: Tensor, batch: Batch) -> Tensor:
        model, _ = self.split(theta)
        top = _TopGradient(self, theta, torch.zeros_like(theta))
        result = top.gradient
        result[:, : model.shape[1]] += grad(model, batch, top)  # zero at the head, of which dz = 0 says nothing
        return result

    def training_loss(self, phi: Tensor, theta: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        """[n] of rows theta whose features are φ."""
        model, extra = self.split(theta)
        weight, bias = self.task.head.split(model)
        if self.loss is not None:
            return self.loss(phi, weight, bias, extra, batch, rows)
        return cross_entropy(self.extension.logits(phi, weight, bias, extra), batch)

    def mask(self, training: LocalTraining) -> Tensor | None:
        """bool [P + E + 1]: what fine-tuning may train, where weight decay would shrink what it leaves alone (running
        statistics, the extension's mark); else None."""
        return self.trained_columns() if training.weight_decay else None

    def trained_columns(self) -> Tensor:
        """bool [P + E + 1]: trainable parameters of the model, and its extension."""
        mask = torch.zeros(self.num_params, dtype=torch.bool, device=self.device)
        mask[self.task.trainable] = True
        mask[self.task.num_params : -1] = True
        return mask

    def module_of(self, row: Tensor) -> ExtendedModule:
        """A ready module with the parameters of one row."""
        P = self.task.num_params
        return ExtendedModule(self._modules().module_of(row[:P]), row[P:].detach().clone(), self.extension).eval()


class _TopGradient:
    """The feature loss that differentiates the loss in features, head and extension, and keeps what is not the
    body's."""

    def __init__(self, task: ExtendedTask, theta: Tensor, gradient: Tensor) -> None:
        self.task, self.theta, self.gradient = task, theta, gradient
        self.top = task.head.mask.to(theta.device)
        self.top[task.task.num_params : -1] = True

    def __call__(self, phi: Tensor, z: Tensor, batch: Batch, rows: Tensor) -> Deltas:
        with torch.enable_grad():
            features = phi.detach().requires_grad_()
            theta = self.theta[rows].detach().requires_grad_()
            total = self.task.training_loss(features, theta, batch, rows).sum()
            dphi, g = torch.autograd.grad(total, (features, theta), allow_unused=True, materialize_grads=True)
        self.gradient[rows] = torch.where(self.top, g, 0.0)
        return torch.zeros_like(z), dphi


class ExtendedModule(nn.Module):
    """The plain module, whose features go through the extension. Its state dict is the module's under "model.", and
    "extra"."""

    extra: Tensor

    def __init__(self, model: nn.Module, extra: Tensor, extension: Extension) -> None:
        super().__init__()
        self.model = model
        self.extension = extension
        self.register_buffer("extra", extra)
        self._head = find_head(model, RowLayout.of(model).slots).name

    def forward(self, x: Tensor) -> Tensor:
        with HeadProbe(self.model, self._head) as probe:
            phi = probe.features(self.model(x))
        head = self.model.get_submodule(self._head)
        assert isinstance(head, nn.Linear)  # as find_head says
        bias = None if head.bias is None else head.bias[None]
        return self.extension.logits(phi[None], head.weight[None], bias, self.extra[None, :-1])[0]


def extended_rows(models: Tensor, extra: Tensor, extension: Extension) -> Tensor:
    """[n, P + E + 1] from models [n, P] and further numbers [n, E]."""
    mark = models.new_full((len(models), 1), float(extension.mark))
    return torch.cat([models, extra.to(models), mark], 1)
