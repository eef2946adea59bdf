"""Compiled calls of the fused backend, kept as machine code: made once by numba, loaded ever after without it.

Compiling a kernel takes up to ten seconds, and importing numba half a second; what it compiled is one object file that
llvmlite links in milliseconds. Files lie in the cache folder, readable and writable by their owner only, because what
they hold is run. Their names hold an identity of all that the code depends on (its text, versions, the processor), so
nothing is ever out of date. A file that is damaged is made again, and a folder that cannot be used costs time, not the
result.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from kinfed.core import cache, storage
from kinfed.errors import ModelError, StorageError

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
# What goes into kernels, with the constants that it reads.
CODE_FILES = [
    *sorted(Path(__file__).parent.glob("*.py")),
    _PACKAGE / "core/rng.py",
    _PACKAGE / "data/examples/windows.py",
]
# Settings of numba's that have no part in what it compiles; all others are part of the identity.
NOT_IN_CODE = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY")
KEPT_DAYS = 30  # for code of other versions and processors
_WORD = 8  # bytes
_ENDED_WELL = (0, -2)  # as numba numbers it: with a result, and with None
# Kernels allocate nothing, so numba's runtime is never asked to free anything. If it were, the process would stop.
_NEVER_CALLED = ("NRT_MemInfo_call_dtor", "NRT_Free")
_LOCK = threading.Lock()
_LOADED: dict[str, Kernel] = {}
_LIBRARIES = count()  # of one process: names of libraries are never used again


@dataclass(frozen=True)
class MachineCode:
    """A function of one argument: the address of words (64 bits), which stand for `arguments` by name: "word" for a
    whole number, [dtype, axes] for an array in C order, and a dictionary of such for a named tuple."""

    symbol: str
    arguments: dict[str, Any]
    content: bytes  # an object file

    def as_bytes(self, name: str) -> bytes:
        """`name`: of the file, which is good under no other."""
        header = json.dumps({"symbol": self.symbol, "arguments": self.arguments}).encode()
        return cache.sealed(len(header).to_bytes(_WORD, "little") + header + self.content, name)

    @classmethod
    def from_bytes(cls, content: bytes, name: str) -> MachineCode | None:
        """None if they are not what was written under this name."""
        rest = cache.unsealed(content, name)
        if rest is None:
            return None
        begin = _WORD + int.from_bytes(rest[:_WORD], "little")
        return cls(**json.loads(rest[_WORD:begin]), content=rest[begin:])


class Kernel:
    """Machine code as a function. A call holds no lock of the interpreter, and threads may call at the same time."""

    def __init__(self, name: str, code: MachineCode) -> None:
        """Code that the system cannot link raises a RuntimeError of llvmlite's."""
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
    """`train`, `program`, `step` or `score` of a `dense` or `recurrent` network for `classes` or `numbers`."""
    kernel = f"{name}-{network}-{target}"

    def compile_it() -> MachineCode:
        from kinfed.engine.compiled.fused_kernels import compile_kernel  # numba: only needed while no code is stored

        return compile_kernel(name, network, target)

    return loaded_kernel(kernel, compile_it)


def loaded_kernel(name: str, compile_it: Callable[[], MachineCode]) -> Kernel:
    """The kernel of that name, loaded or compiled at the first call. Whatever the kernels, one thread at a time: numba
    renews what it knows of types where a compilation begins, and others would see half of it."""
    if name not in _LOADED:
        with _LOCK:
            if name not in _LOADED:
                _LOADED[name] = kept_kernel(name, compile_it)
    return _LOADED[name]


def is_compiled(name: str, network: str, target: str) -> bool:
    """Whether `compiled_kernel` has this kernel in memory or in the cache folder."""
    kernel = f"{name}-{network}-{target}"
    return kernel in _LOADED or _read(kernel) is not None


def kept_kernel(name: str, compile_it: Callable[[], MachineCode]) -> Kernel:
    """The kernel in the cache folder for this code and this processor; compiled and put there where it is missing."""
    stored = _read(name)
    if stored is not None:
        try:
            return Kernel(name, stored)
        except RuntimeError as error:
            log.warning("%s, as it was kept, cannot be linked: %s", name, error)
    log.info("compiling %s for this processor, once: up to ten seconds", name)
    before = _identity()
    code = compile_it()
    try:
        kernel = Kernel(name, code)
    except RuntimeError as error:
        raise ModelError(f"compiled loops cannot be linked on this system ({error}); use backend = stacked") from error
    if _identity.__wrapped__() == before:  # a file that was edited since may be in the code, or not
        _keep(name, code)
    return kernel


def _file(name: str) -> Path:
    return cache.cache_folder() / "machine-code" / f"{name}-{_identity()}.code"


def _read(name: str) -> MachineCode | None:
    try:
        path = _file(name)
        with path.open("rb") as file:
            if not _is_ours(os.fstat(file.fileno())):
                log.warning("%s can be written by others, so it is not run", path)
                return None
            content = file.read()
    except FileNotFoundError:
        return None
    except (OSError, StorageError) as error:
        log.warning("compiled code cannot be read: %s", error)
        return None
    code = MachineCode.from_bytes(content, path.name)
    if code is None:
        log.warning("%s is damaged; compiling it again", path)
    return code


def _keep(name: str, code: MachineCode) -> None:
    try:
        path = _file(name)
        storage.make_folder(path.parent)
        storage.write_atomically(path, code.as_bytes(path.name), private=True)
        for other in path.parent.glob(f"{name}-*.code"):
            if time.time() - other.stat().st_mtime > KEPT_DAYS * 24 * 3600:
                with contextlib.suppress(OSError):
                    other.unlink()
    except (OSError, StorageError) as error:
        log.warning("%s; %s will be compiled again next time", error, name)


def _is_ours(status: os.stat_result) -> bool:
    """Whether only its owner, this user or the system, can have written a file."""
    return not hasattr(os, "getuid") or (status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022)


@functools.cache
def _identity() -> str:
    """16 hexadecimal digits that change with what goes into kernels, what compiles them, and for which processor."""
    from llvmlite import binding

    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in NOT_IN_CODE)
    state = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for text in (
        version("numba"), version("llvmlite"), np.__version__, sys.implementation.cache_tag,
        binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(),
    ):  # fmt: skip
        state.update(str(text).encode() + b"\0")
    for file in CODE_FILES:
        state.update(file.read_bytes())
    return state.hexdigest()


@functools.cache
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


_Pack = Callable[[Sequence[Any], list[int]], None]


def _packer(arguments: Mapping[str, Any], inside: str = "") -> _Pack:
    """A function that appends the words of arguments to a list. Arrays of another type would be misread: an error."""
    kinds = [(inside + name, _kind(inside + name, argument)) for name, argument in arguments.items()]

    def pack(values: Sequence[Any], words: list[int]) -> None:
        for (name, kind), value in zip(kinds, values, strict=True):
            if kind is None:
                words.append(value)
            elif isinstance(kind, tuple):
                dtype, axes = kind
                flags = value.flags
                if value.dtype != dtype or value.ndim != axes or not (flags.c_contiguous and flags.behaved):
                    raise TypeError(
                        f"{name} should be an array of {dtype} in C order that can be written, {axes}-dimensional; "
                        f"it has type {value.dtype}, shape {value.shape} and strides {value.strides}, "
                        f"{'writable' if flags.writeable else 'read-only'}"
                    )
                words.append(value.__array_interface__["data"][0])
                words.extend(value.shape)
            else:
                kind(value, words)

    return pack


def _kind(name: str, argument: Any) -> tuple[np.dtype[Any], int] | _Pack | None:
    if argument == "word":
        return None
    if isinstance(argument, list):
        return np.dtype(argument[0]), argument[1]
    return _packer(argument, f"{name}.")
