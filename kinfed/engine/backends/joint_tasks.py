"""Many clients at once: stacked, by hand, for dense layers, LSTM, GRU; by torch.func batched, for modules whose trained
parameters are adapters and linear layers, and vmap, for small modules of any kind.

Batched, the examples of n clients go through the module as one batch (kinfed.engine.contract.linear). Worth it where a
client's step is too small to fill the processor: 1.3 to 2 times as fast as one client after the other below about 128
positions per client and step, and no faster above.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kinfed.data import Batch, Packing
from kinfed.engine.backends.dense import FeedForwardNet
from kinfed.engine.backends.recurrent import RecurrentNet
from kinfed.engine.contract.descent import PLAIN, Descent, Terms
from kinfed.engine.contract.feature_loss import FeatureLoss, answer, on_rows, pulled_back
from kinfed.engine.contract.head import HeadProbe
from kinfed.engine.contract.linear import runs_batched
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.rows.keyed_random import drops
from kinfed.engine.rows.layout import still_buffers
from kinfed.engine.rows.module_task import Build, ModuleTask, example_shape_in_errors
from kinfed.errors import ModelError

CLIENTS_AT_ONCE = 20  # more gain nothing, and the memory for activations grows with them
FEW_POSITIONS = 128  # of a client's step, below which batched is faster than rows
StackedNet = FeedForwardNet | RecurrentNet


class StackedTask(ModuleTask):
    backend = "stacked"

    def __init__(
        self, build: Build, device: torch.device | str = "cpu", *, net: StackedNet | None = None, **others: Any
    ) -> None:
        """`net` is that of the module, if it exists already."""
        self._known_net = net
        super().__init__(build, device, **others)

    def _prepare(self) -> None:
        net = self._known_net or (stacked_net(self.module, self.objective) if self.is_plain else None)
        if net is None:
            raise ModelError(
                "the stacked path takes chains of Flatten, Linear, ReLU and Tanh, or LSTM or GRU (on nn.Embedding), "
                "its last output and Linear"
            )
        self.net = net

    def with_head(self, name: str) -> Self:
        task = super().with_head(name)
        if task.head.dense != self.head.dense:
            raise ModelError(f"the model's output is that of layer {self.head.name!r}, not of {name!r}")
        return task

    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net.features_and_logits(theta, x)

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        return self.net.grad(theta, batch, feature_loss)

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        self.net.take_step_(theta, batch, lr, terms)

    def descent(self, theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        if isinstance(self.net, FeedForwardNet):
            return self.net.descent(theta, steps, terms, mask)
        return super().descent(theta, steps, terms, mask)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.net.logits(theta, x)

    def example_norms(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        if isinstance(self.net, FeedForwardNet):
            return self.net.example_norms(theta, batch, feature_loss)
        return super().example_norms(theta, batch, feature_loss)


def stacked_net(module: nn.Module, objective: Objective = CROSS_ENTROPY) -> StackedNet | None:
    """The hand-written network of many clients at once, if one fits this module."""
    return FeedForwardNet.from_module(module, objective) or RecurrentNet.from_module(module, objective)


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
            phi, z = self._cut_call(named, batch.x, True, feature_loss is not None)
            losses = self.objective.losses(z, batch.y, batch.weight).flatten()
            deltas = answer(feature_loss, phi.detach(), z.detach(), batch)
            grads = pulled_back(losses, batch.weight.flatten(), phi, z, deltas, list(named.values()))
        self._working_copy(training=True).check_still()
        for slot, g in zip(self.slots, grads, strict=True):
            out[:, slot.start : slot.stop] = g.flatten(1)

    def _cut_call(
        self, named: dict[str, Tensor], x: Tensor, training: bool, with_features: bool
    ) -> tuple[Tensor, Tensor]:
        """The features [n, B, d_f] (the logits without `with_features`), and the logits [n, B, C]."""
        if not with_features:
            z = self._flat_call(named, x, training=training).view(*x.shape[:2], -1)
            return z, z
        with HeadProbe(self._working_copy(training=training).module, self.head.name) as probe:
            flat = self._flat_call(named, x, training=training)
        return probe.features(flat).view(*x.shape[:2], -1), flat.view(*x.shape[:2], -1)

    @torch.no_grad()
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._in_parts(theta, x, with_features=True)

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._in_parts(theta, x, with_features=False)[1]

    def _in_parts(self, theta: Tensor, x: Tensor, *, with_features: bool) -> tuple[Tensor, Tensor]:
        parts = zip(torch.split(theta, CLIENTS_AT_ONCE), torch.split(x, CLIENTS_AT_ONCE), strict=True)
        pairs = [self._cut_call(self.unflatten(rows), some, False, with_features) for rows, some in parts]
        phi, z = zip(*pairs, strict=True)
        return (torch.cat(phi) if with_features else phi[0]), torch.cat(z)


def few_positions(example: Tensor, batch: int, packing: Packing | None = None) -> bool:
    """Whether a step of `batch` such examples [B, ...] is too small to fill the processor: tokens [T] and activations
    [T, D] have T positions each, all others one. Of several inputs the one with most positions counts."""
    if packing is not None:
        inputs = packing.unpack(example)
        return all(few_positions(one, batch) for one in (inputs.values() if isinstance(inputs, dict) else inputs))
    is_sequence = example.dim() == 3 or (example.dim() == 2 and not example.is_floating_point())
    return batch * (example.shape[1] if is_sequence else 1) < FEW_POSITIONS


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
        return (self.objective.losses(z, y, weight) * weight).sum()

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        if feature_loss is None:
            out: Tensor = vmap(grad(self._loss))(theta, batch.x, batch.y, batch.weight)
            return out
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            phi, z, losses = vmap(self._cut_losses)(leaf, batch.x, batch.y)
            deltas = answer(feature_loss, phi.detach(), z.detach(), batch)
            return pulled_back(losses, batch.weight, phi, z, deltas, [leaf])[0]

    def _cut_losses(self, row: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        phi, z = self._cut_call(self.unflatten(row), x, training=True)
        return phi, z, self.objective.losses(z, y)

    @torch.no_grad()
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        phi, z = vmap(lambda row, inputs: self._cut_call(self.unflatten(row), inputs, training=False))(theta, x)
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
