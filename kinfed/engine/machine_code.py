"""Compiled calls of the fused backend, kept as machine code: made once by numba, loaded ever after without it.

Compiling takes about ten seconds, and importing numba half a second; what it compiled is one object file that llvmlite
links in milliseconds. Files lie in the cache folder. Their names hold an identity of all that the code depends on (its
text, versions, the processor), so nothing is ever out of date. A file that is damaged is made again, and a folder that
cannot be written costs time, not the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.core import storage
from kinfed.core.cache import cache_folder
from kinfed.errors import StorageError

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_ENGINE_CODE = (  # what goes into kernels, with the constants that it reads
    "vector_code", "vector_functions", "tiles", "products", "lstm_cells", "fused_orders", "fused_steps",
    "fused_recurrent", "fused_choice", "fused_program", "fused_moves", "fused_kernels", "kernel_arguments",
    "machine_code",
)  # fmt: skip
CODE_FILES = [*(f"engine/{name}.py" for name in _ENGINE_CODE), "core/rng.py", "data/windows.py"]
_DIGEST = 16  # bytes in front of a file: code that is damaged must not be run
_WORD = 8  # bytes
_ENDED_WELL = (0, -2)  # as numba numbers it: with a result, and with None
# Kernels make no arrays; those that they are given belong to the caller, and nothing is let go. Should code ask for
# it all the same, the process ends.
_NEVER_CALLED = ("NRT_MemInfo_call_dtor", "NRT_Free")
_LOCK = threading.Lock()


@dataclass(frozen=True)
class MachineCode:
    """A function of one argument: the address of words (64 bits), which stand for `arguments`.

    Each of these is "word" for a whole number, [type, dimensions] for an array, and a list of such for a tuple.
    """

    symbol: str
    arguments: list[Any]
    content: bytes  # an object file

    def as_bytes(self) -> bytes:
        header = json.dumps({"symbol": self.symbol, "arguments": self.arguments}).encode()
        rest = len(header).to_bytes(_WORD, "little") + header + self.content
        return hashlib.blake2b(rest, digest_size=_DIGEST).digest() + rest

    @classmethod
    def from_bytes(cls, content: bytes) -> MachineCode | None:
        """None if they are not what was written."""
        digest, rest = content[:_DIGEST], content[_DIGEST:]
        if hashlib.blake2b(rest, digest_size=_DIGEST).digest() != digest:
            return None
        begin = _WORD + int.from_bytes(rest[:_WORD], "little")
        return cls(**json.loads(rest[_WORD:begin]), content=rest[begin:])


class Kernel:
    """Machine code as a function. A call holds no lock of the interpreter, and threads may call at the same time."""

    def __init__(self, name: str, code: MachineCode) -> None:
        self._name, self._library = name, _link(name, code)
        self._pack = _packer(code.arguments)
        status, words = ctypes.c_int32, (ctypes.c_int64,) * 3
        self._function = ctypes.CFUNCTYPE(status, *words)(self._library[code.symbol])

    def __call__(self, *arguments: Any) -> None:
        words = [0, 0]  # where the code writes its result, which is None, and what went wrong
        self._pack(arguments, words)
        memory = array("q", words)
        address, _ = memory.buffer_info()
        status = self._function(address, address + _WORD, address + 2 * _WORD)
        if status not in _ENDED_WELL:
            raise RuntimeError(f"the compiled call {self._name} ended with status {status}")


def compiled_kernel(name: str, network: str, target: str) -> Kernel:
    """`train`, `move`, `step` or `score` of a `dense` or `recurrent` network for `classes` or `numbers`, loaded or
    compiled at the first call; threads that come at the same time wait."""
    with _LOCK:
        return _kernel(name, network, target)


@cache
def _kernel(name: str, network: str, target: str) -> Kernel:
    def compile_it() -> MachineCode:
        from kinfed.engine.fused_kernels import compile_kernel  # numba: only where there is no code yet

        return compile_kernel(name, network, target)

    full_name = f"{name}-{network}-{target}"
    return Kernel(full_name, kept_code(full_name, compile_it))


def kept_code(name: str, make: Callable[[], MachineCode]) -> MachineCode:
    """What lies in the cache folder for this code and this processor; made and put there where it is not."""
    path = cache_folder() / "machine-code" / f"{name}-{_identity()}.code"
    try:
        code = MachineCode.from_bytes(path.read_bytes())
    except OSError:
        code = None
    if code is None:
        code = make()
        try:
            storage.make_folder(path.parent)
            storage.write_atomically(path, code.as_bytes())
        except StorageError as error:
            log.warning("%s; %s will be compiled again next time", error, name)
    return code


@cache
def _identity() -> str:
    """16 hexadecimal digits that change with what goes into kernels, what compiles them, and for which processor."""
    from llvmlite import binding

    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    state = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for text in (
        version("numba"), version("llvmlite"), sys.platform, binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
    ):  # fmt: skip
        state.update(text.encode() + b"\0")
    for name in CODE_FILES:
        state.update((_PACKAGE / name).read_bytes())
    return state.hexdigest()


@cache
def _linker() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler()


def _link(name: str, code: MachineCode) -> Any:
    """The addresses of its symbols; the code stays in memory as long as this lives."""
    from llvmlite import binding

    end_process = ctypes.cast(ctypes.pythonapi.Py_FatalError, ctypes.c_void_p).value
    builder = binding.JITLibraryBuilder().add_object_img(code.content).add_current_process()
    for symbol in _NEVER_CALLED:
        builder.import_symbol(symbol, end_process)
    return builder.export_symbol(code.symbol).link(_linker(), f"{name}-{next(_LIBRARIES)}")


_LIBRARIES = iter(range(1 << 62))  # of one process: names are never used again

_Pack = Callable[[Sequence[Any], list[int]], None]


def _packer(arguments: Iterable[Any]) -> _Pack:
    """A function that appends the words of arguments to a list. Arrays of another type are a mistake, and would be read
    as if they were of this one: they are refused."""
    kinds = [_kind(argument) for argument in arguments]

    def pack(values: Sequence[Any], words: list[int]) -> None:
        for kind, value in zip(kinds, values, strict=True):
            if kind is None:
                words.append(value)
            elif isinstance(kind, tuple):
                dtype, dimensions = kind
                if value.dtype != dtype or value.ndim != dimensions or not value.flags.c_contiguous:
                    raise TypeError(f"wanted an array of {dtype}, {dimensions}-dimensional, not {value!r}")
                words.append(value.__array_interface__["data"][0])
                words.extend(value.shape)
            else:
                kind(value, words)

    return pack


def _kind(argument: Any) -> tuple[np.dtype[Any], int] | _Pack | None:
    if argument == "word":
        return None
    if isinstance(argument[0], str) and isinstance(argument[1], int):
        return np.dtype(argument[0]), argument[1]
    return _packer(argument)
