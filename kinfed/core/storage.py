"""Files that survive a crash: written beside their place, synced, then renamed into it.

At every moment a path holds its old content or its new content, complete. What a killed process leaves behind is
a *draft* (".draft-*.tmp"), which nothing reads and the next writer removes. An error of the disk becomes a
StorageError that names path, reason and remedy.

Tensors are stored in the safetensors format (8 bytes length, a JSON header, the raw data), written here block by
block: the state of a large population is never held twice, also where it is a view or an `expand()`, and the
checksum is that of what was meant to be written, not of what a bad disk gives back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from kinfed.errors import StorageError

BLOCK_BYTES = 1 << 24

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_FIRST_KEYS = ("algorithm", "seed", "round", "client")
_draft_number = itertools.count()


class Draft:
    """A file in the making; it appears under its name by `keep_as`, or never."""

    def __init__(self, folder: Path):
        self.path = folder / f".draft-{os.getpid()}-{next(_draft_number)}.tmp"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self.size += len(data)
        write_all(self._file, data)

    def keep_as(self, path: Path) -> None:
        """Sync before the rename, so that the name never stands for content that is still on its way to the disk."""
        os.fsync(self._file)
        os.replace(self.path, path)
        sync_folder(path.parent)

    def close(self) -> None:
        try:
            os.close(self._file)
        finally:
            with contextlib.suppress(FileNotFoundError):  # renamed: nothing to throw away
                os.unlink(self.path)


@contextlib.contextmanager
def draft(folder: Path) -> Iterator[Draft]:
    """A draft in this folder, gone at the end unless kept."""
    opened = Draft(folder)
    try:
        yield opened
    finally:
        opened.close()


def write_atomically(path: Path, data: bytes) -> None:
    with reporting("write", path), draft(path.parent) as new:
        new.write(data)
        new.keep_as(path)


def write_json(path: Path, value: Any, *, sort_keys: bool = True) -> None:
    write_atomically(path, (to_json(value, indent=2, sort_keys=sort_keys) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        with reporting("read", path):
            return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: not valid JSON ({error}); restore it or run again elsewhere") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    with reporting("write", path), draft(path.parent) as new:
        draft_tensors(new, tensors, metadata)
        new.keep_as(path)


def draft_tensors(new: Draft, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """The same tensors give the same bytes, whatever their order in the mapping and their strides in memory."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    # Wide types first, as safetensors does itself: with a padded header every tensor starts aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES or name == "__metadata__":
            raise ValueError(f"cannot store {name!r} of type {tensor.dtype}; known: {', '.join(map(str, _DTYPES))}")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    new.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        for block in _blocks(tensor.detach()):
            new.write(block.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel() == 0:
        return
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    row_bytes = rows[0].numel() * rows.element_size()
    yield from torch.split(rows, max(1, BLOCK_BYTES // row_bytes))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors that own their memory: the file may be replaced or deleted afterwards."""
    try:
        with reporting("read", path), safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise StorageError(f"{path} is damaged: not a complete safetensors file ({error})") from None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with reporting("read", path), path.open("rb", buffering=0) as file:
        block = bytearray(min(BLOCK_BYTES, max(1, path.stat().st_size)))
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def to_json(value: Any, *, indent: int | None = None, sort_keys: bool = True) -> str:
    """Valid JSON, and the same text for the same value.

    Floats are written as `repr` does, NaN and infinities as null; tensors and arrays become lists.
    With `sort_keys` the keys that identify a record lead and the others follow in alphabetical order.
    """
    return json.dumps(_plain(value, sort_keys, "value"), indent=indent, allow_nan=False)


def _plain(value: Any, sort_keys: bool, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
        if sort_keys:
            items.sort(key=lambda item: (_rank(item[0]), item[0]))
        return {key: _plain(item, sort_keys, f"{where}.{key}") for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, sort_keys, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors, numpy arrays and numpy scalars
        return _plain(value.tolist(), sort_keys, where)
    raise TypeError(f"{where} is a {type(value).__name__}, which has no place in JSON")


def _rank(key: str) -> int:
    return _FIRST_KEYS.index(key) if key in _FIRST_KEYS else len(_FIRST_KEYS)


def file_name(text: str) -> str:
    """A file name for any text, different for different texts; letters, digits and -_.=,+ stay as they are."""
    name = urllib.parse.quote(text, safe="-_.=,+")
    return "%2E" + name[1:] if name.startswith(".") else name


def make_folder(path: Path) -> None:
    with reporting("create the folder", path):
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)


def remove_drafts(folder: Path) -> None:
    """What killed writers left; only for the one process that may write in this folder."""
    with reporting("clean", folder):
        for path in folder.glob(".draft-*.tmp"):
            path.unlink(missing_ok=True)


def write_all(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def sync_folder(path: Path) -> None:
    """Make renames and deletions in a folder durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        # Some network file systems cannot sync a folder and keep the order of renames by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(file)


_REMEDY = {
    errno.ENOSPC: "free some space or choose a folder on another disk; what was written before is intact",
    errno.EDQUOT: "your quota is used up; free some space or choose another folder; what was written before is intact",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f); what was written before is intact",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.EACCES: "choose a folder that you may write and read",
    errno.EPERM: "choose a folder that you may write and read",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file; choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextlib.contextmanager
def reporting(action: str, path: Path) -> Iterator[None]:
    """OSErrors inside become StorageErrors: cannot <action> <path>: <reason>; <remedy>."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0)
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {action} {path}: {reason}" + (f"; {remedy}" if remedy else "")) from error
