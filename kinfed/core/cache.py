"""Things that are slow to make, kept in the cache folder: $KINFED_CACHE, else `kinfed` in the user's cache folder.

The name of a cached file holds an identity of all that its content depends on, so nothing is ever out of date. A file
that is damaged is made again, and a folder that cannot be written costs time, not the result: both are logged.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kinfed.core import storage
from kinfed.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_DIGEST = 16  # bytes


def cache_folder() -> Path:
    """A StorageError if the user has no home; anyone who can write to this folder decides what kinfed computes."""
    if configured := os.environ.get("KINFED_CACHE"):
        return Path(configured).expanduser()
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "kinfed"
    try:
        return Path.home() / ".cache" / "kinfed"
    except RuntimeError as error:
        raise StorageError(f"there is no cache folder ({error}); set KINFED_CACHE to one") from error


def cached(folder: str, name: str, make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of make(), read from <cache folder>/<folder>/<name>.safetensors where they are there already."""
    try:
        path = cache_folder() / folder / f"{storage.file_name(name)}.safetensors"
    except StorageError as error:
        log.warning("%s; %s will be made again next time", error, name)
        return dict(make())
    if path.exists():
        try:
            return storage.read_tensors(path)
        except StorageError as error:
            log.warning("%s; making it again", error)
    tensors = dict(make())
    try:
        storage.make_folder(path.parent)
        storage.write_tensors(path, tensors)
    except StorageError as error:
        log.warning("%s; %s will be made again next time", error, name)
    return tensors


def sealed(content: bytes, name: str) -> bytes:
    """Content behind a digest of itself and its name: for code, which must not be run where it is damaged."""
    return hashlib.blake2b(name.encode() + b"\0" + content, digest_size=_DIGEST).digest() + content


def unsealed(content: bytes, name: str) -> bytes | None:
    """None if that is not what was sealed under this name."""
    rest = content[_DIGEST:]
    return rest if sealed(rest, name) == content else None


def files_identity(files: Iterable[Path], version: str) -> str:
    """16 hexadecimal digits that change with the names, sizes or times of files, or the `version` of what is made."""
    state = hashlib.sha256(version.encode())
    for file in files:
        status = file.stat()
        state.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16]
