"""Named tensors on disk: safetensors with a checksum, written beside the target and renamed into place.

A reader sees the old file or the new one, never half of one; a file that was cut or altered is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
from torch import Tensor

from kinfed.errors import StorageError

_DIGEST = "digest"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary sibling of `path`, then rename it to `path`."""
    sibling = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(sibling)
        with sibling.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(sibling, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise StorageError(f"cannot write {path}: {error}; free some space or choose another folder") from error
    finally:
        with contextlib.suppress(OSError):  # gone already, or its folder never came to be
            sibling.unlink()


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, lambda sibling: sibling.write_text(text, encoding="utf-8"))


def read_json(path: Path, wanted: str) -> dict[str, Any]:
    """The object in a JSON file; `wanted` says in errors what the file should be."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist; it should be {wanted}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StorageError(f"cannot read {path} as {wanted}: {error}") from error
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
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    checksum = digest(tensors)
    write_atomically(path, lambda sibling: safetensors.numpy.save_file(arrays, sibling, metadata={_DIGEST: checksum}))
    return checksum


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Tensors and checksum of a file made by `write_tensors`; StorageError for any other or damaged file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(_DIGEST)
        tensors = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise StorageError(f"{path} is damaged or not a safetensors file: {error}") from error
    if expected is None or digest(tensors) != expected:
        raise StorageError(f"{path} is damaged: its contents do not match its checksum; write it again")
    return tensors, expected
