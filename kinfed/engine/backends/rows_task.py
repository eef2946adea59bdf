"""Gradients of one client after the other: by hand for chains of convolutions, by autograd for any other module."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress
from typing import TypeVar

import torch
from torch import Tensor, nn

from kinfed.data import Batch
from kinfed.engine.backends.cnn import ConvolutionalNet, GradientTarget, subsamples
from kinfed.engine.contract.columns import whole_parameters
from kinfed.engine.contract.descent import PLAIN, Descent, GradientPieces, StepwiseDescent, Terms
from kinfed.engine.contract.feature_loss import KEEP, FeatureLoss, of_row, pulled_back
from kinfed.engine.contract.head import HeadProbe
from kinfed.engine.rows.keyed_random import KeyedDraws
from kinfed.engine.rows.layout import WorkingCopy
from kinfed.engine.rows.module_task import ModuleTask, example_shape_in_errors

Part = tuple[bool, ...]  # of every trainable parameter, whether it is trained
Item = TypeVar("Item")

MEMORY_BOUNDARY = 64  # bytes, at a multiple of which torch's memory begins


class RowsTask(ModuleTask):
    backend = "rows"
    one_row_at_a_time = True

    def _prepare(self) -> None:
        # Channels last is the layout in which the CPU's convolutions and pooling run fastest. Modules with a forward
        # of their own keep the usual one: it may call view(), which the other layout does not allow. Nor is it for
        # resnet18 and mobilenet: they would be a tenth faster, but where normalization magnifies rounding, as in a
        # residual network on few images, twenty steps would differ by 0.02 from those of plain torch.
        self._channels_last = all(
            type(m).__module__.startswith("torch.nn.") and not subsamples(m) for m in self.module.modules()
        )
        self._drew: bool | None = None  # whether any operation did so far, besides Dropout layers; None: not seen yet
        self.net = ConvolutionalNet.from_module(self.module, self.objective) if self.is_plain else None
        self._parameters = [slot for slot in self.slots if slot.trainable]
        self._has_dropout = any(type(m) is nn.Dropout and m.p > 0 for m in self.module.modules())

    def _forward(self, working: WorkingCopy, x: Tensor) -> Tensor:
        """The output for x [B, ...] of the row to which the working copy is bound."""
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with example_shape_in_errors(x.shape[1:]):
            z: Tensor = working.module(x)
        return z

    def _training_forward(self, working: WorkingCopy, x: Tensor, batch: Batch, i: int) -> tuple[Tensor, bool]:
        """The output of a training forward, with the draws of row i, and whether operations drew."""
        working.draws.begin(batch, i)
        with KeyedDraws(working.draws) as caught:
            z = self._forward(working, x)
        return z, bool(caught.operations)

    def _row_grads(
        self, row: Tensor, batch: Batch, i: int, *, moving: bool, feature_loss: FeatureLoss | None = None,
        part: Part | None = None,
    ) -> Sequence[Tensor]:  # fmt: skip
        """The gradient of each trainable parameter, or of those of `part`, at `row` [P], on row i of the batch;
        `moving`: the row's running statistics move in place. A feature loss sees the examples that the model sees."""
        x, y, weight = batch.x[i], batch.y[i], batch.weight[i]
        if y.shape[0] == 1 or (batch.may_pad and not bool(weight.all())):
            # Padding must not enter the statistics, nor shift draws, nor change the last bit of a sum. Copies have the
            # strides that a single example gets without padding, too: products of torch go by them, to the last bit.
            present = weight > 0
            x, y, weight = x[present], y[present], weight[present]
        if not y.shape[0]:
            return [row.new_zeros(slot.shape) for slot in _of_part(self._parameters, part)]
        working = self._working_copy(training=True)
        # Products of single examples depend to the last bit on where in memory the weights begin. A row that trains
        # alone begins at such a boundary, as all memory of torch; so must a row among others.
        working.bind(row if row.data_ptr() % MEMORY_BOUNDARY == 0 else row.clone(), moving=moving)
        first = self._drew is None
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            if feature_loss is None:
                z, drew = self._training_forward(working, x, batch, i)
            else:
                with HeadProbe(working.module, self.head.name) as probe:
                    z, drew = self._training_forward(working, x, batch, i)
            losses = self.objective.losses(z, y, weight)
            phi, deltas = z, KEEP
            if feature_loss is not None:
                phi = probe.features(z)
                deltas = of_row(feature_loss, batch, i, x, y, weight)(phi.detach(), z.detach())
            with KeyedDraws(None) if first else nullcontext():
                grads = pulled_back(losses, weight, phi, z, deltas, _of_part(working.leaves, part))
        working.check_still()
        if moving:
            working.store_statistics(row)
        self._drew = drew or bool(self._drew)  # it may draw in some passes only
        return grads

    @property
    def draws_randomly(self) -> bool | None:
        """Whether training draws random numbers; None as long as no training step has shown it."""
        if self._has_dropout:
            return True
        return False if self.net is not None else self._drew

    @property
    def has_example_gradients(self) -> bool:
        return super().has_example_gradients and not self.draws_randomly

    def _add_gradient(
        self, net: ConvolutionalNet, i: int, theta: Tensor, batch: Batch, target: GradientTarget,
        feature_loss: FeatureLoss | None,
    ) -> None:  # fmt: skip
        examples = batch.x[i], batch.y[i], batch.weight[i]
        own_loss = None if feature_loss is None else of_row(feature_loss, batch, i, *examples)
        with example_shape_in_errors(batch.x.shape[2:]):
            net.add_gradient(theta[i], *examples, target, own_loss)

    def grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        return self._grad(theta, batch, feature_loss, moving=False)

    def training_grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None = None) -> Tensor:
        return self._grad(theta, batch, feature_loss, moving=True)

    def _grad(self, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None, *, moving: bool) -> Tensor:
        if self.net is not None:
            out = torch.zeros_like(theta, memory_format=torch.contiguous_format)
            for i in range(len(theta)):
                self._add_gradient(self.net, i, theta, batch, GradientTarget(out[i], 1.0), feature_loss)
            return out
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        out[:, self.trainable.stop :] = 0.0
        for i in range(len(theta)):
            grads = self._row_grads(theta[i], batch, i, moving=moving, feature_loss=feature_loss)
            torch.cat([g.reshape(-1) for g in grads], out=out[i, self.trainable])
        return out

    def gradient_pieces(self, mask: Tensor | None) -> GradientPieces:
        """Parameter by parameter; gradients of those outside of the mask are not computed."""
        part = None if mask is None else whole_parameters(self.slots, mask)
        if self.net is not None or (mask is not None and (part is None or not any(part))):
            return super().gradient_pieces(mask)
        slots = _of_part(self._parameters, part)
        return GradientPieces([slice(slot.start, slot.stop) for slot in slots], partial(self._pieces, part))

    def _pieces(self, part: Part | None, theta: Tensor, batch: Batch, feature_loss: FeatureLoss | None) -> list[Tensor]:
        rows = [
            self._row_grads(row, batch, i, moving=True, feature_loss=feature_loss, part=part)
            for i, row in enumerate(theta.unbind())
        ]
        if len(rows) == 1:
            return [g.reshape(1, -1) for g in rows[0]]
        return [torch.stack([g.reshape(-1) for g in same]) for same in zip(*rows, strict=True)]

    @torch.no_grad()
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        working = self._working_copy(training=False)
        out = []
        for row, examples in zip(theta.unbind(), x.unbind(), strict=True):
            working.bind(row, moving=False)
            out.append(self._forward(working, examples))
        return torch.stack(out)

    @torch.no_grad()
    def features_and_logits(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        working = self._working_copy(training=False)
        features, outputs = [], []
        for row, examples in zip(theta.unbind(), x.unbind(), strict=True):
            working.bind(row, moving=False)
            with HeadProbe(working.module, self.head.name) as probe:
                z = self._forward(working, examples)
            features.append(probe.features(z))
            outputs.append(z)
        return torch.stack(features), torch.stack(outputs)

    def take_step_(self, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms) -> None:
        self._take_part_of_step_(None, True, theta, batch, lr, terms)

    def descent(self, theta: Tensor, steps: int, terms: Terms = PLAIN, mask: Tensor | None = None) -> Descent | None:
        if mask is None:
            return super().descent(theta, steps, terms)
        part, statistics = whole_parameters(self.slots, mask), mask[self.trainable.stop :]
        moving = bool(statistics.all())
        if part is None or not any(part) or (len(statistics) and bool(statistics.any()) != moving):
            return None
        return StepwiseDescent(partial(self._take_part_of_step_, part, moving), theta, terms)

    def _take_part_of_step_(
        self, part: Part | None, moving: bool, theta: Tensor, batch: Batch, lr: float | Tensor, terms: Terms
    ) -> None:
        """A step of some parameters (None: of all), with running statistics that move or stay."""
        proximal, feature_loss = terms.proximal, terms.feature_loss
        starts = None if part is None else frozenset(slot.start for slot in _of_part(self._parameters, part))
        for i in range(len(theta)):
            rate = float(lr[i]) if isinstance(lr, Tensor) else lr
            center, amount = None, 0.0
            if proximal is not None:
                lam = float(proximal[0][i]) if isinstance(proximal[0], Tensor) else proximal[0]
                center, amount = proximal[1][i], rate * lam
            if self.net is not None:
                target = GradientTarget(theta[i], -rate, center, amount, starts)
                self._add_gradient(self.net, i, theta, batch, target, feature_loss)
                continue
            row = theta[i]
            grads = self._row_grads(row, batch, i, moving=moving, feature_loss=feature_loss, part=part)
            if center is not None:
                slots = _of_part(self._parameters, part)
                for block in [self.trainable] if part is None else [slice(slot.start, slot.stop) for slot in slots]:
                    row[block].lerp_(center[block], amount)
            parameters = self._working_copy(training=True).parameters_of(row)
            torch._foreach_add_(list(_of_part(parameters, part)), list(grads), alpha=-rate)


def _of_part(parameters: Sequence[Item], part: Part | None) -> Sequence[Item]:
    """Items of the part, from items of every trainable parameter."""
    return parameters if part is None else list(compress(parameters, part))
