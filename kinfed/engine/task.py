"""What clients learn: a model as a flat row of parameters, its loss, and its gradient for many rows at once.

`theta [n, P]` holds one model per row. Three ways compute the same gradient, `make_task` picks per model:

  stacked  hand-written forward and backward on [n, ...]: dense layers (engine.dense), 5-9x a plain loop, and LSTM
           layers (kinfed.engine.lstm)
  rows     one row after the other: by hand for chains of convolutions (kinfed.engine.cnn), which gain nothing
           from stacking, with autograd for anything else
  vmap     torch.func on any other module

All three agree to 1e-5 and are tested against each other and against plain autograd.
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kinfed.core import rng
from kinfed.data.batches import Batch, Split
from kinfed.engine import columns
from kinfed.engine.cnn import ConvolutionalNet, Into, subsamples
from kinfed.engine.columns import ParameterSlot
from kinfed.engine.dense import StackedNet
from kinfed.engine.descent import Descent, OneByOne, OnLayers
from kinfed.engine.descent import Pull as Pull
from kinfed.engine.lstm import RecurrentNet
from kinfed.errors import ModelError


@dataclass
class Score:
    """Sums over some examples, one entry per client."""

    correct: Tensor  # [n] float64
    loss: Tensor  # [n] float64
    count: Tensor  # [n] int64


class Task(ABC):
    """The contract between algorithms and models."""

    num_params: int
    slots: tuple[ParameterSlot, ...]  # the parameters from left to right
    device: torch.device = torch.device("cpu")
    path: str = "custom"
    one_row_at_a_time: bool = False  # the pool then sends cohorts of one client to its worker threads
    classifies: bool = True  # accuracy is defined

    @abstractmethod
    def init(self, seed: int, number: int = 0) -> Tensor:
        """[P] starting point; `number` gives further independent ones."""

    @abstractmethod
    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, P] gradient of sum_b weight_b * loss_b for every row."""

    @abstractmethod
    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """[n, B, C] for theta [n, P] and x [n, B, ...]."""

    def descend_(self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None) -> None:
        """theta <- theta - lr * (grad + lam * (theta - center)), in place."""
        g = self.grad(theta, batch)
        if pull is not None:
            lam, center = pull
            lam = lam[:, None] if isinstance(lam, Tensor) else lam
            g = g + lam * (theta - center)
        theta -= (lr[:, None] if isinstance(lr, Tensor) else lr) * g

    def descent(self, theta: Tensor, steps: int, pull: Pull | None = None) -> Descent:
        """Up to `steps` such steps. A task may know a faster way than one `descend_` after the other."""
        return OneByOne(self.descend_, theta, pull)

    def losses(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B] cross-entropy of every example."""
        z = self.logits(theta, batch.x)
        return torch.logsumexp(z, -1) - z.gather(-1, batch.y[..., None]).squeeze(-1)

    def per_example_grad(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B, P] unweighted gradient of every example's own loss (differential privacy clips these)."""
        n, b = batch.y.shape
        single = Batch(
            batch.x.reshape(n * b, 1, *batch.x.shape[2:]), batch.y.reshape(n * b, 1),
            torch.ones(n * b, 1, device=theta.device), batch.ids.repeat_interleave(b), batch.round, batch.step,
        )  # fmt: skip
        rows = theta.repeat_interleave(b, 0)
        return self.grad(rows, single).reshape(n, b, -1)

    def example_norms(self, theta: Tensor, batch: Batch) -> Tensor:
        """[n, B] Euclidean norm of every example's own gradient. One example of each row at a time: there is never
        a gradient per example and parameter in memory."""
        one = torch.ones(len(batch), 1, device=theta.device)
        columns = [
            Batch(batch.x[:, b : b + 1], batch.y[:, b : b + 1], one, batch.ids, batch.round, batch.step)
            for b in range(batch.y.shape[1])
        ]
        return torch.stack([torch.linalg.vector_norm(self.grad(theta, column), dim=1) for column in columns], 1)

    @torch.no_grad()
    def score(self, theta: Tensor, part: Split) -> Score:
        """Correct predictions and summed loss of each row's model on each client's examples."""
        n = len(part.count)
        correct = torch.zeros(n, dtype=torch.float64)
        loss = torch.zeros(n, dtype=torch.float64)
        for rows, batch in part.in_order():
            z = self.logits(theta[rows], batch.x)
            nll = torch.logsumexp(z, -1) - z.gather(-1, batch.y[..., None]).squeeze(-1)
            # NaN has no largest entry; a model that gives it is never right, whatever argmax says.
            hit = (z.argmax(-1) == batch.y) & (batch.weight > 0) & torch.isfinite(nll)
            # A zero weight must hide a padded example even where its loss is not finite.
            nll = torch.where(batch.weight > 0, nll, 0.0)
            correct[rows] += hit.sum(1).to("cpu", torch.float64)
            loss[rows] += nll.sum(1).to("cpu", torch.float64)
        return Score(correct, loss, part.count)

    def mean_loss(self, theta: Tensor, part: Split) -> Tensor:
        """[n] mean loss in float64; clients without examples get NaN."""
        score = self.score(theta, part)
        return score.loss / score.count

    def layer_mask(self, patterns: tuple[str, ...]) -> Tensor:
        """bool [P]: parameters that these names or patterns choose (kinfed.engine.columns)."""
        return columns.layer_mask(self.slots, patterns)

    def layer_names(self) -> tuple[str, ...]:
        """Modules that own parameters, in the order of the forward pass as declared."""
        return columns.layer_names(self.slots)


class ModuleTask(Task):
    """A classification task around a torch module. Parameters are the module's, in its own order."""

    _hint = ""  # what to try when the module fails

    def __init__(self, build: Callable[[], nn.Module], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._build = build
        self.module = _built(build, 0).to(self.device)
        check_module(self.module)
        self.module.train()
        self._own = threading.local()
        slots, position = [], 0
        for name, parameter in self.module.named_parameters():
            slots.append(ParameterSlot(name, tuple(parameter.shape), position, position + parameter.numel()))
            position += parameter.numel()
        self.slots = tuple(slots)
        self.num_params = position
        self.start: Tensor | None = None  # [P] replaces the random start of every method (a warm start)
        self._drawn: dict[int, Tensor] = {}  # the first start of every seed: all clients of a method ask for it

    def init(self, seed: int, number: int = 0) -> Tensor:
        # Callers get a copy: one that trains it in place must not move the start of the methods after it.
        if number == 0 and self.start is not None:
            return self.start.clone()
        if number == 0 and seed in self._drawn:
            return self._drawn[seed].clone()
        module = _built(self._build, rng.numpy_seed(rng.fold(rng.root(seed, "model-init"), number)))
        drawn = self.flatten(dict(module.named_parameters())).to(self.device)
        if number == 0:
            self._drawn[seed] = drawn.clone()
        return drawn

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parameters[x.name].detach().reshape(-1).to(torch.float32) for x in self.slots])

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Named views of one row (or of rows [n, P], with a leading n)."""
        return {x.name: row[..., x.start : x.stop].reshape((*row.shape[:-1], *x.shape)) for x in self.slots}

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """What `module.load_state_dict` takes: parameters, under all their names where they are tied, and buffers."""
        first_name = {id(parameter): name for name, parameter in self.module.named_parameters()}
        every_name = self.module.named_parameters(remove_duplicate=False)
        named = self.unflatten(row)
        values = self.module.state_dict() | {name: named[first_name[id(p)]] for name, p in every_name}
        return {name: value.detach().clone() for name, value in values.items()}

    def module_of(self, row: Tensor) -> nn.Module:
        """A ready module with the parameters of one row."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(self.state_dict(row))
        return module.eval()

    def __getstate__(self) -> dict[str, Any]:
        """Tasks travel to other processes; what belongs to a thread stays."""
        return {name: value for name, value in self.__dict__.items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = threading.local()

    def _thread_module(self) -> nn.Module:
        # functional_call swaps a module's parameters while it runs, so every thread needs a module of its own.
        if not hasattr(self._own, "module"):
            self._own.module = copy.deepcopy(self.module)
        module: nn.Module = self._own.module
        return module

    def _call(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's output for x [B, ...] with these parameters."""
        with _explained(x.shape[1:], self._hint):
            z: Tensor = functional_call(self._thread_module(), named, (x,))
        return z


class StackedTask(ModuleTask):
    path = "stacked"

    def __init__(self, build: Callable[[], nn.Module], device: torch.device | str = "cpu") -> None:
        super().__init__(build, device)
        net = StackedNet.compile(self.module) or RecurrentNet.compile(self.module)
        if net is None:
            raise ModelError(
                "the stacked path takes chains of Flatten, Linear, ReLU and Tanh only, or LSTM, LastOutput and Linear"
            )
        self.net = net

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        return self.net.grad(theta, batch.x, batch.y, batch.weight)

    def descend_(self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None) -> None:
        self.net.descend_(theta, batch.x, batch.y, batch.weight, lr, pull)

    def descent(self, theta: Tensor, steps: int, pull: Pull | None = None) -> Descent:
        if isinstance(self.net, RecurrentNet):
            return super().descent(theta, steps, pull)
        return OnLayers(self.net, theta, steps, pull)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.net.forward(theta, x)

    def per_example_grad(self, theta: Tensor, batch: Batch) -> Tensor:
        return self.net.per_example_grad(theta, batch.x, batch.y)

    def example_norms(self, theta: Tensor, batch: Batch) -> Tensor:
        if isinstance(self.net, RecurrentNet):
            return super().example_norms(theta, batch)
        return self.net.example_norms(theta, batch.x, batch.y)


class RowsTask(ModuleTask):
    path = "rows"
    one_row_at_a_time = True

    def __init__(self, build: Callable[[], nn.Module], device: torch.device | str = "cpu") -> None:
        super().__init__(build, device)
        # Channels last is the layout in which the CPU's convolutions and pooling run fastest. Modules of a user keep
        # the usual one: their forward may call view(), which the other layout does not allow.
        self._channels_last = all(
            type(m).__module__.startswith("torch.nn.") and not subsamples(m) for m in self.module.modules()
        )
        self._repeats = False  # the module was seen to draw no random numbers
        self.net = ConvolutionalNet.compile(self.module)

    def _call(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self._repeats:
            return super()._call(named, x)
        with _GENERATOR:
            before = torch.get_rng_state()
            z = super()._call(named, x)
            if not torch.equal(torch.get_rng_state(), before):
                raise ModelError(
                    "the model draws from torch's global generator when it runs (dropout?), so runs would not repeat "
                    "or resume; remove that, and use weight_decay instead"
                )
        self._repeats = True
        return z

    def _row_grads(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        named = {k: v.detach().requires_grad_() for k, v in self.unflatten(row).items()}
        with torch.enable_grad():
            z = self._call(named, x)
            loss = (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()
            return torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)

    def _add_gradient(self, net: ConvolutionalNet, i: int, theta: Tensor, batch: Batch, into: Into) -> None:
        with _explained(batch.x.shape[2:]):
            net.add_gradient(theta[i], batch.x[i], batch.y[i], batch.weight[i], into)

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        if self.net is not None:
            out = torch.zeros_like(theta, memory_format=torch.contiguous_format)
            for i in range(len(theta)):
                self._add_gradient(self.net, i, theta, batch, Into(out[i], 1.0))
            return out
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        for i in range(len(theta)):
            grads = self._row_grads(theta[i], batch.x[i], batch.y[i], batch.weight[i])
            for slot, g in zip(self.slots, grads, strict=True):
                out[i, slot.start : slot.stop] = g.reshape(-1)
        return out

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([self._call(self.unflatten(theta[i]), x[i]) for i in range(len(theta))])

    def descend_(self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None) -> None:
        for i in range(len(theta)):
            rate = float(lr[i]) if isinstance(lr, Tensor) else lr
            center, amount = None, 0.0
            if pull is not None:
                lam = float(pull[0][i]) if isinstance(pull[0], Tensor) else pull[0]
                center, amount = pull[1][i], rate * lam
            if self.net is not None:
                self._add_gradient(self.net, i, theta, batch, Into(theta[i], -rate, center, amount))
                continue
            grads = self._row_grads(theta[i], batch.x[i], batch.y[i], batch.weight[i])
            if center is not None:
                theta[i].lerp_(center, amount)
            for slot, g in zip(self.slots, grads, strict=True):
                theta[i, slot.start : slot.stop].view(slot.shape).add_(g, alpha=-rate)


class VmapTask(ModuleTask):
    path = "vmap"
    _hint = '; if it works for one client alone, choose path="rows"'

    def _loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        z = self._call(self.unflatten(row), x)
        return (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        out: Tensor = vmap(grad(self._loss))(theta, batch.x, batch.y, batch.weight)
        return out

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        out: Tensor = vmap(lambda row, inputs: self._call(self.unflatten(row), inputs))(theta, x)
        return out


@contextmanager
def _explained(shape: torch.Size, hint: str = "") -> Iterator[None]:
    """An error of torch inside says on which examples the model failed, and what to try."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"the model fails on examples of shape {list(shape)}: {reason}{hint}") from error


_GENERATOR = threading.Lock()


def _built(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A module with the random numbers of `seed`. Layers draw them from torch's global generator, which is left as
    it was; the lock keeps threads that start clients at the same time from drawing each other's."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


# Parameters of an LSTM of which several still fit in the cache together. Stacking 16 small ones (hidden 32) takes half
# the time of one after the other; at 100 units they are even, and torch's own LSTM is a few percent ahead at 256.
RECURRENT_STACKS_UP_TO = 150_000
_CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_TASKS: dict[str, type[ModuleTask]] = {"stacked": StackedTask, "rows": RowsTask, "vmap": VmapTask}


def make_task(build: Callable[[], nn.Module], *, path: str = "auto", device: torch.device | str = "cpu") -> ModuleTask:
    """The task for the module that `build()` makes; `path` forces one of stacked, rows, vmap."""
    if path != "auto":
        if path not in _TASKS:
            raise ModelError(f"path is one of auto, {', '.join(_TASKS)}; got {path!r}")
        return _TASKS[path](build, device)
    module = _built(build, 0)
    check_module(module)
    small = sum(p.numel() for p in module.parameters()) <= RECURRENT_STACKS_UP_TO
    if StackedNet.compile(module) is not None or (small and RecurrentNet.compile(module) is not None):
        return StackedTask(build, device)
    if any(isinstance(m, _CONVOLVES) for m in module.modules()):
        return RowsTask(build, device)
    return VmapTask(build, device)


def check_module(module: nn.Module) -> None:
    """Refuse modules whose training cannot be right in a federation, with the replacement."""
    for name, child in module.named_modules():
        # Without running statistics an InstanceNorm treats every example by itself, which is fine.
        instance = isinstance(child, nn.modules.instancenorm._InstanceNorm)
        if isinstance(child, nn.modules.batchnorm._NormBase) and (child.track_running_stats or not instance):
            raise ModelError(
                f"layer {name!r} is {type(child).__name__}: its running statistics mix clients' data outside the "
                "messages and fail on a batch of one; replace it by nn.GroupNorm"
            )
        if _drops(child) > 0:
            raise ModelError(
                f"layer {name!r} is {type(child).__name__} with dropout: it draws from torch's global generator, so "
                "runs would not repeat or resume; remove it or set p=0, and use weight_decay instead"
            )
    parameters = list(module.named_parameters())
    if not parameters:
        raise ModelError("the model has no parameters to train")
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name!r} belongs to a lazy layer without a size yet; give its size when building"
            )
        if not parameter.requires_grad:
            raise ModelError(f"parameter {name!r} is frozen (requires_grad=False); register it as a buffer instead")
        if parameter.dtype != torch.float32:
            raise ModelError(f"parameter {name!r} is {parameter.dtype}; kinfed trains float32 models")


def _drops(layer: nn.Module) -> float:
    """The chance with which a layer of torch drops values in training."""
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else 0.0
