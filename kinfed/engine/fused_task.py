"""Dense networks in compiled loops: one call, without the interpreter's lock, takes all local steps of some clients.

Networks are those of kinfed.engine.dense, whose torch code serves where a cut changes the loss, and is the oracle in
tests. Each client is trained by itself: its numbers depend neither on the clients beside it nor on the number of
threads, bit for bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kinfed.data.batches import Batch, Batches, LocalTraining, Split
from kinfed.data.features import Features
from kinfed.engine.base import Score
from kinfed.engine.cut import Cut
from kinfed.engine.dense import FeedForwardNet
from kinfed.engine.descent import Descent, Pull, StepwiseDescent
from kinfed.engine.objective import Objective
from kinfed.engine.stacked_net import StackedNet
from kinfed.engine.stacked_task import StackedTask
from kinfed.errors import ModelError

SCORED_TOGETHER = 48  # examples of a client: their activations stay in the cache, and tiles of three rows are full

_ACTIVATIONS = {"": 0, "relu": 1, "tanh": 2}  # as kinfed.engine.fused_steps numbers them
_KINDS = {"sgd": 1, "adam": 2, "adamw": 3}
_PLAIN = 0
_NO_RULE = np.zeros(8)
_NOWHERE = (0, 0)
_NO_WEIGHTS = np.zeros(0, np.float32)


def is_installed() -> bool:
    """Whether numba, which compiles, is there."""
    return importlib.util.find_spec("numba") is not None


def compiles(net: StackedNet | None, device: torch.device | str, objective: Objective) -> bool:
    """Whether there are compiled loops for such a network on this device."""
    return isinstance(net, FeedForwardNet) and torch.device(device).type == "cpu" and objective.classifies


class FusedTask(StackedTask):
    backend = "fused"

    def _prepare(self) -> None:
        super()._prepare()
        if not isinstance(self.net, FeedForwardNet):
            raise ModelError("the fused path takes chains of Flatten, Linear, ReLU and Tanh only")
        if not self.objective.classifies:
            raise ModelError(
                f"the fused path knows the cross-entropy; use backend = stacked with loss {self.objective.name}"
            )
        if self.device.type != "cpu":
            raise ModelError(f"the fused path computes on the processor; use backend = stacked on {self.device}")
        if not is_installed():
            raise ModelError("backend = fused needs numba: pip install 'kinfed[fast]', or use backend = stacked")
        self._layers = [dense for dense, _ in self.net.steps]
        outputs = [dense.outputs for dense in self._layers]
        self._table = np.array(
            [
                (d.inputs, d.outputs, d.weight, -1 if d.bias is None else d.bias, _ACTIVATIONS[act], sum(outputs[:i]))
                for i, (d, act) in enumerate(self.net.steps)
            ],
            dtype=np.int64,
        )
        self._outputs_in_all, self._widest = sum(outputs), max(outputs)
        self._all_train = np.ones((len(outputs), 2), dtype=np.int64)

    def runs_whole_loops(self, batches: Batches) -> bool:
        training = batches.training
        return training.augment is None and not training.poisson and self._reads(batches.split.features)

    def train_(
        self,
        theta: Tensor,
        batches: Batches,
        rate: float,
        pull: Pull | None,
        drift: Tensor | None,
        mask: Tensor | None,
        moments: Mapping[str, Tensor],
    ) -> None:
        split, training, n = batches.split, batches.training, len(theta)
        lam, center = (0.0, None) if pull is None else (pull[0], _readable(pull[1]))
        drift = _readable(drift)
        windows = batches.windows()
        trains, whole_layers = self._trained_layers(mask)
        plain = training.is_plain and whole_layers
        work = _WorkMemory(self, min(training.batch, int(split.count.max()) if n else 0), with_inputs=True)
        columns = np.ones(self.num_params, np.uint8) if mask is None else mask.numpy().astype(np.uint8)
        gradient = np.empty(0 if plain else self.num_params, np.float32)
        first = moments.get("velocity", moments.get("first"))
        taken = moments.get("steps", torch.zeros(n))
        _compiled("train")(
            self._table, trains, *_rows(theta), *_source(split.features, split.labels),
            split.rows.numpy(), windows.start, windows.count, batches.steps.numpy(), windows.order, windows.offset,
            _NO_WEIGHTS if split.weights is None else split.weights.numpy(), training.batch, windows.by_epoch,
            _each(rate, n), _each(lam, n), *_rows(center), *_rows(drift), _rule(training, plain),
            columns, *_rows(first), *_rows(moments.get("second")), taken.numpy(), gradient.ctypes.data,
            *work.addresses,
        )  # fmt: skip

    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        if cut is not None or not self._fits(theta, batch):
            return super().grad(theta, batch, cut)
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        self._step(theta, batch, 1, 0.0, None, out)
        return out

    def descend_(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None, cut: Cut | None = None
    ) -> None:
        if cut is not None or not self._fits(theta, batch):
            super().descend_(theta, batch, lr, pull, cut)
        else:
            self._step(theta, batch, 1, lr, pull, None)

    def descend_often_(self, theta: Tensor, batch: Batch, times: int, lr: float | Tensor, pull: Pull | None) -> None:
        if self._fits(theta, batch):
            self._step(theta, batch, times, lr, pull, None)
        else:
            super().descend_often_(theta, batch, times, lr, pull)

    def descent(
        self,
        theta: Tensor,
        steps: int,
        pull: Pull | None = None,
        drift: Tensor | None = None,
        cut: Cut | None = None,
    ) -> Descent:
        if cut is not None:
            return super().descent(theta, steps, pull, drift, cut)
        return StepwiseDescent(self.descend_, theta, pull, drift)

    def score(self, theta: Tensor, part: Split) -> Score:
        n = len(part.count)
        if not self._reads(part.features) or theta.dtype != torch.float32 or theta.stride(1) != 1 or not n:
            return super().score(theta, part)
        correct, loss = np.zeros(n), np.zeros(n)
        work = _WorkMemory(self, min(SCORED_TOGETHER, int(part.count.max())), with_inputs=True)
        _compiled("score")(
            self._table, self._all_train, *_rows(theta), *_source(part.features, part.labels),
            part.rows.numpy(), part.start.numpy(), part.count.numpy(), work.width, correct, loss,
            *work.addresses,
        )  # fmt: skip
        return Score(torch.from_numpy(correct), torch.from_numpy(loss), part.count)

    def _step(
        self, theta: Tensor, batch: Batch, times: int, lr: float | Tensor, pull: Pull | None, out: Tensor | None
    ) -> None:
        x, n = batch.x.contiguous(), len(theta)
        lam, center = (0.0, None) if pull is None else (pull[0], _readable(pull[1]))
        work = _WorkMemory(self, batch.y.shape[1], with_inputs=False)
        _compiled("step")(
            self._table, self._all_train, *_rows(theta), x.data_ptr(), x[0].numel(), batch.y.contiguous().numpy(),
            batch.weight.contiguous().numpy(), times, _each(lr, n), _each(lam, n), *_rows(center), *_NOWHERE, _NO_RULE,
            *_rows(out), self.num_params, *work.addresses[1:],
        )  # fmt: skip

    def _reads(self, features: Features) -> bool:
        """Whether compiled loops can read these examples where they are."""
        raw = features.raw
        return (
            type(features) is Features  # others look up their examples in a way of their own
            and raw.dtype in (torch.uint8, torch.float32)
            and features.vectors is None
            and raw.is_contiguous()
            and self._takes(tuple(raw.shape[1:]))
        )

    def _fits(self, theta: Tensor, batch: Batch) -> bool:
        """Whether the compiled step takes these; the torch path says what is wrong with others."""
        return (
            theta.dtype == batch.x.dtype == batch.weight.dtype == torch.float32
            and theta.stride(1) == 1
            and len(theta) > 0
            and self._takes(tuple(batch.x.shape[2:]))
        )

    def _takes(self, shape: tuple[int, ...]) -> bool:
        assert isinstance(self.net, FeedForwardNet)
        return int(np.prod(shape)) == self._layers[0].inputs and (self.net.flattens or len(shape) == 1)

    def _trained_layers(self, mask: Tensor | None) -> tuple[np.ndarray, bool]:
        """[layers, 2] whether weights and biases are trained, and whether the mask says all or nothing of each."""
        if mask is None:
            return self._all_train, True
        trains, whole = np.zeros_like(self._all_train), True
        for number, dense in enumerate(self._layers):
            weight = mask[dense.weight : dense.weight + dense.inputs * dense.outputs]
            bias = mask[:0] if dense.bias is None else mask[dense.bias : dense.bias + dense.outputs]
            for column, part in enumerate((weight, bias)):
                trains[number, column] = bool(part.any())
                whole &= bool(part.all()) or not bool(part.any())
        return trains, whole


class _WorkMemory:
    """Of one call: a batch of `width` examples and what the layers make of it."""

    def __init__(self, task: FusedTask, width: int, *, with_inputs: bool) -> None:
        self.width = max(width, 1)
        inputs = task._layers[0].inputs if with_inputs else 0
        sizes = [self.width * size for size in (inputs, task._outputs_in_all, task._widest, task._widest)]
        self._numbers = np.empty(sum(sizes), np.float32)
        begins = np.cumsum([0, *sizes[:-1]])
        y, weight = np.empty(self.width, np.int64), np.empty(self.width, np.float32)
        self.addresses: tuple[Any, ...] = (*(self._numbers.ctypes.data + 4 * int(b) for b in begins), y, weight)


def _compiled(name: str) -> Callable[..., None]:
    from kinfed.engine.fused_kernels import compiled_kernel  # numba is optional

    return compiled_kernel(name)


def _readable(rows: Tensor | None) -> Tensor | None:
    """Rows [n, P] of float32 whose numbers lie side by side; one for all clients stays one."""
    if rows is None or (rows.dtype == torch.float32 and rows.stride(1) == 1):
        return rows
    one_for_all = rows.stride(0) == 0
    dense = (rows[:1] if one_for_all else rows).to(torch.float32).contiguous()
    return dense.expand_as(rows) if one_for_all else dense


def _rows(rows: Tensor | None) -> tuple[int, int]:
    """Address, and numbers from row to row; a broadcast row is read again and again. The caller holds the tensor."""
    return _NOWHERE if rows is None else (rows.data_ptr(), rows.stride(0))


def _source(features: Features, labels: Tensor) -> tuple[Any, ...]:
    raw = features.raw
    mean, factor = features.standardization()
    return raw.data_ptr(), raw.dtype == torch.uint8, mean, factor, labels.numpy()


def _each(value: float | Tensor, n: int) -> np.ndarray:
    """[n] float64 of what is a number for all clients, or one for each."""
    return value.to(torch.float64).contiguous().numpy() if isinstance(value, Tensor) else np.full(n, float(value))


def _rule(training: LocalTraining, plain: bool) -> np.ndarray:
    kind = _PLAIN if plain else _KINDS[training.optimizer]
    clip = training.largest_gradient or 0.0
    return np.array(
        [kind, training.weight_decay, training.momentum, training.nesterov, clip, *training.betas, training.eps], float
    )
