"""Files that survive a crash: written beside their place, synced, then renamed into it.

At every moment a path holds its old content or its new content, complete. What a killed process leaves behind is
a *draft* (".draft-*.tmp"), which nothing reads and the next writer removes. An error of the disk becomes a
StorageError that names path, reason and remedy.

Tensors are stored in the safetensors format (8 bytes length, a JSON header, the raw data), written here block by
block: the state of a large population is never held twice, also where it is a view or an `expand()`. The header holds
a checksum of the tensors, taken from memory before anything is written, and `read_tensors` compares it: a file that
was cut or altered is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import reprlib
import unicodedata
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinfed.core.options import adapter_of
from kinfed.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor


BLOCK_BYTES = 1 << 24
CHECKSUM = "digest"  # its name in the metadata of a tensor file

_DTYPES = {  # by torch's names: storing no tensors waits for no torch
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_PLAIN_TYPES = frozenset({int, str, bool, type(None)})
# In a JSON file: whole numbers have 64 bits at most, others are finite, and no record is deeper than functions call.
_LARGEST: dict[type, float] = {int: 2**63, float: math.inf}
_DEEPEST = 60
_FIRST_KEYS = {"algorithm": 0, "seed": 1, "round": 2, "client": 3}
_draft_number = itertools.count()


class Draft:
    """A file in the making; it appears under its name by `commit`, or never."""

    def __init__(self, folder: Path, private: bool = False):
        """A `private` file is for its owner's eyes only, from the first byte on."""
        self.path = folder / f".draft-{os.getpid()}-{next(_draft_number)}.tmp"
        binary = getattr(os, "O_BINARY", 0)  # Windows would translate line ends otherwise
        mode = 0o600 if private else 0o666
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | binary, mode)
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        assert self._file is not None, "a draft is written before it is committed"
        self.size += len(data)
        write_all(self._file, data)

    def reserve(self, nbytes: int) -> None:
        """Take room on the disk, for as long as the draft is there; OSError if it has none."""
        assert self._file is not None, "a draft is written before it is committed"
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, nbytes)
            return
        for begin in range(0, nbytes, BLOCK_BYTES):
            write_all(self._file, bytes(min(BLOCK_BYTES, nbytes - begin)))

    def commit(self, path: Path) -> None:
        """Sync before the rename, so that the name never stands for content that is still on its way to the disk;
        close before it, because Windows renames no open file."""
        assert self._file is not None, "a draft is committed once"
        os.fsync(self._file)
        self._close()
        os.replace(self.path, path)
        sync_folder(path.parent)

    def close(self) -> None:
        try:
            self._close()
        finally:
            with contextlib.suppress(FileNotFoundError):  # renamed: nothing to throw away
                os.unlink(self.path)

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def draft(folder: Path, private: bool = False) -> contextlib.closing[Draft]:
    """A draft in this folder, gone at the end unless committed."""
    return contextlib.closing(Draft(folder, private))


def write_atomically(path: Path, data: bytes, private: bool = False) -> None:
    with storage_errors("write", path), draft(path.parent, private) as new:
        new.write(data)
        new.commit(path)


def write_json(
    path: Path, value: Any, *, sort_keys: bool = True, private: bool = False, indent: int | None = 2
) -> None:
    """`indent` None: on one line, a third of the size and many times as fast with long lists."""
    write_atomically(path, (to_json(value, indent=indent, sort_keys=sort_keys) + "\n").encode(), private)


def read_json(path: Path, content: str = "a JSON file of kinfed") -> dict[str, Any]:
    """The object in a JSON file; `content` says in errors what the file should be."""
    if not path.exists():
        raise StorageError(f"{path} does not exist; it should be {content}")
    try:
        with storage_errors("read", path):
            value = parse_json(path.read_bytes())
    except ValueError as error:
        raise StorageError(f"{path} is damaged: not valid JSON ({error}); restore it or run again elsewhere") from None
    if not isinstance(value, dict):
        raise StorageError(f"{path} is not {content}: it holds a {type(value).__name__}, not an object")
    return value


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text as `to_json` writes it; ValueError for any other: no JSON, numbers that are not finite
    or have more than 64 bits, lists in lists without an end."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too many lists in lists") from None
    level, depth = [value], 0
    while level:
        if any(type(one) in (int, float) and not abs(one) < _LARGEST[type(one)] for one in level):
            raise ValueError("a number that is too large, or not finite")
        if (depth := depth + 1) > _DEEPEST:
            raise ValueError("too many lists in lists")
        inner = [one if type(one) is list else one.values() for one in level if type(one) in (list, dict)]
        level = list(itertools.chain.from_iterable(inner))
    return value


def as_record(kind: Any, value: Any, where: str) -> Any:
    """What a file holds as a type: JSON's own, lists and tables of them, dataclasses. StorageError says what is wanted
    and what came, with `where` as the name of the file."""
    from pydantic import ValidationError  # where it is needed: a folder is listed without it

    try:
        return adapter_of(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        wanted = first["msg"].replace("Input should", "should").replace("Field required", "is missing")
        if first["type"] == "dataclass_type":
            wanted = "should be a table of names"
        came = "" if first["type"] == "missing" else f", and is {reprlib.repr(first['input'])}"
        raise StorageError(
            f"{where}: {f'{place} ' if place else ''}{wanted}{came}; restore the file, or have it written again"
        ) from None


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, private: bool = False
) -> str:
    """Write tensors with their checksum, which is returned too; `metadata` goes into the header beside it."""
    with storage_errors("write", path), draft(path.parent, private) as new:
        digest = draft_tensors(new, tensors, metadata)
        new.commit(path)
    return digest


def draft_tensors(new: Draft, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """`write_tensors` into a draft, for names that depend on the checksum.

    The same tensors give the same bytes, whatever their order in the mapping and their strides in memory."""
    digest = checksum(tensors)
    header: dict[str, Any] = {"__metadata__": dict(sorted({**(metadata or {}), CHECKSUM: digest}.items()))}
    # Wide types first, as safetensors does itself: with a padded header every tensor starts aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    new.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        for block in _blocks(tensor):
            new.write(block)
    return digest


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits of names, types, shapes and contents, whatever the order and the strides in memory."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if str(tensor.dtype) not in _DTYPES or name == "__metadata__":
            raise ValueError(f"cannot store {name!r} of type {tensor.dtype}; known: {', '.join(_DTYPES)}")
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for block in _blocks(tensor):
            state.update(block)
    return state.hexdigest()[:32]


def record_digest(record: Any) -> str:
    """64 hexadecimal digits of a record as JSON, whatever the order of its keys; a path counts as its text."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor from its first element to its last, a few at a time."""
    if tensor.numel() == 0:
        return
    import torch

    tensor = tensor.detach()
    if tensor.numel() == 1:  # as an `expand()`, it may be contiguous with a stride of zero
        tensor = tensor.reshape(1).clone(memory_format=torch.contiguous_format)
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    row_bytes = rows[0].numel() * rows.element_size()
    for block in torch.split(rows, max(1, BLOCK_BYTES // row_bytes)):
        yield block.cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by `write_tensors`; StorageError for any other and for a damaged one.

    They own their memory: the file may be replaced or deleted afterwards."""
    with _open_tensors(path) as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if metadata.get(CHECKSUM) != checksum(tensors):
        raise StorageError(f"{path} is damaged: its content does not match its checksum; restore it or write it again")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Metadata that `write_tensors` was given, and the checksum under CHECKSUM; tensors are not read."""
    with _open_tensors(path) as file:
        return dict(file.metadata() or {})


@contextlib.contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    import safetensors

    try:
        with storage_errors("read", path), safetensors.safe_open(path, framework="pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise StorageError(f"{path} is damaged: not a complete safetensors file ({error})") from None


def to_json(value: Any, *, indent: int | None = None, sort_keys: bool = True) -> str:
    """Valid JSON, and the same text for the same value.

    Floats are written as `repr` does, NaN and infinities as null; tensors and arrays become lists.
    With `sort_keys` the keys that identify a record lead and the others follow in alphabetical order.
    """
    return json.dumps(_plain(value, sort_keys, "value"), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """The value that reading its `to_json` gives back."""
    return _plain(value, False, "value")


def _plain(value: Any, sort_keys: bool, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
        if sort_keys:
            items.sort(key=lambda item: (_FIRST_KEYS.get(item[0], len(_FIRST_KEYS)), item[0]))
        return {key: _plain(item, sort_keys, f"{where}.{key}") for key, item in items}
    if isinstance(value, list | tuple):
        if all(type(item) in _PLAIN_TYPES for item in value):  # long lists of numbers, without a call for each
            return list(value)
        return [_plain(item, sort_keys, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors, numpy arrays and numpy scalars
        return _plain(value.tolist(), sort_keys, where)
    raise TypeError(f"{where} is a {type(value).__name__}, which has no place in JSON")


def file_name(text: str, *, any_letters: bool = False) -> str:
    """A file name for any text, different for different texts; letters, digits and -_.=,+ stay as they are. Letters are
    a to z, or with `any_letters` those of all scripts and blanks inside, for files that people look for.

    It is the same on all systems, so a folder can move between them: names that Windows reserves for devices and dots
    at the end, which Windows drops, are quoted everywhere."""
    stays = "-_.=,+"
    if any_letters:
        # Characters of their own alone: systems differ in how they compose accents.
        own = {c for c in text if c.isalnum() and unicodedata.is_normalized("NFC", c)}
        name = "".join(c if c in own else urllib.parse.quote(c, stays + " ") for c in text)
        name = f"%20{name[1:]}" if name.startswith(" ") else name
        name = f"{name[:-1]}%20" if name.endswith(" ") else name
    else:
        name = urllib.parse.quote(text, safe=stays)
    if name.startswith(".") or _DEVICE.fullmatch(name):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name[:-1] + "%2E" if name.endswith(".") else name


def make_folder(path: Path) -> None:
    with storage_errors("create the folder", path):
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)


def remove_drafts(folder: Path) -> None:
    """Remove what killed writers left; only for the one process that may write in this folder."""
    with storage_errors("clean", folder):
        for path in folder.glob(".draft-*.tmp"):
            path.unlink(missing_ok=True)


def write_all(file: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def sync_folder(path: Path) -> None:
    """Make renames and deletions in a folder durable. Windows cannot open folders and needs no such call."""
    if os.name == "nt":
        return
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
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose a folder that you may write and read"),
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of this path is a file; choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


@contextlib.contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """OSErrors inside become StorageErrors: cannot <action> <path>: <reason>; <remedy>."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0)
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {action} {path}: {reason}" + (f"; {remedy}" if remedy else "")) from error


# Starts of texts that a spreadsheet reads as formulas, and runs, in a CSV file that people open with one.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(text: str) -> str:
    """The text, led by an apostrophe where a spreadsheet would read a formula; numbers stay as they are."""
    return f"'{text}" if _is_formula(text) else text


def unescape_formula(cell: str) -> str:
    """The text that `escape_formula` made this cell of."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell[1:]) else cell


def _is_formula(text: str) -> bool:
    """Apostrophes in front do not count, so that every text comes back; numbers are no formulas."""
    if not text.lstrip("'").startswith(_FORMULA_STARTS):
        return False
    with contextlib.suppress(ValueError):
        float(text)
        return False
    return True
