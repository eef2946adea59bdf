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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from kinfed.engine.cut import Cut, Deltas, answer, of_row, pulled_back
from kinfed.engine.dense import FeedForwardNet
from kinfed.engine.descent import Descent
from kinfed.engine.descent import Pull as Pull
from kinfed.engine.draws import Draws, KeyedDraws, drops, prepare_dropout
from kinfed.engine.head import Head, HeadProbe, find_head
from kinfed.engine.layout import RowLayout, freeze, norm_layers
from kinfed.engine.lstm import RecurrentNet
from kinfed.engine.module_checks import check_module
from kinfed.engine.running_norms import prepare_norms
from kinfed.engine.stacked_net import StackedNet
from kinfed.errors import ModelError

Build = Callable[[], nn.Module]

_KEEP: Deltas = (None, None)
MEMORY_BOUNDARY = 64  # bytes, at a multiple of which torch's memory begins


class ModuleTask(Task):
    """A classification task around a torch module: kinfed.engine.layout says what of it is in the row."""

    _hint = ""  # what to try when the module fails

    def __init__(
        self,
        build: Build,
        device: torch.device | str = "cpu",
        *,
        module: nn.Module | None = None,
        frozen: tuple[str, ...] = (),
    ) -> None:
        """`module` is one that `build` made and `check_module` accepted, where there is one already; `frozen` are
        patterns of parameters that are not trained, besides those that the module itself has frozen."""
        self.device = torch.device(device)
        self._build = build
        self.module = (checked_module(build, frozen) if module is None else module).to(self.device).train()
        self._per_thread = threading.local()
        self.layout = RowLayout.of(self.module)
        self.slots = self.layout.slots
        self.num_params = self.layout.num_params
        self.start: Tensor | None = None  # [P] in place of the random first start; see `starting_at`
        self._random_starts: dict[int, Tensor] = {}  # the first one by seed: all clients of a method ask for it
        self._whole: nn.Module | None = None  # of which `module` is the upper part; see `upper_task`
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
        start = self.flatten(module.state_dict()).to(self.device)
        if number == 0:
            self._random_starts[seed] = start.clone()
        return start

    def flatten(self, state: Mapping[str, Tensor]) -> Tensor:
        """[P] from named parameters and statistics, such as a module's `state_dict`."""
        return torch.cat([state[x.name].detach().reshape(-1).to(torch.float32) for x in self.slots])

    def unflatten(self, row: Tensor) -> dict[str, Tensor]:
        """Named views of one row (or of rows [n, P], with a leading n)."""
        return {x.name: row[..., x.start : x.stop].reshape((*row.shape[:-1], *x.shape)) for x in self.slots}

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """What `module.load_state_dict` takes: parameters, under all their names where they are tied, and buffers."""
        named = self.unflatten(row)
        whole = self.module.state_dict(keep_vars=True)
        in_row = {id(whole[name]): value for name, value in named.items()}
        return {name: in_row.get(id(value), value).detach().clone() for name, value in whole.items()}

    def module_of(self, row: Tensor) -> nn.Module:
        """A ready module with the parameters of one row."""
        module = copy.deepcopy(self.module if self._whole is None else self._whole)
        module.load_state_dict(self.state_dict(row))
        return module.eval()

    def __getstate__(self) -> dict[str, Any]:
        """Tasks travel to other processes; what belongs to a thread stays."""
        return {name: value for name, value in self.__dict__.items() if name != "_per_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._per_thread = threading.local()

    def constants_digest(self) -> str:
        """Of all that is not in the row (frozen parameters, constant buffers); "" where nothing is."""
        return self.layout.digest(self.module)

    @property
    def is_plain(self) -> bool:
        """Whether the row holds all of the module's state."""
        return self.layout.is_plain(self.module)

    def norm_layers(self) -> tuple[str, ...]:
        """Normalization layers with columns of the row, by their type."""
        layers = {slot.layer for slot in self.slots}
        return tuple(name for name in norm_layers(self.module) if name in layers)

    @property
    def has_example_gradients(self) -> bool:
        """Whether the gradient of a batch is a sum of gradients of single examples, each a function of that example
        alone: nothing is normalized by the batch, and nothing is drawn at random."""
        return not (self.layout.has_statistics or drops(self.module))

    def _working_copy(self, *, training: bool) -> WorkingCopy:
        # functional_call swaps a module's parameters while it runs, so every thread needs a module of its own.
        if not hasattr(self._per_thread, "copy"):
            self._per_thread.copy = WorkingCopy(self.layout, self.module, self.device)
        working: WorkingCopy = self._per_thread.copy
        working.set_mode(training)
        return working

    def _call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        """The module's output for x [B, ...] with these parameters and statistics."""
        with _with_example_shape(x.shape[1:], self._hint):
            z: Tensor = functional_call(self._working_copy(training=training).module, named, (x,))
        return z

    def _probe(self, *, training: bool) -> HeadProbe:
        return HeadProbe(self._working_copy(training=training).module, self.head.name)

    def _cut_call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """The features and the output of `_call`."""
        with self._probe(training=training) as probe:
            z = self._call(named, x, training=training)
        return probe.features(z), z


class WorkingCopy:
    """A module to call with the values of rows, for one thread."""

    def __init__(self, layout: RowLayout, module: nn.Module, device: torch.device) -> None:
        self._layout = layout
        self.module = layout.working_copy(module)
        self.draws = Draws(device)
        prepare_norms(self.module)
        prepare_dropout(self.module, self.draws)
        self._training: bool | None = None

    def set_mode(self, training: bool) -> None:
        if training is not self._training:
            self._layout.set_mode(self.module, training=training)
            self._training = training


class StackedTask(ModuleTask):
    backend = "stacked"

    def __init__(
        self,
        build: Build,
        device: torch.device | str = "cpu",
        *,
        module: nn.Module | None = None,
        frozen: tuple[str, ...] = (),
        net: StackedNet | None = None,
    ) -> None:
        """`net` is that of the module, where there is one already."""
        super().__init__(build, device, module=module, frozen=frozen)
        net = net or (stacked_net(self.module) if self.is_plain else None)
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

    def __init__(
        self,
        build: Build,
        device: torch.device | str = "cpu",
        *,
        module: nn.Module | None = None,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__(build, device, module=module, frozen=frozen)
        # Channels last is the layout in which the CPU's convolutions and pooling run fastest. Modules of a user keep
        # the usual one: their forward may call view(), which the other layout does not allow.
        self._channels_last = all(
            type(m).__module__.startswith("torch.nn.") and not subsamples(m) for m in self.module.modules()
        )
        self._catches_draws: bool | None = None  # whether operations draw, besides Dropout layers; None: not seen yet
        self.net = ConvolutionalNet.from_module(self.module) if self.is_plain else None

    def _call(self, named: dict[str, Tensor], x: Tensor, *, training: bool) -> Tensor:
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return super()._call(named, x, training=training)

    def _training_call(self, named: dict[str, Tensor], x: Tensor, batch: Batch, i: int) -> tuple[Tensor, bool]:
        """The output of a training forward, with the draws of row i, and whether operations drew."""
        draws = self._working_copy(training=True).draws
        draws.begin(batch, i)
        if self._catches_draws is False:
            return self._call(named, x, training=True), False
        with KeyedDraws(draws) as mode:
            z = self._call(named, x, training=True)
        return z, bool(mode.operations)

    def _row_grads(
        self, row: Tensor, batch: Batch, i: int, *, moving: bool, cut: Cut | None = None
    ) -> Iterable[tuple[ParameterSlot, Tensor]]:
        """The gradient of each trainable parameter at `row` [P], on row i of the batch; `moving`: the row's running
        statistics move in place. A cut sees the examples that the model sees."""
        x, y, weight = batch.x[i], batch.y[i], batch.weight[i]
        if self.layout.has_statistics or self.draws_randomly is not False:
            # Padding must not enter the statistics, and must not shift draws. Copies have the strides that a single
            # example gets without padding, too: products of torch go by them, to the last bit.
            present = weight > 0
            if len(y) == 1 or not bool(present.all()):
                x, y, weight = x[present], y[present], weight[present]
        trained = [slot for slot in self.slots if slot.trainable]
        if not len(y):
            return [(slot, row.new_zeros(slot.shape)) for slot in trained]
        # Products of single examples depend to the last bit on where in memory the weights begin. A row that trains
        # alone begins at such a boundary, as all memory of torch; so must a row among others.
        aligned = row if row.data_ptr() % MEMORY_BOUNDARY == 0 else row.clone()
        # `.data`: rows of one theta would share a version counter, and threads that train them mark each other's stale.
        state = {name: value.data for name, value in self.unflatten(aligned).items()}
        leaves = [state[slot.name].requires_grad_() for slot in trained]
        if not moving:
            state |= {slot.name: state[slot.name].clone() for slot in self.slots if not slot.trainable}
        first = self._catches_draws is None
        with torch.enable_grad():
            with nullcontext() if cut is None else self._probe(training=True) as probe:
                z, drew = self._training_call(state, x, batch, i)
            if moving:
                self._write_back(row, state)
            loss = (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()
            phi, deltas = z, _KEEP
            if cut is not None and probe is not None:
                phi = probe.features(z)
                deltas = of_row(cut, batch, i, x, y, weight)(phi.detach(), z.detach())
            with KeyedDraws(None) if first else nullcontext():
                grads = pulled_back(loss, phi, z, deltas, leaves)
        self._catches_draws = drew
        return zip(trained, grads, strict=True)

    def _write_back(self, row: Tensor, state: dict[str, Tensor]) -> None:
        """Statistics that the forward pass replaced instead of changing them in place enter the row; functional_call
        hands them back in `state`."""
        for slot in self.slots:
            place = row[slot.start : slot.stop]
            if not slot.trainable and state[slot.name].data_ptr() != place.data_ptr():
                place.copy_(state[slot.name].detach().reshape(-1))

    @property
    def draws_randomly(self) -> bool | None:
        """Whether training draws random numbers; None as long as no training step has shown it."""
        if any(type(m) is nn.Dropout and m.p > 0 for m in self.module.modules()):
            return True
        return False if self.net is not None else self._catches_draws

    @property
    def has_example_gradients(self) -> bool:
        return super().has_example_gradients and not self.draws_randomly

    def _add_gradient(
        self, net: ConvolutionalNet, i: int, theta: Tensor, batch: Batch, target: GradientTarget, cut: Cut | None
    ) -> None:
        examples = batch.x[i], batch.y[i], batch.weight[i]
        with _with_example_shape(batch.x.shape[2:]):
            net.add_gradient(theta[i], *examples, target, None if cut is None else of_row(cut, batch, i, *examples))

    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        return self._grad(theta, batch, cut, moving=False)

    def training_grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        return self._grad(theta, batch, cut, moving=True)

    def _grad(self, theta: Tensor, batch: Batch, cut: Cut | None, *, moving: bool) -> Tensor:
        if self.net is not None:
            out = torch.zeros_like(theta, memory_format=torch.contiguous_format)
            for i in range(len(theta)):
                self._add_gradient(self.net, i, theta, batch, GradientTarget(out[i], 1.0), cut)
            return out
        out = torch.empty_like(theta, memory_format=torch.contiguous_format)
        out[:, self.trainable.stop :] = 0.0
        for i in range(len(theta)):
            for slot, g in self._row_grads(theta[i], batch, i, moving=moving, cut=cut):
                out[i, slot.start : slot.stop] = g.reshape(-1)
        return out

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            rows = [self._call(self.unflatten(theta[i]), x[i], training=False) for i in range(len(theta))]
            return torch.stack(rows)

    def cut(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            pairs = [self._cut_call(self.unflatten(theta[i]), x[i], training=False) for i in range(len(theta))]
        phi, z = zip(*pairs, strict=True)
        return torch.stack(phi), torch.stack(z)

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
            grads = self._row_grads(theta[i], batch, i, moving=True, cut=cut)
            if center is not None:
                theta[i, self.trainable].lerp_(center[self.trainable], amount)
            for slot, g in grads:
                theta[i, slot.start : slot.stop].view(slot.shape).add_(g, alpha=-rate)


class VmapTask(ModuleTask):
    """Neither running statistics nor random operations: a chunk of clients would share what each has its own."""

    backend = "vmap"
    _hint = '; if it works for one client alone, choose backend="rows"'

    def __init__(
        self,
        build: Build,
        device: torch.device | str = "cpu",
        *,
        module: nn.Module | None = None,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__(build, device, module=module, frozen=frozen)
        if self.layout.has_statistics or drops(self.module):
            raise ModelError(
                'the vmap path takes no models with running statistics or dropout; use backend="rows" or "auto"'
            )

    def _loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        z = self._call(self.unflatten(row), x, training=True)
        return (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()

    def grad(self, theta: Tensor, batch: Batch, cut: Cut | None = None) -> Tensor:
        if cut is not None:
            return self._cut_grad(theta, batch, cut)
        out: Tensor = vmap(grad(self._loss))(theta, batch.x, batch.y, batch.weight)
        return out

    def _cut_loss(self, row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        phi, z = self._cut_call(self.unflatten(row), x, training=True)
        return phi, z, (nn.functional.cross_entropy(z, y, reduction="none") * weight).sum()

    def _cut_grad(self, theta: Tensor, batch: Batch, cut: Cut) -> Tensor:
        leaf = theta.detach().requires_grad_()
        with torch.enable_grad():
            phi, z, loss = vmap(self._cut_loss)(leaf, batch.x, batch.y, batch.weight)
            deltas = answer(cut, phi.detach(), z.detach(), batch)
            return pulled_back(loss.sum(), phi, z, deltas, [leaf])[0]

    def cut(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def cut_row(row: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return self._cut_call(self.unflatten(row), inputs, training=False)

        with torch.no_grad():
            phi, z = vmap(cut_row)(theta, x)
        return phi, z

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        out: Tensor = vmap(lambda row, inputs: self._call(self.unflatten(row), inputs, training=False))(theta, x)
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


def checked_module(build: Build, frozen: tuple[str, ...] = ()) -> nn.Module:
    """A module to train, with the random numbers of seed 0, in which `frozen` patterns are."""
    module = _build_seeded(build, 0)
    freeze(module, frozen)
    check_module(module)
    return module


def stacked_net(module: nn.Module) -> StackedNet | None:
    """The hand-written network of many clients at once, where there is one for this module."""
    return FeedForwardNet.from_module(module) or RecurrentNet.from_module(module)


_ROW_BY_ROW = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
_BACKENDS: dict[str, type[ModuleTask]] = {"stacked": StackedTask, "rows": RowsTask, "vmap": VmapTask}


def make_task(
    build: Build,
    *,
    backend: str = "auto",
    device: torch.device | str = "cpu",
    frozen: tuple[str, ...] = (),
    head: str | None = None,
    example: Tensor | None = None,
) -> ModuleTask:
    """The task for the module that `build()` makes; `backend` forces one of stacked, rows, vmap; `frozen` are patterns
    of parameters that are not trained; `head` names the last linear layer where the module does not declare it last.

    On an `example` batch [B, ...] the model is tried at once: one that fails is refused here and not in the first
    round, and one that only works for one client at a time (it branches on its data, draws random numbers, or holds an
    operation that torch runs in a loop over clients anyway) trains row by row."""
    if backend != "auto" and backend not in _BACKENDS:
        raise ModelError(f"backend is one of auto, {', '.join(_BACKENDS)}; got {backend!r}")
    task = _task_for(checked_module(build, frozen), build, backend, device)
    if example is not None:
        if backend == "auto" and isinstance(task, VmapTask) and not _gains_from_vmap(task, example):
            task = RowsTask(build, device, module=task.module)
        _try(task, example, clients=1)
    return task if head is None else task.with_head(head)


def upper_task(
    whole: ModuleTask, above: Callable[[nn.Module], nn.Module], layers: list[nn.Module], backend: str = "auto"
) -> ModuleTask:
    """A task on the activations below `layers`, which hold all that `whole` trains: `above` makes a module's forward
    pass begin there. Rows, starts and exported models are those of `whole`."""
    module = above(whole.layout.working_copy(whole.module))
    upper = nn.Sequential(*layers)
    trained = sum(p.numel() for p in upper.parameters() if p.requires_grad)
    is_all = trained == whole.num_params == sum(p.numel() for p in upper.parameters())
    net = stacked_net(upper) if is_all and backend in ("auto", "stacked") else None
    task: ModuleTask
    if net is not None:
        task = StackedTask(whole._build, whole.device, module=module, net=net)
    else:
        task = _task_for(module, whole._build, backend, whole.device)
    task._whole = whole.module
    return task.starting_at(whole.start)


def _try(task: ModuleTask, example: Tensor, clients: int) -> None:
    """One gradient of so many clients on the example batch."""
    x = example.to(task.device).expand(clients, *example.shape)
    y = torch.zeros(clients, len(example), dtype=torch.int64, device=task.device)
    weight = torch.full(y.shape, 1 / len(example), device=task.device)
    theta = task.flatten(task.module.state_dict()).repeat(clients, 1)
    task.grad(theta, Batch(x, y, weight, torch.arange(clients)))


def _gains_from_vmap(task: ModuleTask, example: Tensor) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _try(task, example, clients=2)
        except ModelError:
            return False
    return not any("performance drop" in str(warning.message) for warning in caught)


def _task_for(module: nn.Module, build: Build, backend: str, device: torch.device | str) -> ModuleTask:
    """The task of a module that `build` made, by a rule that was measured (docs/models.md)."""
    if backend != "auto":
        return _BACKENDS[backend](build, device, module=module)
    layout = RowLayout.of(module)
    net = stacked_net(module) if layout.is_plain(module) else None
    if net is not None and net.is_faster_stacked(layout.num_params):
        return StackedTask(build, device, module=module, net=net)
    if layout.has_statistics or drops(module) or any(isinstance(child, _ROW_BY_ROW) for child in module.modules()):
        return RowsTask(build, device, module=module)
    return VmapTask(build, device, module=module)
