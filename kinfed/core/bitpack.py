"""Masks and small numbers as bits: eight columns, or a few codes, in a byte, as messages carry them."""

import numpy as np
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
    """Number of bits that are set in bytes of any shape."""
    return int((torch.bincount(bits.flatten().to("cpu", torch.int64), minlength=256) * _ONES).sum())


def pack_numbers(numbers: Tensor, width: int) -> Tensor:
    """uint8 [n, ⌈d width/8⌉] of whole numbers [n, d] in [0, 2^width), the lowest bit of each first."""
    values = numbers.cpu().numpy().astype(np.uint32)
    bits = (values[:, :, None] >> np.arange(width, dtype=np.uint32)).astype(np.uint8) & 1
    return torch.from_numpy(np.packbits(bits.reshape(len(values), -1), axis=1, bitorder="little"))


def unpack_numbers(code: Tensor, count: int, width: int) -> Tensor:
    """int64 [n, count]: the inverse of `pack_numbers`."""
    bits = np.unpackbits(code.numpy(), axis=1, count=count * width, bitorder="little")
    places = np.int64(1) << np.arange(width, dtype=np.int64)
    return torch.from_numpy(bits.reshape(len(bits), count, width) @ places)
