"""Gradients of many clients at once by torch.func, for small modules of any kind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from kinfed.data import Batch
from kinfed.engine.contract.feature_loss import FeatureLoss, answer, pulled_back
from kinfed.engine.contract.head import HeadProbe
from kinfed.engine.rows.keyed_dropout import drops
from kinfed.engine.rows.layout import still_buffers
from kinfed.engine.rows.module_task import ModuleTask, example_shape_in_errors
from kinfed.errors import ModelError

_HINT = '; if it works for one client alone, choose backend="rows"'


class VmapTask(ModuleTask):
    """Modules without running statistics and random operations: a chunk of clients would share them."""

    backend = "vmap"

    def _prepare(self) -> None:
        if self.layout.has_statistics or still_buffers(self.module) or drops(self.module):
            raise ModelError(
                "the vmap path takes no models with running statistics, other float buffers that state_dict holds, or "
                'dropout; use backend="rows" or "auto"'
            )

    def _loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        z = self._call(self.unflatten(row), x, training=True)
        return (self.objective.losses(z, y) * weight).sum()

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        if feature_loss is not None:
            return self._cut_grad(theta, batch, feature_loss)
        out: Tensor = vmap(grad(self._loss))(theta, batch.x, batch.y, batch.weight)
        return out

    def _cut_losses(self, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        phi, z = self._cut_call(self.unflatten(row), x, training=True)
        return phi, z, self.objective.losses(z, y)

    def _cut_grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss) -> Tensor:
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            phi, z, losses = vmap(self._cut_losses)(leaf, batch.x, batch.y)
            deltas = answer(feature_loss, phi.detach(), z.detach(), batch)
            return pulled_back(losses, batch.weight, phi, z, deltas, [leaf])[0]

    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def cut_row(row: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self._cut_call(self.unflatten(row), inputs, training=False)

        with torch.no_grad():
            phi, z = vmap(cut_row)(theta, x)
        return phi, z

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        out: Tensor = vmap(lambda row, inputs: self._call(self.unflatten(row), inputs, training=False))(theta, x)
        return out

    def _call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        """The module's output for x [B, ...] with these parameters and statistics."""
        with example_shape_in_errors(x.shape[1:], _HINT):
            z: Tensor = functional_call(self._working_copy(training=training).module, named, (x,))
        return z

    def _cut_call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """The features and the output of `_call`."""
        with HeadProbe(self._working_copy(training=training).module, self.head.name) as probe:
            z = self._call(named, x, training=training)
        return probe.features(z), z
