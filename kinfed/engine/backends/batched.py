"""Many clients in one forward pass, for modules whose trained parameters are adapters and linear layers.

The examples of n clients go through the module as one batch (kinfed.engine.contract.linear). Worth it where a client's
step is too small to fill the processor: 1.3 to 2 times as fast as one client after the other below about 128 positions
per client and step, and no faster above.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from kinfed.data import Batch
from kinfed.engine.contract.feature_loss import FeatureLoss, answer, on_rows, pulled_back
from kinfed.engine.contract.head import HeadProbe
from kinfed.engine.contract.linear import runs_batched
from kinfed.engine.rows.module_task import ModuleTask, example_shape_in_errors
from kinfed.errors import ModelError

CLIENTS_AT_ONCE = 20  # more gain nothing, and the memory for activations grows with them
FEW_POSITIONS = 128  # of a client's step, below which batched is faster than rows


class BatchedTask(ModuleTask):
    backend = "batched"

    def _prepare(self) -> None:
        if not runs_batched(self.module):
            raise ModelError(
                "the batched path takes modules in which only linear layers of kinfed.lora are trained, without "
                'dropout and running statistics; use backend="rows" or "auto"'
            )

    def _flat_call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        """[n * B, C] for parameters [n, ...] and examples [n, B, ...]."""
        module = self._working_copy(training=training).module
        with example_shape_in_errors(x.shape[2:]):
            z: Tensor = functional_call(module, named, (x.flatten(0, 1),))
        return z

    def _stacked_call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        """[n, B, C]."""
        return self._flat_call(named, x, training=training).view(*x.shape[:2], -1)

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        for begin in range(0, len(theta), CLIENTS_AT_ONCE):
            rows = slice(begin, min(begin + CLIENTS_AT_ONCE, len(theta)))
            some = None if feature_loss is None else on_rows(feature_loss, torch.arange(rows.start, rows.stop))
            self._write_grad(out[rows], theta[rows], batch.rows(rows), some)
        return out

    def _write_grad(self, out: Tensor, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None) -> None:
        named = {name: value.detach().requires_grad_() for name, value in self.unflatten(theta).items()}
        with torch.enable_grad():
            phi, z = self._cut_call(named, batch.x, training=True, with_features=feature_loss is not None)
            losses = self.objective.losses(z, batch.y).flatten()
            deltas = answer(feature_loss, phi.detach(), z.detach(), batch)
            grads = pulled_back(losses, batch.weight.flatten(), phi, z, deltas, list(named.values()))
        self._working_copy(training=True).check_still()
        for slot, g in zip(self.slots, grads, strict=True):
            out[:, slot.start : slot.stop] = g.flatten(1)

    def _cut_call(
        self, named: dict[str, Tensor], x: Tensor, *, training: bool, with_features: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The features [n, B, d_f] (the logits without `with_features`), and the logits [n, B, C]."""
        if not with_features:
            z = self._stacked_call(named, x, training=training)
            return z, z
        with HeadProbe(self._working_copy(training=training).module, self.head.name) as probe:
            flat = self._flat_call(named, x, training=training)
        return probe.features(flat).view(*x.shape[:2], -1), flat.view(*x.shape[:2], -1)

    @torch.no_grad()
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(torch.split(theta, CLIENTS_AT_ONCE), torch.split(x, CLIENTS_AT_ONCE), strict=True)
        pairs = [self._cut_call(self.unflatten(rows), some, training=False) for rows, some in parts]
        phi, z = zip(*pairs, strict=True)
        return torch.cat(phi), torch.cat(z)

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        parts = zip(torch.split(theta, CLIENTS_AT_ONCE), torch.split(x, CLIENTS_AT_ONCE), strict=True)
        return torch.cat([self._stacked_call(self.unflatten(row), some, training=False) for row, some in parts])


def few_positions(example: Tensor, batch: int) -> bool:
    """Whether a step of `batch` such examples [B, ...] is too small to fill the processor: tokens [T] and activations
    [T, D] have T positions each, all others one."""
    is_sequence = example.dim() == 3 or (example.dim() == 2 and not example.is_floating_point())
    return batch * (example.shape[1] if is_sequence else 1) < FEW_POSITIONS
