"""Masks as bits."""

from __future__ import annotations

import torch

from kinfed.core.bitpack import count_bits, packed, unpacked


def test_masks_travel_as_bits() -> None:
    for width in (1, 7, 8, 9, 20):
        rows = torch.arange(3 * width).reshape(3, width) % 5 < 2
        bits = packed(rows)
        assert bits.dtype == torch.uint8
        assert bits.shape == (3, (width + 7) // 8)
        assert torch.equal(unpacked(bits, width), rows)
        wider = unpacked(bits, width + 30)  # running statistics behind are never critical
        assert torch.equal(wider[:, :width], rows)
        assert not bool(wider[:, width:].any())
        assert count_bits(bits) == int(rows.sum())
