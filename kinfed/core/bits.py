"""Masks as bits: eight columns in a byte, as messages carry them."""

from __future__ import annotations

import torch
from torch import Tensor

_PLACES = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
_ONES = torch.tensor([number.bit_count() for number in range(256)])  # set bits of every byte


def packed(mask: Tensor) -> Tensor:
    """[n, ⌈T/8⌉] uint8 of a mask [n, T]."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8))
    return (padded.reshape(len(mask), -1, 8) * _PLACES.to(mask.device)).sum(2, dtype=torch.uint8)


def unpacked(bits: Tensor, width: int) -> Tensor:
    """bool [..., width]: the columns behind those that were packed are False."""
    mask = (bits[..., None] & _PLACES.to(bits.device) > 0).flatten(-2)
    return torch.nn.functional.pad(mask[..., :width], (0, max(width - mask.shape[-1], 0)))


def count_bits(bits: Tensor) -> int:
    """How many bits are set in bytes of any shape."""
    return int((torch.bincount(bits.flatten().to("cpu", torch.int64), minlength=256) * _ONES).sum())
