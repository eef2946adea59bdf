"""A device that is not there: tensors say that they are on "gpu:0", their numbers lie in the processor's memory.

What a real accelerator refuses is refused: operations on tensors of both sides (numbers without axes, indices and
copies aside), and a look at the memory of a tensor from numpy. What costs time there is counted by the line of kinfed
that asked for it: copies to and from the device, and waits of the host for a number that the device computes. The
arithmetic is the processor's, so that results can be compared, to the bit, with those of a run without a device.

Importing this file registers the device for the whole process, which cannot be taken back and changes nothing else.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import kinfed

NAME = "gpu"
DEVICE = torch.device("cpu")  # until the device is registered, below
CPU = torch.device("cpu")
SOURCES = str(Path(kinfed.__file__).parent)
COPIES = {"aten::_to_copy", "aten::copy_"}
# The host waits for these: their result is a number for Python, or has a shape that depends on values.
WAITS = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero"),
    *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave"),
}
# Indices may come from the host's memory (which copies them), and masks make the host wait.
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Torch makes these by changing the shape of an empty tensor, which tensors of the pretend device cannot do.
FACTORIES = (
    *("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm", "tril_indices"),
    *("triu_indices",),
)
_LIBRARY, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")


class Traffic:
    """Copies to and from the device and waits for it, by the line of kinfed that asked for them."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {"to": Counter(), "from": Counter(), "waits": Counter()}

    def __getitem__(self, kind: str) -> int:
        return self.counts[kind].total()

    def __str__(self) -> str:
        return "\n".join(
            f"{kind}: {lines.total()}" + "".join(f"\n{count:6d} {line}" for line, count in lines.most_common())
            for kind, lines in self.counts.items()
        )


_open: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what happens inside."""
    counter = Traffic()
    _open.append(counter)
    try:
        yield counter
    finally:
        _open.remove(counter)


def _count(kind: str) -> None:
    if _open:
        line = _line_of_kinfed()
        for counter in _open:
            counter.counts[kind][line] += 1


def _line_of_kinfed() -> str:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere" if frame is None else f"{frame.f_code.co_filename[len(SOURCES) + 1 :]}:{frame.f_lineno}"


class DeviceTensor(Tensor):
    """A tensor on the device; `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> DeviceTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, host: Tensor, requires_grad: bool = False) -> None:
        self.host = host

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"<on {DEVICE}: {self.host}>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _on_device(func, *args, **(kwargs or {}))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = DeviceTensor(self.host.clone(), self.requires_grad)
            memo[id(self)]._is_param = isinstance(self, torch.nn.Parameter)  # as torch marks those of other classes
        return memo[id(self)]  # type: ignore[no-any-return]

    def new_tensor(self, data: Any, **others: Any) -> Tensor:
        return _tensor(data, **{"dtype": self.dtype, "device": self.device, **others})

    def tolist(self) -> Any:
        _count("waits")
        return self.host.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _on_device(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One operation, asked for by a tensor on the device or by name of the device."""
    name = func._schema.name
    tensors = [x for x in _members((*args, *kwargs.values())) if isinstance(x, Tensor)]
    target = kwargs.get("device") or (tensors[0].device if tensors else DEVICE)
    if name in COPIES:
        source = args[0] if name == "aten::_to_copy" else args[1]
        if source.device != target:
            _count("to" if target.type == NAME else "from")
    else:
        _refuse_mixing(name, tensors)
        masks = name in INDEXING and any(x.dtype == torch.bool for x in tensors[1:])
        if masks or name in WAITS:
            _count("waits")
        elif name in INDEXING and any(type(x) is not DeviceTensor and x.dim() for x in tensors):
            _count("to")  # numbers of rows that the host holds
    kwargs.pop("pin_memory", None)
    result = func(*map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})
    if target.type != NAME:
        return args[0] if name == "aten::copy_" else result
    known = {id(x.host): x for x in tensors if type(x) is DeviceTensor}
    if isinstance(result, Tensor):
        return _wrapped(result, known)
    if isinstance(result, tuple | list):
        outputs = [_wrapped(x, known) if isinstance(x, Tensor) else x for x in result]
        return outputs if isinstance(result, list) else tuple(outputs)
    return result


def _members(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


def _refuse_mixing(name: str, tensors: list[Tensor]) -> None:
    kept = [x for x in tensors if x.dim() or type(x) is DeviceTensor]
    if name in INDEXING and kept and type(kept[0]) is DeviceTensor:
        kept = [
            x for x in kept if x.dtype not in (torch.bool, torch.int64) or x is kept[0]
        ]  # indices may be the host's
    if len({type(x) is DeviceTensor for x in kept}) > 1:
        parts = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device; {name} got {parts}")


def _on_host(x: Any) -> Any:
    if type(x) is DeviceTensor:
        return x.host
    if isinstance(x, torch.device):
        return CPU
    if isinstance(x, tuple | list) and any(type(one) is DeviceTensor for one in x):
        return [_on_host(one) for one in x]
    return x


def _wrapped(x: Tensor, known: dict[int, DeviceTensor]) -> Tensor:
    own = known.get(id(x))
    if own is None:
        return DeviceTensor(x)
    if own.shape != x.shape:
        own.data = DeviceTensor(x)  # shape and strides alone; products of vectors and matrices end in `squeeze_`
    return own


class _Generator(torch.Generator):
    """Generators of the device are the processor's: torch lets no Python file bring others."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, CPU)


def _tensor(data: Any, *, device: Any = None, **others: Any) -> Tensor:
    """`torch.tensor`, which makes tensors of other devices without asking Python."""
    made = _torch_tensor(data, **others)
    return made if device is None else made.to(device)


@contextmanager
def pretended() -> Iterator[torch.device]:
    """The device, while what torch does not let a Python file bring is stood in for."""
    torch.Generator, torch.tensor = _Generator, _tensor  # type: ignore[misc, assignment]
    try:
        yield DEVICE
    finally:
        torch.Generator, torch.tensor = _torch_generator, _torch_tensor  # type: ignore[misc]


_torch_generator, _torch_tensor = torch.Generator, torch.tensor


class _Device:
    """What torch asks the module of a device."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Generators are the processor's."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
_LIBRARY.fallback(_on_device, "PrivateUse1")
for _name in FACTORIES:
    _overloads = getattr(torch.ops.aten, _name.partition(".")[0])
    _function = getattr(_overloads, _name.partition(".")[2] or "default")
    _ATEN.impl(_name, partial(_on_device, _function), "PrivateUse1")
DEVICE = torch.device(NAME, 0)
