"""Random operations inside models (dropout, noise layers, sampled attention): drawn from counter-based keys.

Every draw of a training forward is a function of (seed, stream of batches, round, client, step, number of the draw),
so it does not depend on threads, chunks, pools or resumed runs, and two methods that train on the same batch draw the
same. Two passes over one batch draw the same, too: a finite difference of gradients compares like with like. Every draw
begins a generator anew: SFC64 for large masks of dropout, which take torch's own generator five times as long, and
torch's for anything else. Dropout layers of working copies draw their masks themselves; all other operations that draw
from torch's global generator are caught in the thread, and draw by key or are refused:

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MethodType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from kinfed.core import rng
from kinfed.data import Batch
from kinfed.errors import ModelError

_KEY = "TESTING_ONLY_GenericMode"  # torch's key for modes of anyone; no other one is free
_PARSED_KEY: Any = torch._C._parse_dispatch_key(_KEY)
_KEY_SET: Any = torch._C.DispatchKeySet(_PARSED_KEY)
_DRAWS = torch.Tag.nondeterministic_seeded
# Marked as drawing, and do not: a softmax over sequences of unequal lengths (nn.TransformerEncoder with a padding
# mask), the choice of a kernel for attention, and that of the processor, which refuses to drop anything.
_DOES_NOT_DRAW = frozenset({
    "aten::_nested_tensor_softmax_with_shape", "aten::_fused_sdp_choice",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
})  # fmt: skip
_NOWHERE = (
    "the model draws random numbers by torch.{}, and none may be drawn there: on the way back (by "
    "torch.utils.checkpoint?) they cannot be repeated; leave that out"
)


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
            self._catcher = torch._C._IncludeDispatchKeyGuard(_PARSED_KEY)
        else:
            self._catcher = _Mode(self)
        self._catcher.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._catcher.__exit__(*error)
        _thread.keyed = self._outer

    def dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """torch's dropout, which is in every attention."""
        if not train or not 0 < p < 1 or not x.numel():
            return torch.dropout(x, p, train)
        if self._draws is None:
            raise ModelError(_NOWHERE.format("dropout"))
        self.operations.add("dropout")
        return self._draws.dropped_out(x, 1 - p)

    def call(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that may draw."""
        if not _draws_globally(operation, args, kwargs):
            return operation(*args, **kwargs)
        name = operation._schema.name.removeprefix("aten::")
        if self._draws is None:
            raise ModelError(_NOWHERE.format(name))
        if name == "native_dropout":  # what `dropout` is on accelerators
            self.operations.add(name)
            return self._draws.dropped(args[0], args[1])
        if name in _FUSED_ATTENTION:
            self.operations.add(name)
            return _attention(self._draws, operation, args, kwargs)
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
    """Whether an operation draws: not with a generator of its own, with no chance to drop, or outside of training."""
    values = _arguments(operation, args, kwargs)
    if values.get("generator") is not None or values.get("training") is False or values.get("train") is False:
        return False
    return values.get("dropout_p") != 0


def _arguments(operation: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of an operation by name."""
    values: dict[str, Any] = {argument.name: argument.default_value for argument in operation._schema.arguments}
    values |= dict(zip(values, args, strict=False))
    return {**values, **kwargs}


# Kernels of accelerators that draw while they compute, and do not tell what.
_FUSED_ATTENTION = frozenset(
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")
)


def _attention(draws: Draws, operation: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """softmax(QK'/√d + bias), some of it dropped by key, times V: what a fused kernel computes, step by step. Its
    other outputs are not read; they are for its own backward pass."""
    values = _arguments(operation, args, kwargs)
    q, k, v = (values[name] for name in ("query", "key", "value"))
    scale = q.shape[-1] ** -0.5 if values["scale"] is None else values["scale"]
    z = q @ k.mT * scale
    if values["is_causal"]:
        z = z.masked_fill(~torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril(), -torch.inf)
    if values.get("attn_bias") is not None:
        z = z + values["attn_bias"]
    share, _ = draws.dropped(torch.softmax(z, -1), values["dropout_p"])
    others = [0 if "Int" in str(output.type) else q.new_empty(0) for output in operation._schema.returns[1:]]
    return (share @ v, *others)


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


def uncaught() -> AbstractContextManager[object]:
    """A context in which nothing is caught: for the draws by key themselves."""
    guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(_KEY_SET)
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
    libraries["aten"].impl("dropout", _dropout, _KEY)  # composite, and caught as a whole: one call instead of three
    return list(libraries.values())


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    with uncaught():
        keyed: KeyedDraws | None = getattr(_thread, "keyed", None)
        return torch.dropout(x, p, train) if keyed is None else keyed.dropout(x, p, train)


def _kernel(operation: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with uncaught():
            keyed: KeyedDraws | None = getattr(_thread, "keyed", None)
            return operation(*args, **kwargs) if keyed is None else keyed.call(operation, args, kwargs)

    return call


# Of a mask, from which on SFC64 with numpy's calls around it is faster than torch's generator with one call.
MANY_VALUES = 2048
# Steps for which masks are drawn together, at most, and values of these. Between layers, a single mask of 1,280 takes
# 65 to 80 µs, most of it for code that is no longer in the processor's cache, where torch's own dropout takes 40.
STEPS_TOGETHER, VALUES_TOGETHER = 32, 2**16


@dataclass(frozen=True)
class _Masks:
    """The same draw of a client in some steps, one after the other."""

    client: int  # key of its round
    first: int  # step
    keep: float
    of_steps: tuple[Tensor, ...]  # never written to

    def has(self, client: int, step: int, keep: float, shape: torch.Size) -> bool:
        same = self.client == client and self.keep == keep and self.of_steps[0].shape == shape
        return same and 0 <= step - self.first < len(self.of_steps)


class Draws:
    """The draws of one working copy, which one thread uses at a time."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device)
        self._sfc64 = np.random.SFC64()
        self._sfc64_words = np.zeros(4, np.int64)  # three of state, and a counter
        self._sfc64_start: Any = {**self._sfc64.state, "state": {"state": self._sfc64_words.view(np.uint64)}}
        self._of_step: Batch | None = None
        self._row = 0  # of it
        self._key: int | None = None  # of the step, once it was drawn from
        self._count = 0
        # Ids of a batch; row, seed, stream and round; the key of that client's round. See `_client_key`.
        self._client: tuple[Tensor, tuple[int, int, str, int], int] | None = None
        self._masks: dict[int, _Masks] = {}  # the last ones, by number of the draw in a step

    def begin(self, batch: Batch, row: int) -> None:
        """The draws that follow are those of a training step on this row of the batch."""
        self._of_step, self._row, self._key, self._count = batch, row, None, 0

    def next(self) -> torch.Generator:
        """A generator at the start of the next draw."""
        self._generator.manual_seed(self._next_key())
        return self._generator

    def bernoulli_(self, target: Tensor, p: float = 0.5) -> Tensor:
        """`target.bernoulli_(p)` as the next draw."""
        if _comes_from_sfc64(target, p):
            # As floats: torch takes ten times as long to copy random bools.
            hits = self._hits([self._next_key()], target.shape, p)[0]
            return target.copy_(torch.from_numpy(hits.astype(np.float32)))
        if target.device.type == "cpu":
            return torch.lt(self._uniform(target), p, out=target)
        with uncaught():
            return target.bernoulli_(p, generator=self.next())

    def dropout_mask(self, x: Tensor, keep: float) -> Tensor:
        """The mask with which dropout multiplies x, as the next draw: 1 / keep with the chance `keep`, else 0."""
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return self.bernoulli_(torch.empty_like(x), keep).div_(keep)
        if x.is_contiguous() or _comes_from_sfc64(x, keep):
            return self._mask_of_a_step(x, keep)
        return _scaled(self._uniform(x).numpy() < keep, keep)

    def dropped_out(self, x: Tensor, keep: float) -> Tensor:
        """x as dropout leaves it, as the next draw."""
        return x * self.dropout_mask(x, keep)

    def dropped(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """x after dropout, as the next draw, and what is left of it."""
        mask = self.dropout_mask(x, 1 - p) if p < 1 else torch.zeros_like(x)
        return x * mask, mask > 0

    def _mask_of_a_step(self, x: Tensor, keep: float) -> Tensor:
        """The mask of a step, drawn with those of the steps ahead once a client draws the same in two steps running."""
        client, number, step, shape = self._client_key(), self._count, self._batch.step, x.shape
        masks = self._masks.get(number)
        if masks is None or not masks.has(client, step, keep, shape):
            follows = masks is not None and masks.has(client, step - 1, keep, shape)
            most = min(1 + self._batch.steps_ahead, STEPS_TOGETHER, VALUES_TOGETHER // max(shape.numel(), 1))
            keys = [rng.fold_number(client, step + ahead, number) for ahead in range(max(most, 1) if follows else 1)]
            if _comes_from_sfc64(x, keep):
                hits = self._hits(keys, shape, keep)
            else:
                draws = torch.empty(len(keys), *shape, dtype=torch.float64)
                with uncaught():
                    for key, target in zip(keys, draws.unbind(), strict=True):
                        target.uniform_(generator=self._generator.manual_seed(key))
                hits = draws.numpy() < keep
            masks = self._masks[number] = _Masks(client, step, keep, _scaled(hits, keep).unbind())
        self._count += 1
        return masks.of_steps[step - masks.first]

    def _uniform(self, like: Tensor) -> Tensor:
        """float64 in [0, 1), in the order in which `like` lies in memory. Numbers below p are where torch's
        `bernoulli_(p)` hits, in less than half of its time (9 µs for 1,280, and 20), and on every processor: by its
        source, `bernoulli_` asks another generator on those of Intel."""
        with uncaught():
            return torch.empty_like(like, dtype=torch.float64).uniform_(generator=self.next())

    def _hits(self, keys: Sequence[int], shape: torch.Size, p: float) -> NDArray[np.bool_]:
        """[len(keys), *shape] True with the chance p, from 32 random bits each, which belong to positions and not to
        memory."""
        count = shape.numel()
        words = np.empty((len(keys), (count + 1) // 2), np.uint64)
        for key, row in zip(keys, words, strict=True):
            self._sfc64_words[:3], self._sfc64_words[3] = key, 1
            self._sfc64.state = self._sfc64_start
            self._sfc64.random_raw(12, output=False)  # mixes the three equal words, as its author does
            row[:] = self._sfc64.random_raw(len(row))
        threshold = min(round(p * 2**32), 2**32 - 1) - 2**31  # below which a share p of all int32 lie
        return np.less(words.view(np.int32)[:, :count].reshape(len(keys), *shape), threshold)

    @property
    def _batch(self) -> Batch:
        if self._of_step is None:
            raise RuntimeError("a model draws outside of a training step")
        return self._of_step

    def _next_key(self) -> int:
        if self._key is None:
            self._key = rng.fold_number(self._client_key(), self._batch.step)
        self._count += 1
        return rng.fold_number(self._key, self._count - 1)

    def _client_key(self) -> int:
        """The key of the client's round. Batches of one loop share their ids, which shows that it is the same."""
        batch, row = self._batch, self._row
        which = row, batch.seed, batch.stream, batch.round
        if self._client is None or self._client[0] is not batch.ids or self._client[1] != which:
            key = _key_of(batch.seed, batch.stream, batch.round, int(batch.ids[row]))
            self._client = batch.ids, which, key
        return self._client[2]


def _scaled(hits: NDArray[np.bool_], keep: float) -> Tensor:
    """Masks by numpy: torch takes ten times as long to make floats of random bools."""
    return torch.from_numpy(hits * (np.float32(1) / np.float32(keep)))


def _comes_from_sfc64(target: Tensor, p: float) -> bool:
    return target.numel() >= MANY_VALUES and target.device.type == "cpu" and 0 < p < 1


@lru_cache(maxsize=64)
def _key_of(seed: int, stream: str, round: int, client: int) -> int:
    return rng.fold_number(int(rng.root(seed, f"draws-{stream}")), round, client)


def prepare_dropout(module: nn.Module, draws: Draws) -> None:
    """Let the `nn.Dropout` layers of a working copy draw from `draws`: the same as `nn.functional.dropout` does."""

    def forward(layer: nn.Dropout, x: Tensor) -> Tensor:
        if not layer.training or layer.p == 0:
            return x
        if layer.p == 1:
            return x * 0.0
        return x.mul_(draws.dropout_mask(x, 1 - layer.p)) if layer.inplace else draws.dropped_out(x, 1 - layer.p)

    for layer in module.modules():
        if type(layer) is nn.Dropout:
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]  # of this one copy


def drops(module: nn.Module) -> bool:
    """Whether a layer of torch in it drops values at random in training."""
    return any(_dropout_rate(layer) > 0 for layer in module.modules())


def _dropout_rate(layer: nn.Module) -> float:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p
    return layer.dropout if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) else 0.0
