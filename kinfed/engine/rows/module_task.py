"""A task around a torch module: its rows, starts, exported models, and a working copy of it for every thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from kinfed.core import rng, storage
from kinfed.engine.contract.head import Head, find_head
from kinfed.engine.contract.objective import CROSS_ENTROPY, Objective
from kinfed.engine.contract.task import Task
from kinfed.engine.rows.keyed_random import drops
from kinfed.engine.rows.layout import NORM_KINDS, RowLayout, WorkingCopy, freeze
from kinfed.engine.rows.model_calls import packing_of, prepare_call, refuse_module
from kinfed.engine.rows.module_checks import check_module
from kinfed.errors import KinfedError, ModelError

Build = Callable[[], nn.Module]


class ModuleTask(Task):
    """A task around a torch module: kinfed.engine.rows.layout says what of it is in the row."""

    def __init__(
        self, build: Build, device: torch.device | str = "cpu", *, module: nn.Module | None = None,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:  # fmt: skip
        """`module` is one that `build` made and `check_module` accepted, if it exists already."""
        self.device = torch.device(device)
        self.build = build
        self.module = (checked_module(build) if module is None else module).to(self.device).train()
        self.objective, self.classifies = objective, objective.classifies
        self._per_thread = threading.local()
        self.packing = packing_of(self.module)
        self.layout = RowLayout.of(self.module)
        self.slots = self.layout.slots
        self.num_params = self.layout.num_params
        self.start: Tensor | None = None  # [P] in place of the random first start; see `starting_at`
        self._random_starts: dict[int, Tensor] = {}  # the first one by seed: all clients of a method ask for it
        self._whole: nn.Module | None = None  # of which `module` is the upper part; see `as_part_of`
        self._head: Head | None = None  # once it was asked for, or named
        self._prepare()

    def _prepare(self) -> None:
        """Make what a backend needs besides, and refuse modules that are not for it: the end of every `__init__`."""

    def starting_at(self, start: Tensor | None) -> Self:
        """The same task with `start` [P] as the first start of every seed (a warm start); None: a random one again.
        This task is left as it is, and shares its module with the new one."""
        if start is not None and start.shape != (self.num_params,):
            raise ModelError(f"a start has {self.num_params} parameters; got shape {list(start.shape)}")
        task = copy.copy(self)
        task.start = None if start is None else start.detach().clone()
        return task

    def on(self, device: torch.device | str) -> Self:
        """The same task on another device, with a module of its own. This task is left as it is."""
        task = copy.copy(self)
        task.device = torch.device(device)
        task.module = copy.deepcopy(self.module).to(task.device)
        task._whole = None if self._whole is None else copy.deepcopy(self._whole).to(task.device)
        task.start = None if self.start is None else self.start.to(task.device)
        task._random_starts, task._per_thread = {}, threading.local()
        task._prepare()
        return task

    def as_part_of(self, whole: ModuleTask) -> Self:
        """The same task, whose rows are exported as models of `whole`: its module is the upper part of that one."""
        task = self.starting_at(whole.start)
        task._whole, task.packing = whole.module, whole.packing
        task.problem, task.metric, task.no_features = whole.problem, whole.metric, whole.no_features
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
        module = build_seeded(self.build, rng.numpy_seed(rng.fold(rng.root(seed, "model-init"), number)))
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
        """Tensors for `module.load_state_dict`: parameters, under all their names where they are tied, and buffers."""
        named = self.unflatten(row)
        whole = self.module.state_dict(keep_vars=True)
        in_row = {id(whole[name]): value for name, value in named.items()}
        return {name: in_row.get(id(value), value).detach().clone() for name, value in whole.items()}

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters in `state_dict`, each with the name that is in the row."""
        whole = self.module.state_dict(keep_vars=True)
        first = {id(whole[slot.name]): slot.name for slot in self.slots}
        return {n: first[id(value)] for n, value in whole.items() if id(value) in first and first[id(value)] != n}

    def module_of(self, row: Tensor) -> nn.Module:
        """A ready module with the parameters of one row."""
        module = copy.deepcopy(self.module if self._whole is None else self._whole)
        module.load_state_dict(self.state_dict(row))
        return module.eval()

    def __getstate__(self) -> dict[str, Any]:
        """What travels to other processes: nothing of a thread; how to build a module that torch does not pickle."""
        state = {name: value for name, value in self.__dict__.items() if name != "_per_thread"}
        if not any(is_parametrized(layer) for layer in self.module.modules()):
            return state
        if self._whole is not None:
            raise ModelError(
                "a partly frozen model with parametrized layers (weight_norm, spectral_norm) cannot be sent to other "
                "processes in part; use cache = false, or the local pool"
            )
        frozen = [name for name, parameter in self.module.named_parameters() if not parameter.requires_grad]
        return state | {"module": (self.module.state_dict(), frozen)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._per_thread = threading.local()
        if isinstance(self.module, tuple):
            values, frozen = self.module
            self.module = build_seeded(self.build, 0).to(self.device).train()
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(name not in frozen)
            self.module.load_state_dict(values)

    def constants_digest(self) -> str:
        """A digest of all that is not in the row (frozen parameters, constant buffers); "" if nothing is."""
        constants = self.layout.constants(self.module)
        return storage.checksum(constants) if constants else ""

    def frozen_digest(self) -> str:
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        return storage.checksum(frozen) if frozen else ""

    @property
    def is_plain(self) -> bool:
        """Whether the row holds all of the module's state."""
        return self.layout.is_plain(self.module)

    def norm_layers(self) -> tuple[str, ...]:
        """Normalization layers with columns of the row, by their type."""
        layers = {slot.layer for slot in self.slots}
        kinds = ((name, isinstance(child, NORM_KINDS)) for name, child in self.module.named_modules())
        return tuple(name for name, is_norm in kinds if is_norm and name in layers)

    @property
    def has_example_gradients(self) -> bool:
        """Whether the gradient of a batch is a sum of gradients of single examples, each a function of that example
        alone: nothing is normalized by the batch or coupled by the loss, and nothing is drawn at random."""
        return not (self.objective.couples or self.layout.has_statistics or drops(self.module))

    def _working_copy(self, *, training: bool) -> WorkingCopy:
        # Rows are put in the place of a module's parameters while it runs, so every thread needs one of its own; and
        # between the forward and the backward pass of training, a feature loss may ask for what other models say.
        copies: dict[bool, WorkingCopy] = self._per_thread.__dict__.setdefault("copies", {})
        if training not in copies:
            copies[training] = WorkingCopy(self.layout, self.module, self.device, training=training)
        return copies[training]


class example_shape_in_errors:  # a class, because a generator would cost 2 µs in every step
    """An error of torch inside says on which examples the model failed, and what to try."""

    def __init__(self, shape: torch.Size, hint: str = "") -> None:
        self._shape, self._hint = shape, hint

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"the model fails on examples of shape {list(self._shape)}: {reason}{self._hint}"
            ) from error


_GLOBAL_RNG_LOCK = threading.Lock()


def build_seeded(build: Build, seed: int) -> nn.Module:
    """A module with the random numbers of `seed`, from torch's global generator, which is left as it was; the lock
    keeps threads from drawing each other's. torch.manual_seed would also format a stack at each call."""
    with _GLOBAL_RNG_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def checked_module(build: Build, frozen: tuple[str, ...] = ()) -> nn.Module:
    """A module to train, with the random numbers of seed 0, in which `frozen` patterns are."""
    refuse_module(build)
    try:
        module = build_seeded(build, 0)
    except (KinfedError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the code of a stranger may raise anything
        raise ModelError(
            f"the function that makes the model fails: {type(error).__name__}: {error}; it is called without arguments "
            "or, where it requires two, with the shape of an example and the number of classes"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"the function that makes the model should return an nn.Module; it returned {module!r}")
    freeze(module, frozen)
    check_module(module)
    prepare_call(module)
    return module
