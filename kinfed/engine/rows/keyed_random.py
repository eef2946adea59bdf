"""Operations of torch that draw from its global generator, caught in one thread: they draw by key, or are refused.

    with KeyedDraws(draws) as caught:
        z = module(x)                      dropout, noise, sampled attention, wherever they are: from `draws`
    caught.operations                      names of those that drew

A kernel of our own is registered for each operation that torch marks as drawing, under a dispatch key that nothing else
uses and that falls through for all others; inside `KeyedDraws` the thread has that key. So operations are caught
wherever they are called: by dropout inside attention and LSTM, by C++, by TorchScript. A `TorchDispatchMode` would do
the same, but sends every operation through Python, some 30 µs each; it serves where torch lacks the rest (torch 2.6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed.errors import ModelError

if TYPE_CHECKING:
    from kinfed.engine.rows.keyed_dropout import Draws

_KEY = "TESTING_ONLY_GenericMode"  # torch's key for modes of anyone; no other one is free
_DRAWS = torch.Tag.nondeterministic_seeded
# Marked as drawing by mistake: a softmax over sequences of unequal lengths (nn.TransformerEncoder with a padding mask).
_DOES_NOT_DRAW = frozenset({"aten::_nested_tensor_softmax_with_shape"})


class KeyedDraws:
    """A context in which operations of this thread that would draw from torch's global generator draw from `draws`.

    Where that is not possible, or where `draws` is None, they are an error. Operations are judged one by one instead
    of by the generator's state before and after: other threads may draw from it meanwhile."""

    def __init__(self, draws: Draws | None) -> None:
        self._draws = draws
        self.operations: set[str] = set()  # names of those that drew
        self._outer: KeyedDraws | None = None  # of the same thread, around this one
        self._catcher: Any = None  # a context manager of torch

    def __enter__(self) -> Self:
        if _kernels_are_there():
            self._outer = getattr(_thread, "keyed", None)
            _thread.keyed = self
            self._catcher = torch._C._IncludeDispatchKeyGuard(_key())
        else:
            self._catcher = _Mode(self)
        self._catcher.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._catcher.__exit__(*error)
        _thread.keyed = self._outer

    def call(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that may draw."""
        if not _draws_globally(operation, args, kwargs):
            return operation(*args, **kwargs)
        name = operation._schema.name.removeprefix("aten::")
        if self._draws is None:
            raise ModelError(
                f"the model draws random numbers by torch.{name} where none may be drawn: on the way back (by "
                "torch.utils.checkpoint?), where they cannot be repeated; leave that out"
            )
        keyed = _overload_with_generator(operation)
        if keyed is None:
            raise ModelError(
                f"the model draws random numbers by torch.{name}, which takes no generator, so runs would not repeat "
                "or resume; draw with torch.bernoulli, torch.rand or torch.randn instead"
            )
        self.operations.add(name)
        if keyed is torch.ops.aten.bernoulli_.float and not args[0].requires_grad:  # every dropout of torch
            return self._draws.bernoulli_(*args, **kwargs)
        return keyed(*args, **{**kwargs, "generator": self._draws.next()})


def _draws_globally(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation that may draw does: one with a generator of its own, with no chance to drop anything, or
    not in training, leaves the global one alone."""
    values = {argument.name: argument.default_value for argument in operation._schema.arguments}
    values |= dict(zip(values, args, strict=False)) | kwargs
    if values.get("generator") is not None or values.get("training") is False:
        return False
    return values.get("dropout_p") != 0


@cache
def _overload_with_generator(operation: Any) -> Any:
    """The operation itself, or its overload with the same other arguments that takes a generator; None without one."""
    names = [argument.name for argument in operation._schema.arguments]
    if "generator" in names:
        return operation
    packet = operation.overloadpacket
    for overload in map(packet.__getattr__, packet.overloads()):
        if sorted(argument.name for argument in overload._schema.arguments) == sorted([*names, "generator"]):
            return overload
    return None


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types here
    """Every operation of the thread passes here."""

    def __init__(self, keyed: KeyedDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keyed = keyed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _may_draw(func):
            return func(*args, **(kwargs or {}))
        return self._keyed.call(func, args, kwargs or {})


@cache  # every operation of a forward pass is asked, and torch makes a new list of tags each time
def _may_draw(operation: Any) -> bool:
    return _DRAWS in operation.tags and operation._schema.name not in _DOES_NOT_DRAW


_thread = threading.local()  # .keyed: the innermost KeyedDraws, whose draws the thread's operations get
_installing = threading.Lock()
_libraries: list[Any] = []  # of torch.library; what is registered lasts as long as they do


@cache
def _key() -> Any:
    return torch._C._parse_dispatch_key(_KEY)


@cache
def _key_set() -> Any:
    return torch._C.DispatchKeySet(_key())


def uncaught() -> AbstractContextManager[object]:
    """A context in which nothing is caught: for the draws by key themselves."""
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(_key_set())
    return guard


def _kernels_are_there() -> bool:
    """Whether operations that draw have our kernels, which the first call registers; it takes a tenth of a second."""
    if not _libraries:
        with _installing:
            if not _libraries:
                _libraries.extend(_register())
    return len(_libraries) > 1


def _register() -> list[Any]:
    """Fall through under the key for all operations, our kernel for those that draw; of composite ones what they are
    made of comes by. Where torch cannot, a library without anything in it."""
    library: Any = Library  # torch declares no types for it
    everything = library("_", "IMPL")
    if not hasattr(everything, "fallback"):
        return [everything]
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    libraries = {"_": everything}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        described = torch._C._get_operation_overload(f"{space}::{packet}", overload)
        if described is None or _DRAWS not in described[2] or name in _DOES_NOT_DRAW:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        operation = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        if space not in libraries:
            libraries[space] = library(space, "IMPL")
        libraries[space].impl(name, _kernel(operation), _KEY)
    return list(libraries.values())


def _kernel(operation: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with uncaught():
            keyed: KeyedDraws | None = getattr(_thread, "keyed", None)
            return operation(*args, **kwargs) if keyed is None else keyed.call(operation, args, kwargs)

    return call
