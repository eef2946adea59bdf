"""Where two trees of plain values and tensors differ, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_ABSENT = object()


def differences(
    a: Any, b: Any, tolerance: float = 0.0, names: tuple[str, str] = ("there", "now"), where: str = ""
) -> Iterator[str]:
    """Sentences such as "rounds: 60 there, 30 now" for every leaf in which two trees of values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{where}.{key}" if where else str(key)
            yield from differences(a.get(key, _ABSENT), b.get(key, _ABSENT), tolerance, names, inner)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, tolerance, names, f"{where}[{index}]")
    elif not _equal(a, b, tolerance):
        yield f"{where}: {_shown(a)} {names[0]}, {_shown(b)} {names[1]}"


def _equal(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        return torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or abs(a - b) <= tolerance
    return type(a) is type(b) and bool(a == b)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, Tensor):
        mean = value.double().mean().item() if value.numel() else 0.0
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} with mean {mean!r}"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
