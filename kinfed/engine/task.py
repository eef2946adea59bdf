"""Tasks of torch modules: classification with any of several ways to compute the same gradient.

`make_task` picks the backend per model:

  stacked  hand-written forward and backward on [n, ...]: dense layers (kinfed.engine.dense), 5-9x a plain loop, and
           LSTM layers (kinfed.engine.lstm)
  rows     one row after the other: by hand for chains of convolutions (kinfed.engine.cnn), which gain nothing
           from stacking, with autograd for anything else
  vmap     torch.func on any other module

All three agree to 1e-5 and are tested against each other and against plain autograd.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kinfed.core import rng
from kinfed.data.batches import Batch
from kinfed.engine.base import Score as Score
from kinfed.engine.base import Task as Task
from kinfed.engine.cnn import ConvolutionalNet, GradientTarget, subsamples
from kinfed.engine.columns import ParameterSlot
from kinfed.engine.cut import Cut, RowCut, answer, of_row, pulled_back
from kinfed.engine.dense import FeedForwardNet
from kinfed.engine.descent import Descent
from kinfed.engine.descent import Pull as Pull
from kinfed.engine.head import Head, find_head, run_with_features
from kinfed.engine.lstm import RecurrentNet
from kinfed.engine.module_checks import NoGlobalDraws, check_module
from kinfed.engine.stacked_net import StackedNet
from kinfed.errors import ModelError

Build = Callable[[], nn.Module]


class ModuleTask(Task):
    """A classification task around a torch module. Parameters are the module's, in its own order."""

    _hint = ""  # what to try when the module fails

    def __init__(self, build: Build, device: torch.device | str = "cpu", *, module: nn.Module | None = None) -> None:
        """`module` is one that `build` made and `check_module` accepted, where there is one already."""
        self.device = torch.device(device)
        self._build = build
        self.module = (checked_module(build) if module is None else module).to(self.device).train()
        self._per_thread = threading.local()
        slots, position = [], 0
        for name, parameter in self.module.named_parameters():
            slots.append(ParameterSlot(name, tuple(parameter.shape), position, position + parameter.numel()))
            position += parameter.numel()
        self.slots = tuple(slots)
        self.num_params = position
        self.start: Tensor | None = None  # [P] in place of the random first start; see `starting_at`
        self._random_starts: dict[int, Tensor] = {}  # the first one by seed: all clients of a method ask for it
        self._head: Head | None = None  # once it was asked for, or named

    def starting_at(self, start: Tensor | None) -> Self:
        """The same task with `start` [P] as the first start of every seed (a warm start); None: a random one again.
        This task is left as it is, and shares its module with the new one."""
        if start is not None and start.shape != (self.num_params,):
            raise ModelError(f"a start has {self.num_params} parameters; got shape {list(start.shape)}")
        task = copy.copy(self)
        task.start = None if start is None else start.detach().clone()
        return task

    @property
    def head(self) -> Head:
        """The last nn.Linear that the module declares, or the one of `with_head`."""
        if self._head is None:
            self._head = find_head(self.module, self.slots)
        return self._head

    def with_head(self, name: str) -> Self:
        """The same task with that layer as its head, where the order of declaration is not that of the forward pass.
        This task is left as it is, and shares its module with the new one."""
        task = copy.copy(self)
        task._head = find_head(self.module, self.slots, name)
        return task

    def init(self, seed: int, number: int = 0) -> Tensor:
        # Callers get a copy: one that trains it in place must not move the start of the methods after it.
        if number == 0 and self.start is not None:
            return self.start.clone()
        if number == 0 and seed in self._random_starts:
            return self._random_starts[seed].clone()
        module = _build_seeded(self._build, rng.numpy_seed(rng.fold(rng.root(seed, "model-init"), number)))
        start = self.flatten(dict(module.named_parameters())).to(self.device)
        if number == 0:
            self._random_starts[seed] = start.clone()
        return start

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
        return {name: value for name, value in self.__dict__.items() if name != "_per_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._per_thread = threading.local()

    def _thread_module(self) -> nn.Module:
        # functional_call swaps a module's parameters while it runs, so every thread needs a module of its own.
        if not hasattr(self._per_thread, "module"):
            self._per_thread.module = copy.deepcopy(self.module)
        module: nn.Module = self._per_thread.module
        return module

    def _call(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's output for x [B, ...] with these parameters."""
        with _with_example_shape(x.shape[1:], self._hint):
            z: Tensor = functional_call(self._thread_module(), named, (x,))
        return z

    def _cut_call(self, named: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """The features and the output of `_call`."""
        return run_with_features(self._thread_module(), self.head.name, lambda: self._call(named, x))


class StackedTask(ModuleTask):
    backend = "stacked"

    def __init__(
        self,
        build: Build,
        device: torch.device | str = "cpu",
        *,
        module: nn.Module | None = None,
        net: StackedNet | None = None,
    ) -> None:
        """`net` is that of the module, where there is one already."""
        super().__init__(build, device, module=module)
        net = net or stacked_net(self.module)
        if net is None:
            raise ModelError(
                "the stacked path takes chains of Flatten, Linear, ReLU and Tanh only, or LSTM, LastOutput and Linear"
            )
        self.net = net

    def with_head(self, name: str) -> Self:
        task = super().with_head(name)
        if task.head.dense != self.head.dense:
            raise ModelError(f"the model's output is that of layer {self.head.name!r}, not of {name!r}")
        return task

    def cut(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net.cut(theta, x)

    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        return self.net.grad(theta, batch, cut)

    def descend_(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None, cut: Cut | None = None
    ) -> None:
        self.net.descend_(theta, batch, lr, pull, cut)

    def descent(
        self,
        theta: Tensor,
        steps: int,
        pull: Pull | None = None,
        drift: Tensor | None = None,
        cut: Cut | None = None,
    ) -> Descent:
        return self.net.descent(theta, steps, pull, drift, cut)

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.net.logits(theta, x)

    def example_norms(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        norms = self.net.example_norms(theta, batch, cut)
        return super().example_norms(theta, batch, cut) if norms is None else norms


class RowsTask(ModuleTask):
    backend = "rows"
    one_row_at_a_time = True

    def __init__(self, build: Build, device: torch.device | str = "cpu", *, module: nn.Module | None = None) -> None:
        super().__init__(build, device, module=module)
        # Channels last is the layout in which the CPU's convolutions and pooling run fastest. Modules of a user keep
        # the usual one: their forward may call view(), which the other layout does not allow.
        self._channels_last = all(
            type(m).__module__.startswith("torch.nn.") and not subsamples(m) for m in self.module.modules()
        )
        self._is_deterministic = False  # the module was seen to draw no random numbers
        self.net = ConvolutionalNet.from_module(self.module)

    def _call(self, named: dict[str, Tensor], x: Tensor) -> Tensor:
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if not self._is_deterministic:
            with NoGlobalDraws():  # type: ignore[no-untyped-call]  # torch declares no types here
                super()._call(named, x)
            self._is_deterministic = True
        return super()._call(named, x)

    def _row_grads(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        named = {k: v.detach().requires_grad_() for k, v in self.unflatten(row).items()}
        with torch.enable_grad():
            z = self._call(named, x)
            loss = (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()
            return torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)

    def _cut_grads(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor, cut: RowCut) -> tuple[Tensor, ...]:
        """`_row_grads` with the deltas of a cut."""
        named = {k: v.detach().requires_grad_() for k, v in self.unflatten(row).items()}
        with torch.enable_grad():
            phi, z = self._cut_call(named, x)
            loss = (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()
            return pulled_back(loss, phi, z, cut(phi.detach(), z.detach()), list(named.values()))

    def _grads_of(self, i: int, theta: Tensor, batch: Batch, cut: Cut | None) -> tuple[Tensor, ...]:
        """The gradients of row i by autograd."""
        row, row_cut = (theta[i], batch.x[i], batch.y[i], batch.weight[i]), of_row(cut, batch, i)
        return self._row_grads(*row) if row_cut is None else self._cut_grads(*row, row_cut)

    def cut(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            pairs = [self._cut_call(self.unflatten(theta[i]), x[i]) for i in range(len(theta))]
        phi, z = zip(*pairs, strict=True)
        return torch.stack(phi), torch.stack(z)

    def _add_gradient(
        self, net: ConvolutionalNet, i: int, theta: Tensor, batch: Batch, target: GradientTarget, cut: Cut | None
    ) -> None:
        with _with_example_shape(batch.x.shape[2:]):
            net.add_gradient(theta[i], batch.x[i], batch.y[i], batch.weight[i], target, of_row(cut, batch, i))

    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        if self.net is not None:
            out = torch.zeros_like(theta, memory_format=torch.contiguous_format)
            for i in range(len(theta)):
                self._add_gradient(self.net, i, theta, batch, GradientTarget(out[i], 1.0), cut)
            return out
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        for i in range(len(theta)):
            grads = self._grads_of(i, theta, batch, cut)
            for slot, g in zip(self.slots, grads, strict=True):
                out[i, slot.start : slot.stop] = g.reshape(-1)
        return out

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([self._call(self.unflatten(theta[i]), x[i]) for i in range(len(theta))])

    def descend_(
        self, theta: Tensor, batch: Batch, lr: float | Tensor, pull: Pull | None = None, cut: Cut | None = None
    ) -> None:
        for i in range(len(theta)):
            rate = float(lr[i]) if isinstance(lr, Tensor) else lr
            center, amount = None, 0.0
            if pull is not None:
                lam = float(pull[0][i]) if isinstance(pull[0], Tensor) else pull[0]
                center, amount = pull[1][i], rate * lam
            if self.net is not None:
                self._add_gradient(self.net, i, theta, batch, GradientTarget(theta[i], -rate, center, amount), cut)
                continue
            grads = self._grads_of(i, theta, batch, cut)
            if center is not None:
                theta[i].lerp_(center, amount)
            for slot, g in zip(self.slots, grads, strict=True):
                theta[i, slot.start : slot.stop].view(slot.shape).add_(g, alpha=-rate)


class VmapTask(ModuleTask):
    backend = "vmap"
    _hint = '; if it works for one client alone, choose backend="rows"'

    def _loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        z = self._call(self.unflatten(row), x)
        return (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()

    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        if cut is not None:
            return self._cut_grad(theta, batch, cut)
        out: Tensor = vmap(grad(self._loss))(theta, batch.x, batch.y, batch.weight)
        return out

    def _cut_loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        phi, z = self._cut_call(self.unflatten(row), x)
        return phi, z, (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()

    def _cut_grad(self, theta: Tensor, batch: Batch, cut: Cut) -> Tensor:
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            phi, z, loss = vmap(self._cut_loss)(leaf, batch.x, batch.y, batch.weight)
            deltas = answer(cut, phi.detach(), z.detach(), batch)
            return pulled_back(loss.sum(), phi, z, deltas, [leaf])[0]

    def cut(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            phi, z = vmap(lambda row, inputs: self._cut_call(self.unflatten(row), inputs))(theta, x)
        return phi, z

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        out: Tensor = vmap(lambda row, inputs: self._call(self.unflatten(row), inputs))(theta, x)
        return out


@contextmanager
def _with_example_shape(shape: torch.Size, hint: str = "") -> Iterator[None]:
    """An error of torch inside says on which examples the model failed, and what to try."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"the model fails on examples of shape {list(shape)}: {reason}{hint}") from error


_GLOBAL_RNG_LOCK = threading.Lock()


def _build_seeded(build: Build, seed: int) -> nn.Module:
    """A module with the random numbers of `seed`. Layers draw them from torch's global generator, which is left as
    it was; the lock keeps threads that start clients at the same time from drawing each other's."""
    with _GLOBAL_RNG_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def checked_module(build: Build) -> nn.Module:
    """A module to train, with the random numbers of seed 0."""
    module = _build_seeded(build, 0)
    check_module(module)
    return module


def stacked_net(module: nn.Module) -> StackedNet | None:
    """The hand-written network of many clients at once, where there is one for this module."""
    return FeedForwardNet.from_module(module) or RecurrentNet.from_module(module)


_CONVOLVES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_BACKENDS: dict[str, type[ModuleTask]] = {"stacked": StackedTask, "rows": RowsTask, "vmap": VmapTask}


def make_task(
    build: Build, *, backend: str = "auto", device: torch.device | str = "cpu", head: str | None = None
) -> ModuleTask:
    """The task for the module that `build()` makes; `backend` forces one of stacked, rows, vmap, and `head` names its
    last linear layer where the module does not declare it last."""
    task = _make_task(build, backend, device)
    return task if head is None else task.with_head(head)


def _make_task(build: Build, backend: str, device: torch.device | str) -> ModuleTask:
    if backend != "auto" and backend not in _BACKENDS:
        raise ModelError(f"backend is one of auto, {', '.join(_BACKENDS)}; got {backend!r}")
    module = checked_module(build)
    if backend != "auto":
        return _BACKENDS[backend](build, device, module=module)
    net = stacked_net(module)
    if net is not None and net.is_faster_stacked(sum(p.numel() for p in module.parameters())):
        return StackedTask(build, device, module=module, net=net)
    if any(isinstance(child, _CONVOLVES) for child in module.modules()):
        return RowsTask(build, device, module=module)
    return VmapTask(build, device, module=module)
