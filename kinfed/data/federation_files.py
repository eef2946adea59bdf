"""Tensors that carry a checksum of themselves: a file that was cut or altered is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from kinfed.core import storage
from kinfed.errors import StorageError

write_json = storage.write_json
_DIGEST = "digest"


def read_json(path: Path, wanted: str) -> dict[str, Any]:
    """The object in a JSON file; `wanted` says in errors what the file should be."""
    if not path.exists():
        raise StorageError(f"{path} does not exist; it should be {wanted}")
    content = storage.read_json(path)
    if not isinstance(content, dict):
        raise StorageError(f"{path} is not {wanted}: it holds a {type(content).__name__}, not an object")
    return content


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A checksum of names, types, shapes and contents."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).numpy().data)
    return state.hexdigest()[:32]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write and return the checksum, which the file also carries in its header."""
    checksum = digest(tensors)
    storage.make_folder(path.parent)
    storage.write_tensors(path, tensors, {_DIGEST: checksum})
    return checksum


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Tensors and checksum of a file made by `write_tensors`; StorageError for any other or damaged file."""
    if not path.exists():
        raise StorageError(f"{path} does not exist")
    tensors = storage.read_tensors(path)
    with safetensors.safe_open(path, framework="pt") as file:
        expected: str | None = (file.metadata() or {}).get(_DIGEST)
    if expected is None or digest(tensors) != expected:
        raise StorageError(f"{path} is damaged: its contents do not match its checksum; write it again")
    return tensors, expected
