"""Attributes of Python in a module's layers: what they hold, and whether a call has changed one.

A copy of a module serves many clients of a thread in turn, so an attribute that changes from call to call would depend
on the number of threads and on the clients before. Values that are set once and stay (tables of positions, masks by
shape) do no harm, nor does the output of the last call, which the same examples make the same again.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Set
from logging import Logger
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_OF_TORCH = frozenset(vars(nn.Module()))  # parameters, buffers, layers, hooks, mode
# Not entered: what torch looks after, code, and loggers, which reach all others of the process.
_LEFT_OUT = (nn.Module, nn.Parameter, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, Logger)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ADDRESS = " at 0x"  # in the text of an object that says nothing but where it lies
STATE_ROUNDING = 1e-4  # share of the largest number by which a tensor may change, as sums of several threads do
SHORT = 40  # characters of a value that an error shows


class ChangedAttribute(NamedTuple):
    layer: str  # name in the model; "" for the model itself
    name: str  # of the attribute
    before: str
    after: str


State = dict[tuple[str, str], list[tuple[str, Any]]]  # by layer and attribute: (place inside of it, plain value) each


def python_state(module: nn.Module) -> State:
    """A copy of all that attributes of the module's layers hold, and of what their classes share."""
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return {
        (layer, name): list(_leaves(value, "", seen=set(tensors)))
        for layer, child in module.named_modules()
        for name, value in _attributes(child)
    }


def changed_attribute(before: State, after: State) -> ChangedAttribute | None:
    for place in dict.fromkeys([*before, *after]):
        old, new = before.get(place, []), after.get(place, [])
        if len(old) != len(new) or any(a != b or not _equal(x, y) for (a, x), (b, y) in zip(old, new, strict=True)):
            return ChangedAttribute(*place, *_texts(old, new))
    return None


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    for kind in reversed(type(layer).__mro__):
        if issubclass(kind, nn.Module) and not kind.__module__.startswith("torch."):
            yield from ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
    yield from ((name, value) for name, value in vars(layer).items() if name not in _OF_TORCH)


def _leaves(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The plain values inside, each with its place. Objects by their ids: one that was `seen` is not entered again."""
    if isinstance(value, _PLAIN):
        yield place, value
        return
    if isinstance(value, _LEFT_OUT) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield place, value.detach().clone()
    elif isinstance(value, np.ndarray):
        yield place, value.copy()
    elif isinstance(value, Mapping):
        yield place, f"{len(value)} entries"
        for number, (key, inner) in enumerate(value.items()):
            yield from _leaves(key, f"{place}[key {number}]", seen)
            yield from _leaves(inner, f"{place}[{number}]", seen)
    elif isinstance(value, Set):
        yield place, frozenset(value)
    elif isinstance(value, list | tuple | deque):
        yield place, f"{len(value)} entries"
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{place}[{number}]", seen)
    elif inside := getattr(value, "__dict__", None):
        for name, inner in inside.items():
            yield from _leaves(inner, f"{place}.{name}", seen)
    elif _ADDRESS not in (text := repr(value)):  # dtypes, devices, itertools.count
        yield place, text


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            return torch.equal(a, b)
        a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
        largest = float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
        return torch.allclose(a, b, rtol=0.0, atol=STATE_ROUNDING * largest, equal_nan=True)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    return type(a) is type(b) and (a == b or (a != a and b != b))  # NaN stays NaN


def _texts(old: list[tuple[str, Any]], new: list[tuple[str, Any]]) -> tuple[str, str]:
    """The first values that differ, in short."""
    before, after = dict(old), dict(new)
    for place in dict.fromkeys([*before, *after]):
        if place not in before or place not in after or not _equal(before[place], after[place]):
            return _text(before, place), _text(after, place)
    return "", ""


def _text(values: Mapping[str, Any], place: str) -> str:
    if place not in values:
        return "nothing"
    value = values[place]
    if isinstance(value, Tensor | np.ndarray):
        return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} of shape {list(value.shape)}"
    text = f"{len(value)} entries" if isinstance(value, frozenset) else str(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}..."
