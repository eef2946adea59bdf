"""Encoded images (PNG, WebP, JPEG, ...) to one uint8 array.

Decoding stays in one thread: Pillow spends most of the time for small images holding the interpreter lock, and
two threads measured slower than one.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from kinfed.errors import DataError


def decode(images: Sequence[bytes | Path | None], where: str) -> Tensor:
    """uint8 [N, channels, height, width]; gray images have one channel, all others three (RGB).

    All must have the size of the first and be gray or coloured as it is; `where` names them in errors."""
    first = _pixels(images[0], 0, where)
    out = np.empty((len(images), *first.shape), np.uint8)
    out[0] = first
    for row in range(1, len(images)):
        pixels = _pixels(images[row], row, where)
        if pixels.shape != first.shape:
            sizes = f"the image in row {row} is {_size(pixels)}, the first one {_size(first)}"
            raise DataError(f"{where}: {sizes}; bring all images to one size and colour mode")
        out[row] = pixels
    stacked = torch.from_numpy(out)
    return stacked[:, None] if first.ndim == 2 else stacked.permute(0, 3, 1, 2).contiguous()


def encoded_values(column: pa.ChunkedArray, folder: Path, where: str) -> list[bytes | Path | None]:
    """Encoded images (or sounds) from a hub column (struct of bytes and path), bytes, or paths relative to `folder`."""
    kind = column.type
    if pa.types.is_struct(kind):
        values = [value or {} for value in column.to_pylist()]
        return [v.get("bytes") or (folder / v["path"] if v.get("path") else None) for v in values]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(column.to_pylist())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [None if path is None else folder / path for path in column.to_pylist()]
    raise DataError(f"{where}: images should be bytes, paths, or structs of both; got {kind}")


def _pixels(image: bytes | Path | None, row: int, where: str) -> np.ndarray[Any, Any]:
    if image is None:
        raise DataError(f"{where}: the image in row {row} is missing")
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            if opened.mode in ("I", "F") or opened.mode.startswith("I;"):
                raise DataError(f"{where}: the image in row {row} has more than 8 bits per pixel; convert it to 8 bits")
            gray = opened.mode in ("1", "L", "LA")
            return np.asarray(opened.convert("L" if gray else "RGB"))
    except FileNotFoundError:
        raise DataError(f"{where}: the image in row {row}, {image!s}, does not exist") from None
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise DataError(f"{where}: cannot decode the image in row {row}: {error}") from error


def _size(pixels: np.ndarray[Any, Any]) -> str:
    return f"{pixels.shape[1]}x{pixels.shape[0]} {'gray' if pixels.ndim == 2 else 'RGB'}"
